"""Datasets of the model and of its null models, joined along `init`: a Result."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from tl_posgen.core.measure import Measure
from tl_posgen.core.numbers import TRAINED
from tl_posgen.core.result import Result
from tl_posgen.models.loading.null_kinds import in_order


def result_of(measure: Measure, datasets: Mapping[str, xr.Dataset], provenance: Mapping[str, Any]) -> Result:
    """Return the result of one measure: datasets of the model and of its null models, by label along `init`, where
    random inits stand before shuffled weights in whichever order they were made."""
    options = {"options": measure.options()} if measure.options() else {}
    datasets = {init: datasets[init] for init in (TRAINED, *in_order(init for init in datasets if init != TRAINED))}
    labels = [str(data.attrs["model"]) for data in datasets.values()]
    kind = measure.result_class or Result
    return kind(measure, joined(measure, datasets, labels), {**provenance, **options})


def joined(measure: Measure, datasets: Mapping[str, xr.Dataset], labels: Sequence[str]) -> xr.Dataset:
    """Return the datasets of the model and of its random inits as one along `init`, groups of prompts of the model.

    A variable that a random init lacks has no dim init.

    Args:
        datasets: by label along `init`, the model first.
        labels: the model's name, and which random init each is.
    """
    model, *nulls = (data.drop_vars("prompt_share", errors="ignore") for data in datasets.values())
    shares = next(iter(datasets.values())).coords.get("prompt_share")
    names = [name for name in model.data_vars if all(name in null for null in nulls)]
    shared: Any = xr.concat(
        [data[names] for data in (model, *nulls)], "init", data_vars="all", join="outer", combine_attrs="override"
    )
    sorted_only = [dim for dim in model.dims if dim in model.coords and model.sizes[dim] == shared.sizes.get(dim)]
    shared = shared.reindex({dim: model[dim] for dim in sorted_only})
    merged = shared.merge(model[[name for name in model.data_vars if name not in names]], combine_attrs="override")
    merged = merged.assign_coords(init=list(datasets), init_label=("init", list(labels)))
    if shares is not None:
        merged = merged.assign_coords(prompt_share=("group", shares.values))
    attrs = {name: value for name, value in model.attrs.items() if name != "model"}
    return measure.describe(contiguous(merged).assign_attrs(attrs))


def contiguous(data: xr.Dataset) -> xr.Dataset:
    """Return the dataset with every array stored in the order of its dims, as a file gives it back: sums of both then
    round alike."""
    return data.assign(
        {name: array.copy(data=np.asarray(array.values, order="C")) for name, array in data.data_vars.items()}
    )
