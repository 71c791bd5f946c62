"""Numbers of many models: which are kept of a result, which are followed, and when one has changed half of its way."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float

from tl_posgen.core.measure import HEAD
from tl_posgen.core.numbers import KEPT, MOST_LABELS, Numbers
from tl_posgen.core.result import Result

_MOST_OTHERS = 3  # numbers followed of a measure that has no curves here


@dataclass(frozen=True)
class Curve:
    """A number that is followed over checkpoints or models: the mean over heads, or over what else it ranges.

    Attributes:
        name: of the variable, "<measure>_<its name there>".
        label: above its panel and its column.
        sentence: how a sentence on it begins; "" for none.
        form: of the number there.
        at: labels of the variable's dims.
        chance: labels of what random bases reach, in the variable "<measure>_chance"; None for none.
    """

    name: str
    label: str
    sentence: str = ""
    form: str = ".3f"
    at: Mapping[str, Any] = field(default_factory=dict)
    chance: Mapping[str, Any] | None = None

    def array(self, own: Numbers, **labels: Any) -> xr.DataArray:
        """Return its array, with the dims init, group or prompt, of heads, and those of the study."""
        return own.array(self.name, **{**self.at, **labels})

    def random_bases(self, own: Numbers) -> xr.DataArray:
        """Return what random bases reach, of a curve that has that."""
        return own.array(f"{self.name.split('_')[0]}_chance", **(self.chance or {}))


ALIGNED = {"version": "absolute", "bases": "aligned"}
_LATER = {"tokens": "without first"}
CURVES = {
    "three_axis": (
        Curve("three_axis_r", "r"),
        Curve("three_axis_r_within_rows", "r within rows", "The correlation within rows with position + query + key"),
    ),
    "variance": (
        Curve(
            "variance_position", "position", "The share of position in the variance that softmax can see", ".0%", _LATER
        ),
        Curve("variance_content", "content", form=".0%", at=_LATER),
        Curve("variance_interaction", "interaction", "The share of neither position nor content", ".0%", _LATER),
    ),
    "loss": (Curve("loss_loss", "loss", "The loss in nats per token"),),
    "mean_key": (),  # follows three_axis
    "slash": (Curve("slash_best_score", "slash"),),
    "coupling": (
        Curve("coupling_coupling", "coupling", "Coupling", at=ALIGNED, chance={"version": "absolute"}),
        Curve("coupling_line_shape_score", "line-shape score", "The line-shape score"),
        Curve("coupling_growth_r2", "R² of growth", "R² of exponential growth"),
        Curve("coupling_expodistance", "expodistance", "Expodistance"),
    ),
}


def numbers_of(results: Iterable[Result]) -> xr.Dataset:
    """Return the numbers of one model's results as "<measure>_<variable>": of every head, or means over all but heads.

    Dims are init, group or prompt, tokens, side, layer and head, and dims whose labels are words; along others a
    variable is taken at its measure's usual label, or averaged. A variable that has a curve for every head is left out.
    """
    headlines: dict[str, xr.DataArray] = {}
    others: dict[str, xr.DataArray] = {}
    for result in results:
        usual = {**result.measure.usual(), "end": "value"}
        for name, array in result.dataset.data_vars.items():
            if array.dtype.kind not in "fiub":
                continue
            few = [dim for dim in array.dims if dim in array.coords and array.sizes[dim] <= MOST_LABELS]
            worded = [dim for dim in few if array[dim].dtype.kind in "OU" and dim not in KEPT]  # such as conditions
            array = array.drop_vars("init_label", errors="ignore").astype(float)
            array = array.sel({dim: usual[dim] for dim in array.dims if dim in usual and dim not in worded}, drop=True)
            over = [dim for dim in array.dims if dim not in (*KEPT, "tokens", "side", *worded)]
            if set(HEAD) <= set(over):
                over = [dim for dim in over if dim not in HEAD]
                if over:
                    continue
            array = array.mean([*over, *(dim for dim in array.dims if dim == "item")])
            kept = array.drop_vars([name for name, coord in array.coords.items() if not coord.ndim])
            variable = result.measure.variables.get(str(name))
            words = {"measure": result.name, "long_name": variable.label if variable else str(name)}
            words["range"] = list(map(float, variable.bounds if variable and variable.bounds else ()))
            place = headlines if variable and variable.headline else others
            place[f"{result.name}_{name}"] = kept.assign_attrs(words)
    return xr.Dataset({**headlines, **others})


def followed(data: xr.Dataset) -> list[Curve]:
    """Return the curves of every measure in the data; the first few numbers of a measure that has none."""
    found = []
    for measure in np.atleast_1d(data.attrs["measures"]):
        names = [str(name) for name, array in data.data_vars.items() if array.attrs.get("measure") == measure]
        if measure in CURVES:
            found += [curve for curve in CURVES[measure] if curve.name in names]
        else:
            words = {name: name.replace("_", " ") for name in names[:_MOST_OTHERS]}
            found += [Curve(name, label, label[:1].upper() + label[1:]) for name, label in words.items()]
    return found


def half_way(values: Float[np.ndarray, " checkpoint"]) -> tuple[int, int]:
    """Return the first checkpoint past the middle between the first and the last value, and that from which all are.

    Example:
        >>> half_way(np.array([0.37, 0.69, 0.42, 0.61, 0.72]))
        (1, 3)
    """
    change = values - values[0]
    past = change / change[-1] >= 0.5 if change[-1] else change == 0
    before = (~past).nonzero()[0]
    return int(past.argmax()), int(before[-1]) + 1 if len(before) else 0
