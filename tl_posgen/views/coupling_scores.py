"""Coupling against a score over models, with and without what width and size explain, and what width alone makes."""

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from tl_posgen.views.style import COLOURS, NULL_COLOUR, SCALE, check_kind, finish, model_label, sides

KINDS = ("scatter", "given_size", "width")
LABELS = {
    "coupling": "coupling (Frobenius)",
    "trace": "coupling, trace normalisation",
    "line_shape_score": "line-shape score",
    "expodistance": "expodistance",
    "growth_r2": "R² of exponential growth",
}
NAMED_UP_TO = 12  # models whose points carry their name


def plot(
    dataset: xr.Dataset, null: xr.Dataset | None = None, kind: str = "scatter", measure: str = "coupling"
) -> go.Figure:
    """kind "scatter": the score against a measure, a point a model, with the regression line; "given_size": the same
    with what ln d_model and ln parameters explain taken out of both; "width": random Jacobians alone, by width.
    measure: coupling, trace, line_shape_score, expodistance or growth_r2."""
    check_kind(kind, KINDS)
    if measure not in LABELS:
        raise ValueError(f"measure={measure!r}: choose one of {', '.join(LABELS)}")
    if kind == "width":
        return _width(dataset)
    return _scatter(dataset, null, measure) if kind == "scatter" else _given_size(dataset, null, measure)


def drawable(dataset: xr.Dataset) -> tuple[str, ...]:
    """Nothing is given size where there are too few models, or all have one size."""
    return tuple(kind for kind in KINDS if kind != "given_size" or bool(dataset["rest_score"].notnull().any()))


def _scatter(dataset: xr.Dataset, null: xr.Dataset | None, measure: str) -> go.Figure:
    panels = sides(dataset, null)
    titles = [f"{side}: {_with_interval(data.sel(measure=measure), 'r', 'r')}" for side, data in panels]
    figure = make_subplots(rows=1, cols=len(panels), subplot_titles=titles, shared_yaxes=True)
    for column, (_, data) in enumerate(panels, start=1):
        x, found = data[measure].values, data.sel(measure=measure)
        points = _points(data, x, data["score"].values)
        points.update(error_x={
            "array": data[f"{measure}_high"].values - x, "arrayminus": x - data[f"{measure}_low"].values,
            "thickness": 1, "width": 0, "color": NULL_COLOUR,
        })  # fmt: skip
        figure.add_trace(points, row=1, col=column)
        ends = np.array([x.min(), x.max()])
        line = go.Scatter(x=ends, y=float(found["intercept"]) + float(found["slope"]) * ends, mode="lines")
        line.update(line={"color": NULL_COLOUR, "dash": "dash"}, showlegend=False, hoverinfo="skip")
        figure.add_trace(line, row=1, col=column)
    figure.update_xaxes(title_text=_label(dataset, measure)).update_yaxes(title_text=dataset.attrs["score"], col=1)
    missing = dataset.attrs["not_computed"]
    subtitle = "a point a model, 95 % interval over prompts; dashed: regression line"
    subtitle += f"; not computed: {missing}" if missing else ""
    return finish(_sized(figure), f"{_capital(LABELS[measure])} against score · {model_label(dataset)}", subtitle)


def _given_size(dataset: xr.Dataset, null: xr.Dataset | None, measure: str) -> go.Figure:
    panels = sides(dataset, null)
    titles = [f"{side}: {_with_interval(data.sel(measure=measure), 'partial_r', 'partial')}" for side, data in panels]
    figure = make_subplots(rows=1, cols=len(panels), subplot_titles=titles, shared_yaxes=True)
    for column, (_, data) in enumerate(panels, start=1):
        points = _points(data, data["rest"].sel(measure=measure).values, data["rest_score"].values)
        figure.add_trace(points, row=1, col=column)
    figure.update_xaxes(title_text=f"rest of {_label(dataset, measure)}")
    figure.update_yaxes(title_text=f"rest of {dataset.attrs['score']}", col=1)
    missing = dataset.attrs["not_computed"]
    subtitle = f"not computed: {missing}" if missing else "what ln d_model and ln parameters leave of both"
    return finish(_sized(figure), f"{_capital(LABELS[measure])} given size · {model_label(dataset)}", subtitle)


def _width(dataset: xr.Dataset) -> go.Figure:
    figure = go.Figure()
    widths = dataset["width"].values
    for colour, norm in zip(COLOURS, dataset["norm"].values, strict=False):
        values, r2 = dataset["width_coupling"].sel(norm=norm), float(dataset["width_r2"].sel(norm=norm))
        name = f"{norm} (R² against 1/√d: {r2:.4f})"
        figure.add_scatter(x=widths, y=values.values, mode="lines+markers", name=name, line={"color": colour})
    line = {"color": NULL_COLOUR, "dash": "dot"}
    y = dataset["one_minus_inverse_root_k"].values
    figure.add_scatter(x=widths, y=y, mode="lines", name="1 - 1/√K", line=line)
    figure.update_xaxes(title_text="d", type="log", tickvals=widths, ticktext=[str(width) for width in widths])
    figure.update_yaxes(title_text="coupling")
    share = int(widths[0] // dataset["width_k"].values[0])
    subtitle = f"independent Gaussian matrices, K = d/{share}: with the trace normalisation width alone makes coupling"
    return finish(figure, "Coupling of random Jacobians by width · no model", subtitle)


def _points(data: xr.Dataset, x: np.ndarray, y: np.ndarray) -> go.Scatter:
    names = [str(name) for name in data["model"].values]
    points = go.Scatter(x=x, y=y, text=names, textposition="top center", textfont={"size": 10}, showlegend=False)
    points.update(mode="markers+text" if len(names) <= NAMED_UP_TO else "markers")
    points.update(marker={"color": np.log2(data["d_model"].values), "coloraxis": "coloraxis", "size": 9})
    return points.update(hovertemplate="%{text}: %{x:.3f}, %{y:.3f}<extra></extra>")


def _sized(figure: go.Figure) -> go.Figure:
    return figure.update_layout(coloraxis={"colorscale": SCALE, "colorbar": {"title": "log2 d", "thickness": 12}})


def _label(dataset: xr.Dataset, measure: str) -> str:
    return f"{LABELS[measure]}, top {dataset.attrs['k']}" if measure in ("coupling", "trace") else LABELS[measure]


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _with_interval(numbers: xr.Dataset, r: str, prefix: str) -> str:
    values = [float(numbers[name]) for name in (r, f"{prefix}_low", f"{prefix}_high")]
    return "r not defined" if np.isnan(values[0]) else "r = {:.2f} [{:.2f}, {:.2f}]".format(*values)
