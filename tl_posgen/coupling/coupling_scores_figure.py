"""The figure of a score against coupling, straightness and growth: a point a model."""

from itertools import product
from typing import Any

import numpy as np
import plotly.graph_objects as go

from tl_posgen.core.measure import ENDS
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import intervals_of
from tl_posgen.report.figures import MARKS, Panels, drawn_models, error_bars, model_label, plain

LABELS = {  # quantities in words; each is a variable of `Coupling`, "trace" a version of coupling
    "coupling": "coupling (Frobenius)",
    "trace": "coupling, trace normalisation",
    "line_shape_score": "line-shape score",
    "expodistance": "expodistance",
    "growth_r2": "R² of exponential growth",
}


def draw_scatter(result: Any) -> go.Figure:
    """Draw the score against every quantity, a row each: a point a model."""
    models, score, titles = drawn_models(result), plain(result.measure.score), []
    r = {name: result.measure.r(result.numbers, name) for name in LABELS}
    for r_trained in r.values():
        for (side, *_), number in zip(
            models, (r_trained, *(Number(values[0]) for values in r_trained.by_null.values())), strict=True
        ):
            titles.append(f"{side}: r = {number.with_interval:.2f}" if number else f"{side}: r not defined")
    panels = Panels(titles, columns=len(models), row_height=260, shared_yaxes="rows")
    for place, ((name, label), (_, data, _)) in enumerate(product(LABELS.items(), models)):
        intervals, names = intervals_of(data["measured"].sel(quantity=name)), map(plain, data["model_name"].values)
        points = go.Scatter(x=intervals["value"].values, y=data["score"].values, text=[*names], showlegend=False)
        points.update(mode="markers", error_x=error_bars(*(intervals[end].values for end in ENDS)))
        points.update(marker={"color": np.log2(data["d_model"].values), "coloraxis": "coloraxis", "size": 9})
        panels.add(place, points.update(hovertemplate="%{text}: %{x:.3f}, %{y:.3f}<extra></extra>"))
        row, column = divmod(place, len(models))
        panels.figure.update_xaxes(title_text=label, row=row + 1, col=column + 1)
    panels.figure.update_yaxes(title_text=score, col=1)
    panels.figure.update_layout(coloraxis={"colorscale": MARKS, "colorbar": {"title": "log2 d", "thickness": 12}})
    title = f"Coupling, straightness and growth against {score} · {model_label(result.trained)}"
    return panels.titled(title, f"a point a model, 95% interval over prompts; top {result.measure.k}")
