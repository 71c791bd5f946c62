"""Data of the page's panel of one head: every head's numbers, and its curves at few places."""

import base64
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import xarray as xr

from tl_posgen.core.measure import HEAD
from tl_posgen.core.report import Report
from tl_posgen.core.result import Result
from tl_posgen.models.loading.null_kinds import NULL_KINDS
from tl_posgen.models.selection import head_name
from tl_posgen.report.figures import at_usual_labels, model_name, ticks_from_zero
from tl_posgen.report.tables import title

_VALUES = 250_000  # of one curve over all heads
LONGEST, _SHORTEST = 96, 24  # points of a head's curve
_LOGARITHMIC = ("distance", "d0")  # on a logarithmic axis, of which zero is a part


def heads_of(results: Mapping[str, Result]) -> dict[str, Any] | None:
    """Return names, numbers beside those of null models, and curves of all heads, JSON-ready; None for a report without
    a row per head. The first head to show is that with most of a ranked quantity, such as position.

    The numbers are the headlines of the per-head table; the curves and the maps between tokens are those that measures
    declare in `Measure.curves` and `Measure.patterns`, a curve for each label of a dim, besides the last, that has no
    usual label.
    """
    report = Report(results, {})
    table = report.frame()
    if table.empty:
        return None
    kinds = [kind for kind in NULL_KINDS if any(kind in result.by_kind for result in results.values())]
    nulls = [table[[*HEAD]].merge(report.frame(kind), on=[*HEAD], how="left") for kind in kinds]
    places = list(zip(table["layer"].astype(int), table["head"].astype(int), strict=True))
    labels = {name: label for result in results.values() for name, (_, label) in result.headline_labels().items()}
    numbers = [
        {
            "label": labels.get(name, title(name)),
            "values": [_rounded(value) for value in table[name]],
            "nulls": [[_rounded(value) for value in null[name]] if name in null else None for null in nulls],
        }
        for name in table.columns[2:]
    ]
    curves = []
    for result in results.values():
        is_per_head = {"layer", "head"} <= set(result.measure.rows)
        for name in result.measure.curves if is_per_head else ():
            if name in result.trained:
                along = str(result.trained[name].dims[-1])
                array = at_usual_labels(result, result.trained[name], {along: slice(None)})
                over = [str(dim) for dim in array.dims if dim not in ("layer", "head", along)]
                for place in product(*(array[dim].values.tolist() for dim in over)):
                    curves.append(_curve_of(result, name, along, dict(zip(over, place, strict=True)), places))
    names = [head_name(*place) for place in places]
    variables = [variable for result in results.values() for variable in result.measure.variables.values()]
    ranked = [variable.headline for variable in variables if variable.ranked and variable.headline in table]
    defined = [name for name in ranked if table[name].notna().any()]
    first = names[int(table[defined[0]].argmax())] if defined else names[0]
    patterns = [_patterns_of(result, names) for result in results.values() if result.measure.patterns in result.trained]
    return {"names": names, "first": first, "nulls": kinds, "numbers": numbers, "curves": curves, "patterns": patterns}


def _patterns_of(result: Result, names: Sequence[str]) -> dict[str, Any]:
    """Return the maps between tokens of every head, in steps of 1 / 255, a byte a value."""
    array = result.trained[result.measure.patterns]
    kind, unit = array.dims[:2]
    maps = array.reindex({unit: list(names)}).fillna(0).transpose(unit, ...).values
    tokens = [str(token) for token in result.trained["token"].values[: maps.shape[-1]]]
    steps = base64.b64encode(np.round(255 * np.clip(maps, 0, 1)).astype(np.uint8).tobytes()).decode()
    has_maps = [name in array[unit] for name in names]
    return {"kinds": array[kind].values.tolist(), "tokens": tokens, "steps": steps, "known": has_maps}


def _rounded(value: int | float) -> float | None:
    """Round to four digits; None for a value that is not finite."""
    return float(f"{value:.4g}") if np.isfinite(value) else None


def _curve_of(
    result: Result, name: str, along: str, labels: Mapping[str, Any], places: list[tuple[int, int]]
) -> dict[str, Any]:
    """Return the curve of every head at these labels, thinned, and the span of the first random init's heads; on a
    logarithmic axis long distances are thinned most."""
    most, log = int(np.clip(_VALUES // len(places), _SHORTEST, LONGEST)), along in _LOGARITHMIC

    def rows(data: xr.Dataset) -> xr.DataArray:
        array = at_usual_labels(result, data[name], {along: slice(None), **labels})
        n = array.sizes[along]
        if along not in array.coords:
            array = array.assign_coords({along: np.arange(n)})
        if n > most:
            spread = np.geomspace(1, n, most).round() - 1 if log else np.linspace(0, n - 1, most).round()
            array = array.isel({along: np.unique(spread.astype(int))})
        return array.stack(unit=("layer", "head")).transpose("unit", along)

    of_model = rows(result.trained)
    by_place = dict(zip(of_model["unit"].values, of_model.values, strict=True))
    empty = np.full(of_model.shape[1], np.nan)
    variable = result.measure.variables.get(name)
    heading = ", ".join([variable.label if variable else name, *map(str, labels.values())])
    null = None if result.null is None else rows(result.null)
    span = None
    if null is not None and np.isfinite(null.values).any(0).all() and null.shape[1] == of_model.shape[1]:
        ends = {"low": np.nanmin(null.values, 0), "high": np.nanmax(null.values, 0)}
        span = {side: [_rounded(value) for value in end] for side, end in ends.items()}
    return {
        "title": f"{heading} · {model_name(result.trained)}",
        "along": along,
        "ticks": ticks_from_zero(float(of_model[along].values[-1])) if log else None,
        "x": [float(x) + log for x in of_model[along].values],
        "rows": [[_rounded(value) for value in by_place.get(place, empty)] for place in places],
        "null": span,
    }
