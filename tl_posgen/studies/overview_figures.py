"""Figures of a study: models side by side, what conditions do, over revisions."""

from itertools import product
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.core.measure import ENDS
from tl_posgen.models.loading.null_kinds import NULL_KINDS
from tl_posgen.report.figures import COLOURS, SYMBOLS, Panels, error_bars, model_label, plain
from tl_posgen.studies.curves import at_last_revision, effects_in, followed, has_numbers, is_per_token, same_tokens

MEANS = "means over heads and texts"
AT_LAST = f"at the last revision; {MEANS}"
_MOST_ROWS = 40  # conditions in a panel


def panels_of_models(result: Any, against_size: bool = False) -> dict[str, list[Any]]:
    """Return a panel a followed number, at each model's last revision; none that would be empty. Against size, none of
    a single model, and none in nats per token of unlike tokens."""
    panels, is_unlike = {}, len(same_tokens(result.trained)) > 1
    for curve in followed(result.dataset):
        array, is_of_own_tokens = at_last_revision(curve), is_unlike and is_per_token(curve, result.dataset)
        of_models = array(result.numbers)
        n_models = sum(has_numbers(of_models.sel(model=model)) for model in result.trained["model"].values)
        is_elsewhere = is_of_own_tokens if against_size else curve.effect  # in the figure of conditions
        if n_models > against_size and not is_elsewhere:
            panels[curve.title + ("<br>tokens differ between models" if is_of_own_tokens else "")] = [("mean", array)]
    return panels


def draw_conditions(result: Any) -> go.Figure:
    """Draw what the conditions of every measure do at each model's last revision: a row a condition, a symbol a model,
    those of null models grey."""
    numbers, effects = result.numbers, {name: curves for name, curves in effects_in(result.dataset).items() if curves}
    is_unlike = len(same_tokens(result.trained)) > 1
    shown = [curves[:_MOST_ROWS] for curves in effects.values()]
    titles = [
        curves[0].label.split(":")[0]
        + (f", {_MOST_ROWS} of {len(curves)}" * (len(curves) > _MOST_ROWS))
        + "<br>tokens differ between models" * (is_unlike and is_per_token(curves[0], result.dataset))
        for curves in effects.values()
    ]
    heights = [50 + 22 * len(curves) for curves in shown]
    panels = Panels(titles, columns=1, row_height=sum(heights) // max(1, len(heights)), row_heights=heights)
    for panel, curves in enumerate(shown):
        array = xr.concat([at_last_revision(curve)(numbers) for curve in curves], "condition")
        names = [curve.condition for curve in curves]
        for place, model in enumerate(result.trained["model"].values.tolist()):
            of_model = array.sel(model=model)
            for kind, null in numbers.by_null.items():
                values = [number.value for number in null.along(of_model, "condition").values()]
                look = {"color": NULL_KINDS[kind].colour, "symbol": NULL_KINDS[kind].symbol, "size": 6}
                if np.isfinite(values).any():
                    panels.add(panel, go.Scatter(x=values, y=names, name=kind, mode="markers", marker=look))
            at_conditions = numbers.along(of_model, "condition", numbers.bounds_of(curves[0].name))
            ends = np.array([[getattr(number, end) for number in at_conditions.values()] for end in ENDS])
            if np.isfinite(ends[0]).any():
                look = {"color": COLOURS[place % len(COLOURS)], "symbol": SYMBOLS[place % len(SYMBOLS)], "size": 8}
                bar = error_bars(*ends)
                panels.add(
                    panel, go.Scatter(x=ends[0], y=names, name=plain(model), mode="markers", marker=look, error_x=bar)
                )
        form = curves[0].form.lstrip("+")
        panels.figure.update_xaxes(tickformat=form if "%" in form else "", **panels.place_of(panel))
    panels.figure.update_yaxes(autorange="reversed", automargin=True)
    return panels.titled(
        f"What conditions do · {model_label(result.trained)}", f"{AT_LAST}; 95 % intervals over prompts"
    )


def panels_of_revisions(result: Any) -> dict[str, list[Any]]:
    """Return a panel a followed number, with a curve for each model of several revisions that has it."""
    several = result.trained["finished"].any("text").sum("revision") > 1
    panels: dict[str, list[Any]] = {}
    for curve, name in product(followed(result.dataset), several["model"].values[several.values].tolist()):
        if has_numbers(curve.array(result.numbers).sel(model=name)):
            array = lambda numbers, curve=curve, name=name: curve.array(numbers).sel(model=name)  # noqa: E731
            panels.setdefault(curve.title, []).append((plain(name), array))
    return panels
