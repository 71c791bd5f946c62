"""Numbers of many models: which are kept of a result, which are followed, and when one has changed half of its way."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float

from tl_posgen.core.measure import HEAD
from tl_posgen.core.numbers import KEPT, MOST_LABELS, Bounds, Numbers
from tl_posgen.core.result import Result

MOST_OTHERS = 3  # numbers followed of a measure that has no curves here
OF_HEADS = ("tokens", "side")


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
        control: drawn among the controls only.
        column: whether the short table has it.
    """

    name: str
    label: str
    sentence: str = ""
    form: str = ".3f"
    at: Mapping[str, Any] = field(default_factory=dict)
    chance: Mapping[str, Any] | None = None
    control: bool = False
    column: bool = True


ALIGNED = {"version": "absolute", "bases": "aligned"}
SWAPPED, TRACE = {**ALIGNED, "bases": "swapped"}, {**ALIGNED, "version": "trace"}
LATER = {"tokens": "without first"}
CURVES = {
    "three_axis": (
        Curve("three_axis_r", "r"),
        Curve("three_axis_r_within_rows", "r within rows", "The correlation within rows with position + query + key"),
    ),
    "variance": (
        Curve(
            "variance_position", "position", "The share of position in the variance that softmax can see", ".0%", LATER
        ),
        Curve("variance_content", "content", form=".0%", at=LATER),
        Curve("variance_interaction", "interaction", "The share of neither position nor content", ".0%", LATER),
    ),
    "loss": (Curve("loss_loss", "loss", "The loss in nats per token"),),
    "mean_key": (),  # follows three_axis
    "slash": (Curve("slash_best_score", "slash"),),
    "coupling": (
        Curve("coupling_coupling", "coupling", "Coupling", at=ALIGNED, chance={"version": "absolute"}),
        Curve("coupling_line_shape_score", "line-shape score", "The line-shape score"),
        Curve("coupling_growth_r2", "R² of growth", "R² of exponential growth"),
        Curve("coupling_expodistance", "expodistance", "Expodistance"),
        Curve("coupling_coupling", "swapped coupling", at=SWAPPED, control=True),
        Curve("coupling_coupling", "trace normalisation", at=TRACE, control=True, column=False),
        Curve("coupling_growth_slope", "growth per layer", control=True, column=False),
        Curve("coupling_linearisation", "linearisation", control=True, column=False),
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
        for name, array in result.dataset.data_vars.items():
            if array.dtype.kind not in "fiub" or (kept := kept_number(result, array)) is None:
                continue
            variable = result.measure.variables.get(str(name))
            words = {"measure": result.name, "long_name": variable.label if variable else str(name)}
            bounds = variable.bounds if variable and variable.bounds else ()
            place = headlines if variable and variable.headline else others
            place[f"{result.name}_{name}"] = kept.assign_attrs({**words, "range": list(map(float, bounds))})
    return xr.Dataset({**headlines, **others})


def kept_number(result: Result, array: xr.DataArray) -> xr.DataArray | None:
    """Return the part of a variable that a study keeps; None of one that it does not."""
    worded = [dim for dim in array.dims if is_worded(array, dim)]
    usual = {dim: label for dim, label in result.measure.usual().items() if dim in array.dims and dim not in worded}
    usual |= {"end": "value"} if "end" in array.dims else {}
    array = array.drop_vars("init_label", errors="ignore").astype(float).sel(usual, drop=True)
    others = [dim for dim in array.dims if dim not in (*KEPT, *OF_HEADS, *worded)]
    if set(HEAD) <= set(others):
        others = [dim for dim in others if dim not in HEAD]
        if others:
            return None
    array = array.mean(others).mean([dim for dim in ("item",) if dim in array.dims])
    return array.drop_vars([name for name, coord in array.coords.items() if not coord.ndim])


def is_worded(array: xr.DataArray, dim: Any) -> bool:
    """Return whether a dim has a few labels that are words, such as conditions."""
    return dim not in KEPT and dim in array.coords and array[dim].dtype.kind in "OU" and array.sizes[dim] <= MOST_LABELS


def followed(data: xr.Dataset) -> list[Curve]:
    """Return the curves of every measure in the data; the first few numbers of a measure that has none."""
    found = []
    for measure in np.atleast_1d(data.attrs["measures"]):
        names = [str(name) for name, array in data.data_vars.items() if array.attrs.get("measure") == measure]
        if measure in CURVES:
            found += [curve for curve in CURVES[measure] if curve.name in names]
        else:
            words = {name: name.replace("_", " ") for name in names[:MOST_OTHERS]}
            found += [Curve(name, label, label[:1].upper() + label[1:]) for name, label in words.items()]
    return found


def array_of(own: Numbers, curve: Curve, **labels: Any) -> xr.DataArray:
    """Return the array of a curve: means over heads, with the dims init, group or prompt, and those of the study."""
    at = {dim: label for dim, label in {**curve.at, **labels}.items() if dim in own.dataset[curve.name].dims}
    array, rows = own.array(curve.name, **at), [dim for dim in own.measure.rows if dim not in HEAD]
    return array.mean([dim for dim in array.dims if dim not in (*KEPT, *rows)])


def chance_array(own: Numbers, curve: Curve) -> xr.DataArray:
    """Return what random bases reach where a curve has that."""
    name = f"{curve.name.split('_')[0]}_chance"
    return array_of(own, Curve(name, name, at=curve.chance or {}))


def bounds_in(own: Numbers, curve: Curve) -> Bounds | None:
    """Return the bounds of a curve's number."""
    found = np.atleast_1d(own.dataset[curve.name].attrs.get("range", []))
    return (float(found[0]), float(found[1])) if len(found) == 2 else None


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
