"""Which numbers are followed over training, and when a number has changed half of its way."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float

from tl_posgen.result import Result

PER_HEAD = ("layer", "head")
MOST_OTHERS = 3  # numbers followed of a measure that has no curves here


@dataclass(frozen=True)
class Curve:
    """A number over checkpoints; of a per-head number its mean over heads.

    Attributes:
        name: of the variable, "<measure>_<its name there>".
        label: above its panel and its column.
        told: how a sentence begins that tells it; "" for none.
        form: of the number there.
        chance: the variable that holds what random bases reach; "" for none.
        control: drawn among the controls only.
        column: whether the short table has it.
    """

    name: str
    label: str
    told: str = ""
    form: str = ".3f"
    chance: str = ""
    control: bool = False
    column: bool = True


CURVES = {
    "three_axis": (
        Curve("three_axis_r", "r"),
        Curve("three_axis_r_within_rows", "r within rows", "The correlation within rows with position + query + key"),
    ),
    "variance": (
        Curve("variance_position", "position", "The share of position in the variance that softmax can see", ".0%"),
        Curve("variance_content", "content"),
        Curve("variance_interaction", "interaction", "The share of neither position nor content", ".0%"),
    ),
    "loss": (Curve("loss_loss", "loss", "The loss in nats per token"),),
    "mean_key": (),  # follows three_axis
    "slash": (Curve("slash_best_score", "slash"),),
    "coupling": (
        Curve("coupling_coupling", "coupling", "Coupling", chance="coupling_chance"),
        Curve("coupling_line_shape_score", "line-shape score", "The line-shape score"),
        Curve("coupling_growth_r2", "R² of growth", "R² of exponential growth"),
        Curve("coupling_expodistance", "expodistance", "Expodistance"),
        Curve("coupling_swapped", "swapped coupling", control=True),
        Curve("coupling_trace", "trace normalisation", control=True, column=False),
        Curve("coupling_growth_slope", "growth per layer", control=True, column=False),
        Curve("coupling_linearisation", "linearisation", control=True, column=False),
    ),
}
BY_NAME = {curve.name: curve for curves in CURVES.values() for curve in curves}


def numbers_in(results: Iterable[Result], null: int | None = None) -> dict[str, Any]:
    """What results say of one model, under names of their own, headlines first, as variables of a dataset: every
    per-head number as "<measure>_<variable>" [layer, head], every other number of a summary as "<measure>_<key>".

    Args:
        null: of which random init; of the model itself, if left out.
    """
    data: dict[str, Any] = {}
    for result in results:
        name, dataset = result.name, result.own if null is None else result.nulls[null]
        arrays = {str(key): array for key, array in dataset.data_vars.items() if set(array.dims) == set(PER_HEAD)}
        declared = result.measure.variables
        for key in sorted(arrays, key=lambda key: not (key in declared and declared[key].headline)):
            array = arrays[key].drop_vars(set(arrays[key].coords) - set(PER_HEAD)).transpose(*PER_HEAD)
            data[f"{name}_{key}"] = array.assign_attrs(measure=name)
        for key, value in result.measure.summarise(dataset).items():
            is_number = value is None or (isinstance(value, int | float) and not isinstance(value, bool))
            if is_number and f"{name}_{key}" not in data:  # a per-head number says more
                words = {"measure": name, "long_name": key.replace("_", " ")}
                data[f"{name}_{key}"] = ((), np.nan if value is None else float(value), words)
    return data


def followed(data: xr.Dataset) -> list[Curve]:
    """The curves of every measure in the data; the first few numbers of a measure that has none."""
    found = []
    for measure in np.atleast_1d(data.attrs["measures"]):
        of_measure = [str(name) for name, array in data.data_vars.items() if array.attrs.get("measure") == measure]
        if measure in CURVES:
            found += [curve for curve in CURVES[measure] if curve.name in of_measure]
        else:
            found += [curve_of(name) for name in of_measure[:MOST_OTHERS]]
    return found


def curve_of(name: str) -> Curve:
    words = name.replace("_", " ")
    return BY_NAME.get(name) or Curve(name, words, words[:1].upper() + words[1:])


def values_of(data: xr.Dataset, name: str) -> Float[np.ndarray, " checkpoint"]:
    """A number at every checkpoint; the mean over heads of one that every head has."""
    array = data[name]
    return (array.mean(PER_HEAD) if "head" in array.dims else array).values.astype(np.float64)


def interval_of(data: xr.Dataset, name: str) -> dict[str, Float[np.ndarray, " checkpoint"]]:
    """The ends of the 95% interval of a model's number, by name; empty for a mean over heads, which has none."""
    ends = {end: f"{name}_{end}" for end in ("low", "high")}
    known = "head" not in data[name].dims and all(bound in data for bound in ends.values())
    return {end: values_of(data, bound) for end, bound in ends.items()} if known else {}


def half_way(values: Float[np.ndarray, " checkpoint"]) -> tuple[int, int]:
    """The first checkpoint past the middle between the first and the last value, and that from which all are.

    Example:
        >>> half_way(np.array([0.37, 0.69, 0.42, 0.61, 0.72]))
        (1, 3)
    """
    change = values - values[0]
    past = change / change[-1] >= 0.5 if change[-1] else change == 0
    before = (~past).nonzero()[0]
    return int(past.argmax()), int(before[-1]) + 1 if len(before) else 0
