"""Figures of coupling: directions that layers share, and paths of tokens, each next to the random init."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.colors import sample_colorscale

from tl_posgen.report.figures import (
    COLOURS,
    NULL_COLOUR,
    SCALE,
    Panels,
    band,
    colour_axis,
    heat,
    line,
    model_label,
    sides,
)
from tl_posgen.report.intervals import error_bars
from tl_posgen.report.sentences import said
from tl_posgen.summary import Summary

MOST_LAYERS = 16  # whose alignments A are drawn
ALIGNMENTS = {"alignment": "U'JV", "alignment_swapped": "V'JU"}
MOST_TOKENS = 16  # paths drawn per prompt
CELLS_WRITTEN = 36  # columns of cells up to which every cell shows its number


def of_k(name: str, k: int, ks: Sequence[int]) -> str:
    """Return the key of a headline in the summary at this K: its name alone at the first K.

    Example:
        >>> of_k("coupling", 10, [10, 30]), of_k("coupling", 30, [10, 30])
        ('coupling', 'coupling_k30')
    """
    return name if k == ks[0] else f"{name}_k{k}"


def sides_with_summary(result: Any) -> list[tuple[str, xr.Dataset, Summary]]:
    """Return (label, dataset, summary) of the model and of its first random init."""
    nulls = [] if result.null_summary is None else result.null_summary.seeds[:1]
    return [(*side[:2], summary) for side, summary in zip(sides(result), [result.summary, *nulls], strict=True)]


def drawn(data: xr.Dataset) -> list[str]:
    """Return the kinds of figures that have data: with one layer there are no pairs of layers."""
    missing = {"map", "chance", "alignment", "spectra"} if data.sizes["layer"] < 2 else set()
    return [kind for kind in FIGURES if kind not in missing]


def coupling_map(result: Any) -> go.Figure:
    """Draw a row of layer-by-layer maps per K: the model's, then the random init's."""
    shown, ks = sides_with_summary(result), result.summary["k"]
    titles = [
        f"{side}, K = {k}: mean {said(summary[of_k('coupling', k, ks)], '.3f')}"
        for k in ks
        for side, _, summary in shown
    ]
    panels = Panels(titles, columns=len(shown), row_height=300)
    maps = [data["coupling"].sel(k=k).transpose("layer", "layer_2") for k, (_, data, _) in product(ks, shown)]
    add_squares(panels, maps, "bases of layer", "Jacobian of layer")
    chance = ", ".join(said(result.summary[of_k("chance", k, ks)], ".3f") for k in ks)
    subtitle = f"1 - || |A| - S ||_F / ||S||_F, top K; mean over pairs of layers; random bases reach {chance}"
    return panels.finish(f"Coupling of residual Jacobians · {model_label(result.dataset)}", subtitle)


def against_chance(result: Any) -> go.Figure:
    """Draw a row of panels per K: every pair of layers with its interval, and the band of random bases."""
    shown, ks = sides(result), result.summary["k"]
    titles = [f"{side}, K = {k}" for k in ks for side, *_ in shown]
    panels = Panels(titles, columns=len(shown), row_height=280, shared_yaxes="rows")
    for number, (k, (_, data, _)) in enumerate(product(ks, shown)):
        found, layers = data.sel(k=k), data["layer"].values
        name = "random bases, 95%"
        panels.add(number, band(layers, found["chance_low"].values, found["chance_high"].values, name, grey=True))
        for place, other in enumerate(layers):
            pairs = found.sel(layer_2=other, layer=[layer for layer in layers if layer != other])
            x = pairs["layer"].values + 0.06 * (place - (len(layers) - 1) / 2)
            points = go.Scatter(x=x, y=pairs["coupling"].values, mode="markers", name=f"bases of layer {other}")
            points.update(error_y=error_bars(pairs, "coupling"))
            panels.add(number, points.update(marker={"color": COLOURS[place % len(COLOURS)], "size": 6}))
    panels.figure.update_xaxes(dtick=max(1, result.dataset.sizes["layer"] // 10))
    panels.axes("Jacobian of layer", "coupling, top K")
    subtitle = "mean and 95% interval over prompts of every pair of layers; grey: one Jacobian in random bases"
    return panels.finish(f"Coupling against chance · {model_label(result.dataset)}", subtitle)


def alignment(result: Any) -> go.Figure:
    """Draw |A| of every pair of layers as a block of one map: U'JV above, V'JU below, one column per model."""
    columns = sides(result)
    panels = Panels(
        [f"{side}, {what}" for what in ALIGNMENTS.values() for side, *_ in columns],
        columns=len(columns),
        row_height=420,
    )
    some = some_of(result.dataset.sizes["layer"])
    for number, (name, (_, data, _)) in enumerate(product(ALIGNMENTS, columns)):
        shown = data.isel(layer=some, layer_2=some)
        scaled = shown[name] / shown["singular_value"].isel(rank=0, drop=True)
        if name == "alignment":  # a layer in its own bases is diagonal by definition
            scaled = scaled.where(scaled["layer"] != scaled["layer_2"])
        panels.add(number, heat(block_matrix(scaled)))
    middle = 1 + result.dataset.sizes["row"] // 2
    places = {vector_name(layer, middle): str(layer) for layer in result.dataset["layer"].values[some]}
    ticks = {"tickvals": [*places], "ticktext": [*places.values()], "showgrid": False}
    panels.figure.update_xaxes(**ticks).update_yaxes(autorange="reversed", **ticks)
    one_colour_scale(panels.axes("bases of layer", "Jacobian of layer").figure, low=0.0)
    subtitle = "mean |A| over the layer's first singular value, a block a pair of layers; bright diagonals: alignment"
    return panels.finish(f"Alignment of layers · {model_label(result.dataset)}", subtitle)


def some_of(n: int) -> list[int]:
    """Return up to MOST_LAYERS evenly spread layers of n, so that their blocks are large enough to see."""
    return np.unique(np.linspace(0, n - 1, min(n, MOST_LAYERS)).round().astype(int)).tolist()


def vector_name(layer: Any, number: Any) -> str:
    return f"{layer}, vector {number}"


def block_matrix(blocks: xr.DataArray) -> xr.DataArray:
    """Return [layer, layer_2, row, column] as one matrix of blocks with gaps; its coordinates name layer and vector."""
    values = blocks.transpose("layer", "row", "layer_2", "column").values
    n, k = values.shape[:2]
    with_gaps = np.pad(values, ((0, 0), (0, 1), (0, 0), (0, 1)), constant_values=np.nan).reshape(n * (k + 1), -1)
    down, across = (
        [vector_name(layer, number) for layer in blocks[dim].values for number in (*range(1, k + 1), "gap")]
        for dim in ("layer", "layer_2")
    )
    names = {"layer": down[:-1], "bases of layer": across[:-1]}
    return xr.DataArray(with_gaps[:-1, :-1], names, tuple(names))


def spectra(result: Any) -> go.Figure:
    """Draw the singular values of every layer's Jacobian against depth, one line per rank."""
    shown = sides(result)
    panels = Panels([side for side, *_ in shown], columns=len(shown), row_height=320, shared_yaxes=True)
    for number, (_, data, _) in enumerate(shown):
        values = data["singular_value"].transpose("rank", "layer")
        for place, curve in enumerate(values.values):
            shade = str(sample_colorscale(SCALE, place / max(1, len(values) - 1))[0])
            named = {"showlegend": place in (0, len(values) - 1), "mode": "lines+markers"}
            panels.add(number, line(data["layer"].values, curve, f"singular value {place + 1}", shade, **named))
    panels.figure.update_yaxes(type="log").update_xaxes(dtick=max(1, result.dataset.sizes["layer"] // 10))
    panels.axes("layer", "singular value")
    subtitle = "of the residual Jacobian at the chosen tokens, mean over prompts; dark: the first"
    return panels.finish(f"Singular values against depth · {model_label(result.dataset)}", subtitle)


def trajectories(result: Any) -> go.Figure:
    """Draw the last tokens of the first prompt in their top two principal components."""
    shown = sides_with_summary(result)
    titles = [f"{side}: line-shape score {said(summary['line_shape_score'], '.2f')}" for side, _, summary in shown]
    panels = Panels(titles, columns=len(shown), row_height=320)
    for number, (_, data, _) in enumerate(shown):
        first = data.isel(prompt=0)
        paths = first["trajectory"].dropna("position")
        for place, position in enumerate(paths["position"].values[-MOST_TOKENS:]):
            x, y = paths.sel(position=position).transpose("component", "state").values
            colour, rest = COLOURS[place % len(COLOURS)], len(x) - 1
            marker = {"size": [7] + [4] * rest, "color": ["white"] + [colour] * rest}
            marker["line"] = {"color": "black", "width": [1] + [0] * rest}
            states = [f"x{state}" for state in paths["state"].values]
            more = {"mode": "lines+markers", "marker": marker, "text": states, "showlegend": False}
            panels.add(number, line(x, y, f"token {position}", colour, width=1.0, **more))
        for axis, update in enumerate((panels.figure.update_xaxes, panels.figure.update_yaxes)):
            share = float(first["trajectory_explained"].values[axis])
            update(title_text=f"principal component {axis + 1} ({share:.0%} of the variance)", row=1, col=number + 1)
    last = result.summary["blocks"]
    subtitle = f"x0 (white) to x{last}, last {MOST_TOKENS} tokens of the first prompt; 1 is a line"
    return panels.finish(f"Trajectories through the layers · {model_label(result.dataset)}", subtitle)


def growth(result: Any) -> go.Figure:
    """Draw log-norm against layer with its fit, and the log-norm of the first token."""
    shown = sides_with_summary(result)
    titles = [
        f"{side}: R² {said(own['growth_r2'], '.2f')}, {said(own['growth_slope'], '.2f')} a layer"
        for side, _, own in shown
    ]
    panels = Panels(titles, columns=len(shown), row_height=280)
    for number, (_, data, _) in enumerate(shown):
        x, curves = data["state"].values, {name: data[name].mean("prompt").values for name in LOG_NORMS}
        panels.add(
            number,
            line(x, curves["log_norm"], "mean over tokens", COLOURS[0], mode="lines+markers"),
            line(x, curves["log_norm_line"], "exponential growth, fitted", COLOURS[1], dash="dash"),
            line(x, curves["log_norm_first"], "first token", NULL_COLOUR, mode="lines+markers"),
        )
    panels.figure.update_xaxes(dtick=max(1, result.summary["blocks"] // 10))
    panels.axes("after block (0: embedding)", "ln |x|")
    subtitle = "mean over prompts; R² and growth: median over tokens; the first token is not in the mean"
    return panels.finish(f"Growth of the residual stream · {model_label(result.dataset)}", subtitle)


def grid(columns: Sequence[str], rows: Sequence[str]) -> Panels:
    """Return panels with names above the columns and to the right of the rows."""
    titles = [*columns, *[""] * (len(columns) * (len(rows) - 1))]
    return Panels(titles, columns=len(columns), row_height=210, horizontal_spacing=0.03, row_titles=list(rows))


def add_squares(panels: Panels, maps: Sequence[xr.DataArray], x: str, y: str) -> None:
    """Add maps on one colour scale with empty diagonals: the coupling of a Jacobian with itself is 1 by definition."""
    for number, array in enumerate(maps):
        values = array.values.copy()
        np.fill_diagonal(values, np.nan)
        text = "%{z:.2f}" if panels.n_columns * len(values) <= CELLS_WRITTEN else None
        shown = heat(array.copy(data=values), texttemplate=text)
        panels.add(number, shown.update(hovertemplate="%{y} in the bases of %{x}: %{z:.3f}<extra></extra>"))
    panels.figure.update_xaxes(type="category").update_yaxes(type="category", autorange="reversed")
    one_colour_scale(panels.axes(x, y).figure)


def one_colour_scale(figure: Any, low: float | None = None) -> None:
    values = np.concatenate([np.ravel(trace.z) for trace in figure.data])
    figure.update_layout(coloraxis=colour_axis(np.nanmin(values) if low is None else low, np.nanmax(values)))


LOG_NORMS = ("log_norm", "log_norm_line", "log_norm_first")
FIGURES = {
    "map": coupling_map,
    "chance": against_chance,
    "alignment": alignment,
    "spectra": spectra,
    "trajectories": trajectories,
    "growth": growth,
}
