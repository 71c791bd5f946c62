"""Numbers of many models: which are kept of a result, and which are followed over checkpoints and models."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr

from tl_posgen.core.measure import HEAD
from tl_posgen.core.numbers import MOST_LABELS, NUMBER_DIMS, Numbers
from tl_posgen.core.result import Result

_MOST_OTHERS = 3  # numbers followed of a measure that is not named here


@dataclass(frozen=True)
class Followed:
    """A number that is followed over checkpoints or models: the mean over heads, or over what else it ranges.

    Attributes:
        name: of the variable, "<measure>_<its name there>".
        label: above its panel and its column.
        sentence: how a sentence on it begins; "" for none.
        form: of the number there.
        at: labels of the variable's dims.
    """

    name: str
    label: str
    sentence: str = ""
    form: str = ".3f"
    at: Mapping[str, Any] = field(default_factory=dict)

    def array(self, numbers: Numbers) -> xr.DataArray:
        """Return its array, with the dims init, group or prompt, of heads, and those of the study."""
        return numbers.array(self.name, **self.at)


ALIGNED = {"version": "absolute", "bases": "aligned"}
_LATER = {"tokens": "without first"}
FOLLOWED = {
    "three_axis": (
        Followed("three_axis_r", "r"),
        Followed(
            "three_axis_r_within_rows", "r within rows", "The correlation within rows with position + query + key"
        ),
    ),
    "variance": (
        Followed(
            "variance_position", "position", "The share of position in the variance that softmax can see", ".0%", _LATER
        ),
        Followed("variance_content", "content", form=".0%", at=_LATER),
        Followed("variance_interaction", "interaction", "The share of interaction", ".0%", _LATER),
    ),
    "loss": (Followed("loss_loss", "loss", "The loss in nats per token"),),
    "mean_key": (),  # follows three_axis
    "slash": (Followed("slash_score", "slash"),),
    "coupling": (
        Followed("coupling_coupling", "coupling", "Coupling", at=ALIGNED),
        Followed("coupling_chance", "random bases", "Coupling of random bases", at={"version": "absolute"}),
        Followed("coupling_line_shape_score", "line-shape score", "The line-shape score"),
        Followed("coupling_growth_r2", "R² of growth", "R² of exponential growth"),
        Followed("coupling_expodistance", "expodistance", "Expodistance"),
    ),
}


def numbers_of(results: Iterable[Result]) -> xr.Dataset:
    """Return the numbers of one model's results as "<measure>_<variable>", or the variable alone where it begins with
    its measure's name: of every head, or means over all but heads.

    Dims are init, group or prompt, tokens, side, layer and head, and dims whose labels are words; along others a
    variable is taken at its measure's usual label, or averaged. A variable that has a curve for every head is left out.
    """
    headlines: dict[str, xr.DataArray] = {}
    other_variables: dict[str, xr.DataArray] = {}
    for result in results:
        usual = {**result.measure.usual(), "end": "value"}
        for name, array in result.dataset.data_vars.items():
            if array.dtype.kind not in "fiub":
                continue
            few = [dim for dim in array.dims if dim in array.coords and array.sizes[dim] <= MOST_LABELS]
            worded = [
                dim for dim in few if array[dim].dtype.kind in "OU" and dim not in NUMBER_DIMS
            ]  # such as conditions
            array = array.drop_vars("init_label", errors="ignore").astype(float)
            array = array.sel({dim: usual[dim] for dim in array.dims if dim in usual and dim not in worded}, drop=True)
            over = [dim for dim in array.dims if dim not in (*NUMBER_DIMS, "tokens", "side", *worded)]
            if set(HEAD) <= set(over):
                over = [dim for dim in over if dim not in HEAD]
                if over:
                    continue
            array = array.mean([*over, *(dim for dim in array.dims if dim == "item")])
            without_scalars = array.drop_vars([name for name, coord in array.coords.items() if not coord.ndim])
            variable = result.measure.variables.get(str(name))
            attrs = {"measure": result.name, "long_name": variable.label if variable else str(name)}
            attrs["range"] = list(map(float, variable.bounds if variable and variable.bounds else ()))
            place = headlines if variable and variable.headline else other_variables
            full = str(name) if str(name).startswith(f"{result.name}_") else f"{result.name}_{name}"
            place[full] = without_scalars.assign_attrs(attrs)
    return xr.Dataset({**headlines, **other_variables})


def followed(data: xr.Dataset) -> list[Followed]:
    """Return what is followed of every measure in the data; the first few numbers of a measure that names none."""
    curves = []
    for measure in np.atleast_1d(data.attrs["measures"]):
        names = [str(name) for name, array in data.data_vars.items() if array.attrs.get("measure") == measure]
        if measure in FOLLOWED:
            curves += [curve for curve in FOLLOWED[measure] if curve.name in names]
        else:
            labels = {name: name.replace("_", " ") for name in names[:_MOST_OTHERS]}
            curves += [Followed(name, label, label[:1].upper() + label[1:]) for name, label in labels.items()]
    return curves
