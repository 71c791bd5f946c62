"""Datasets of the model and of its null models, joined along `init`: a Result."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from tl_posgen.core.measure import Measure
from tl_posgen.core.numbers import TRAINED
from tl_posgen.core.result import Result
from tl_posgen.models.loading.null_kinds import in_order


def result_of(measure: Measure, sides: Mapping[str, xr.Dataset], provenance: Mapping[str, Any]) -> Result:
    """Return the result of one measure: datasets of the model and of its null models, by label along `init`, where
    random inits stand before shuffled weights in whichever order they were made."""
    options = {"options": measure.options()} if measure.options() else {}
    sides = {init: sides[init] for init in (TRAINED, *in_order(init for init in sides if init != TRAINED))}
    labels = [str(data.attrs["model"]) for data in sides.values()]
    return Result(measure, joined(measure, sides, labels), {**provenance, **options})


def joined(measure: Measure, sides: Mapping[str, xr.Dataset], labels: Sequence[str]) -> xr.Dataset:
    """Return the datasets of the model and of its random inits as one along `init`, groups of prompts of the model.

    A variable that a random init lacks has no dim init.

    Args:
        sides: by label along `init`, the model first.
        labels: the model's name, and which random init each is.
    """
    own, *nulls = (side.drop_vars("prompt_share", errors="ignore") for side in sides.values())
    shares = next(iter(sides.values())).coords.get("prompt_share")
    names = [name for name in own.data_vars if all(name in null for null in nulls)]
    both: Any = xr.concat(
        [side[names] for side in (own, *nulls)], "init", data_vars="all", join="outer", combine_attrs="override"
    )
    sorted_only = [dim for dim in own.dims if dim in own.coords and own.sizes[dim] == both.sizes.get(dim)]
    both = both.reindex({dim: own[dim] for dim in sorted_only})
    whole = both.merge(own[[name for name in own.data_vars if name not in names]], combine_attrs="override")
    whole = whole.assign_coords(init=list(sides), init_label=("init", list(labels)))
    if shares is not None:
        whole = whole.assign_coords(prompt_share=("group", shares.values))
    attrs = {name: value for name, value in own.attrs.items() if name != "model"}
    return measure.describe(contiguous(whole).assign_attrs(attrs))


def contiguous(data: xr.Dataset) -> xr.Dataset:
    """Return the dataset with every array stored in the order of its dims, as a file gives it back: sums of both then
    round alike."""
    return data.assign({name: one.copy(data=np.asarray(one.values, order="C")) for name, one in data.data_vars.items()})
