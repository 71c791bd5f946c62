"""Figures of coupling against scores: a row a quantity, given the models' size, and random Jacobians by width."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.core.number import Number
from tl_posgen.core.numbers import intervals_of
from tl_posgen.report.figures import (
    COLOURS,
    MARKS,
    NULL_COLOUR,
    Panels,
    at_labels,
    ends_of,
    error_bars,
    finish,
    line,
    model_label,
    plain,
    sides,
)

LABELS = {
    "coupling": "coupling (Frobenius)",
    "trace": "coupling, trace normalisation",
    "line_shape_score": "line-shape score",
    "expodistance": "expodistance",
    "growth_r2": "R² of exponential growth",
}
SIZE_WORDS = {"d_model": "width", "n_layers": "depth", "parameters": "parameters"}
NORM_WORDS = {"frobenius": "Frobenius", "trace": "trace normalisation"}
NAMED_UP_TO = 12  # models whose points carry their name


def scatter(result: Any) -> go.Figure:
    """Draw the score against every quantity, a row each: a point a model, with the regression line."""

    def draw(data: xr.Dataset, quantity: str) -> list[go.Scatter]:
        found = data.sel(quantity=quantity)
        interval = intervals_of(found["measured"])
        x = interval["value"].values
        ends = np.array([x.min(), x.max()])
        y = float(found["intercept"]) + float(found["slope"]) * ends
        fitted = line(ends, y, "regression line", NULL_COLOUR, dash="dash", showlegend=False, hoverinfo="skip")
        return [points(data, x, data["score"].values).update(error_x=error_bars(*ends_of(interval))), fitted]

    subtitle = "a point a model, 95% interval over prompts; dashed: regression line"
    missing = result.own.attrs["not_computed"]
    subtitle += f"; not computed: {missing}" if missing else ""
    title = f"Coupling, straightness and growth against {plain(result.measure.score)}"
    return by_quantity(result, "r", draw, "{}", title, subtitle)


def compared(result: Any) -> go.Figure:
    """Draw the correlation with the score of every quantity beside those of the sizes, of values and of ranks."""
    figure, sizes = go.Figure(), [f"ln {words}" for words in SIZE_WORDS.values()]
    for side, data, colour in reversed(sides(result)):
        own = data is result.own  # a random init has the sizes of its model
        names = [*LABELS.values(), *(sizes if own else [])]
        for by, symbol in (("values", "circle"), ("ranks", "diamond-open")):
            r = [data["r"].sel(by=by, quantity=list(LABELS)).rename(quantity="name")]
            r += [data["size_r"].sel(by=by, size=list(SIZE_WORDS)).rename(size="name")] if own else []
            beside: Any = xr.concat(r, "name")
            ends = intervals_of(beside)
            found = go.Scatter(x=ends["value"].values, y=names, name=f"{side}, {by}")
            marker = {"color": colour, "symbol": symbol, "size": 9}
            figure.add_trace(found.update(mode="markers", error_x=error_bars(*ends_of(ends)), marker=marker))
    figure.update_layout(scattermode="group", scattergap=0.4)
    figure.update_xaxes(title_text=f"correlation with {plain(result.measure.score)}", range=[-1.02, 1.02])
    figure.update_yaxes(
        autorange="reversed", type="category", categoryorder="array", categoryarray=[*LABELS.values(), *sizes]
    )
    title = f"What goes with {plain(result.measure.score)}? · {model_label(result.own)}"
    return finish(figure, title, "over models, 95% interval; sizes of the trained models", height=520)


def given_size(result: Any) -> go.Figure:
    """Draw what ln d_model and ln parameters leave of the score against what they leave of every quantity."""

    def draw(data: xr.Dataset, quantity: str) -> list[go.Scatter]:
        return [points(data, data["rest"].sel(quantity=quantity).values, data["rest_score"].values)]

    missing = result.own.attrs["not_computed"]
    subtitle = f"not computed: {missing}" if missing else "what ln d_model and ln parameters leave of both"
    return by_quantity(result, "partial_r", draw, "rest of {}", f"{plain(result.measure.score)} given size", subtitle)


def by_quantity(
    result: Any, r: str, draw: Callable[[xr.Dataset, str], list[go.Scatter]], axis: str, title: str, subtitle: str
) -> go.Figure:
    """Draw a row of panels a quantity, the null's beside the models', under their correlation."""
    shown = sides(result)
    titles = []
    for name, (side, data, _) in product(LABELS, shown):
        value, low, high = map(float, at_labels(result, data[r], {"quantity": name}).values)
        number = Number(value, low, high)
        titles.append(f"{side}: r = {number.with_interval:.2f}" if number else f"{side}: r not defined")
    panels = Panels(titles, columns=len(shown), row_height=260, shared_yaxes="rows")
    for row, (name, label) in enumerate(LABELS.items()):
        for column, (_, data, _) in enumerate(shown):
            panels.add(row * len(shown) + column, *draw(data, name))
            top = f", top {result.measure.k}" if name in ("coupling", "trace") else ""
            panels.figure.update_xaxes(title_text=axis.format(f"{label}{top}"), row=row + 1, col=column + 1)
    panels.figure.update_yaxes(title_text=axis.format(plain(result.measure.score)), col=1)
    panels.figure.update_layout(coloraxis={"colorscale": MARKS, "colorbar": {"title": "log2 d", "thickness": 12}})
    return panels.finish(f"{title} · {model_label(result.own)}", subtitle)


def width(result: Any) -> go.Figure:
    """Draw the coupling of random Jacobians alone, by width."""
    data, figure = result.own, go.Figure()
    widths, ks = data["width"].values, data["width_k"].values
    for colour, norm in zip(COLOURS, data["norm"].values, strict=False):
        one = data.sel(norm=norm)
        name = f"{NORM_WORDS[norm]} (R² against 1/√d: {float(one['width_r2']):.4f})"
        figure.add_trace(line(widths, one["width_coupling"].values, name, colour, mode="lines+markers"))
    figure.add_trace(line(widths, 1 - ks**-0.5, "1 - 1/√K", NULL_COLOUR, dash="dot"))
    figure.update_xaxes(title_text="d", type="log", tickvals=widths, ticktext=[str(width) for width in widths])
    figure.update_yaxes(title_text="coupling")
    share = int(widths[0] // ks[0])
    subtitle = f"independent Gaussian matrices, K = d/{share}: with the trace normalisation width alone makes coupling"
    return finish(figure, "Coupling of random Jacobians by width · no model", subtitle)


def points(data: xr.Dataset, x: np.ndarray, y: np.ndarray) -> go.Scatter:
    """Return a point a model, coloured by its width."""
    names = [plain(name) for name in data["model_name"].values]
    found = go.Scatter(x=x, y=y, text=names, textposition="top center", textfont={"size": 10}, showlegend=False)
    found.update(mode="markers+text" if len(names) <= NAMED_UP_TO else "markers")
    found.update(marker={"color": np.log2(data["d_model"].values), "coloraxis": "coloraxis", "size": 9})
    return found.update(hovertemplate="%{text}: %{x:.3f}, %{y:.3f}<extra></extra>")
