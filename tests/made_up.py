"""Results whose numbers are given."""

from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr

from tl_posgen.core.inits import joined
from tl_posgen.core.measure import ENDS, TOKENS, Measure
from tl_posgen.core.numbers import TRAINED
from tl_posgen.core.result import Result

COMMON = {"end": list(ENDS), "tokens": list(TOKENS), "side": ["q", "k"]}


def dataset_of(variables: dict[str, tuple[tuple[str, ...], Any]], **labels: Any) -> xr.Dataset:
    """Variables by name, each a tuple of its dims and an array; labels of the dims beside those that all share."""
    used = {dim for dims, _ in variables.values() for dim in dims}
    coords = {dim: one for dim, one in {**COMMON, **labels}.items() if dim in used or dim in labels}
    return xr.Dataset({name: (dims, np.asarray(array)) for name, (dims, array) in variables.items()}, coords)


def result_of(measure: Measure, own: xr.Dataset, *inits: xr.Dataset, **provenance: Any) -> Result:
    """A result of the model's dataset and those of its random inits."""
    sides = {TRAINED: own, **{str(seed): one for seed, one in enumerate(inits)}}
    return Result(measure, joined(measure, sides, ["made up", *map(str, range(len(inits)))]), provenance)


def grown(result: Result, n_layers: int = 48, n_heads: int = 40) -> Result:
    """The result as if its model had so many layers and heads: its own, again and again."""
    sizes = {**dict.fromkeys(("layer", "layer_2", "model_layer"), n_layers), "state": n_layers + 1}
    data = result.dataset
    for dim, n in (sizes | dict.fromkeys(("head", "key_value_head"), n_heads)).items():
        if dim in data.dims:
            data = data.isel({dim: np.arange(n) % data.sizes[dim]}).assign_coords({dim: np.arange(n)})
    return replace(result, dataset=data)


def around(value: float, half: float) -> list[float]:
    """A value and the ends of its interval, along the dim "end"."""
    return [value, value - half, value + half]


def beside_itself(result: Result, null: str) -> Result:
    """A result whose only null model, with this label, is the model itself."""
    data = result.dataset.sel(init=[TRAINED, TRAINED]).assign_coords(init=[TRAINED, null])
    return replace(result, dataset=data)
