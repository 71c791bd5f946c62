"""Figures of coupling, each next to the random init, and tokens coloured by a number of their path."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.colors import sample_colorscale

from tl_posgen.core.formatting import format_number
from tl_posgen.core.measure import TokenView
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import TRAINED, intervals_of
from tl_posgen.report.circuits import CROP, token_colours
from tl_posgen.report.figures import (
    COLOURS,
    MARKS,
    Panels,
    at_labels,
    band,
    colour_axis,
    colours_of,
    ends_of,
    error_bars,
    heat,
    line,
    model_label,
    sides,
)
from tl_posgen.report.kinds import heat_maps, lines

MOST_LAYERS = 16  # whose A in the bases of each other is drawn
MOST_TOKENS = 16  # paths drawn of a prompt
CELLS_WRITTEN = 36  # columns of cells beside each other, up to which they carry their number
CURVES = ("mean over tokens", "exponential growth, fitted", "first token")  # of log-norms
ALIGNMENTS = {"aligned": "U'JV", "swapped": "V'JU"}
PATHS_SHOWN = {  # variable -> meaning of red
    "line_shape_score": "red: less straight than the median token",
    "growth_slope": "red: its norm grows faster than the median token's",
}


def on_both_sides(number: Number, form: str) -> list[str]:
    """Return the value of the model, and of its first null model of each kind."""
    return [format_number(value, form) for value in (number.value, *number.inits[:1], *number.shuffled[:1])]


def _with_mean(result: Any, kind: str, at: Mapping[str, Any]) -> str:
    number = result.numbers("coupling", **at)
    mean = number.value if kind == TRAINED else number.by_null[kind][0]
    return f"{model_label(result.sides[kind])}, K = {at['k']}: mean {format_number(mean, '.3f')}"


def _of_chance(result: Any) -> str:
    chance = ", ".join(f"{result.numbers('chance', k=k).plain:.3f}" for k in result.own["k"].values)
    return f"1 - || |A| - S ||_F / ||S||_F, top K; mean over pairs of layers; random bases reach {chance}"


coupling_map = heat_maps(
    "coupling",
    "layer",
    "layer_2",
    per=["k"],
    title="Coupling of residual Jacobians",
    panel_title=_with_mean,
    subtitle=_of_chance,
    x_title="bases of layer",
    y_title="Jacobian of layer",
    diagonal=False,
)


def against_chance(result: Any) -> go.Figure:
    """Draw a row of panels a K: every pair of layers with its interval, over the band of random bases."""
    shown, ks = sides(result), result.own["k"].values
    titles = [f"{side}, K = {k}" for k in ks for side, *_ in shown]
    panels = Panels(titles, columns=len(shown), row_height=280, shared_yaxes="rows")
    bounds = result.measure.variables["coupling"].bounds
    for number, (k, (_, data, _)) in enumerate(product(ks, shown)):
        layers, draws = data["layer"].values, at_labels(result, data["chance"], {"k": k})
        step = min(0.06, 0.8 / len(layers))  # beside each other, nearer to their own layer than to the next
        low, high = (draws.quantile(share, ["prompt", "draw"]).values for share in (0.025, 0.975))
        panels.add(number, band(layers, low, high, "random bases, 95%", grey=True))
        found = intervals_of(at_labels(result, data["coupling"], {"k": k}), bounds)
        for place, (other, shade) in enumerate(zip(layers, colours_of(len(layers)), strict=True)):
            pairs = found.sel(layer_2=other, layer=[layer for layer in layers if layer != other])
            x = pairs["layer"].values + step * (place - (len(layers) - 1) / 2)
            points = go.Scatter(x=x, y=pairs["value"].values, mode="markers", name=f"bases of layer {other}")
            marker = {"color": shade, "size": 6}
            points.update(error_y=error_bars(*ends_of(pairs)), marker=marker)
            panels.add(number, points)
    panels.figure.update_xaxes(dtick=max(1, result.own.sizes["layer"] // 10))
    panels.axes("Jacobian of layer", "coupling, top K")
    subtitle = "mean and 95% interval over prompts of every pair of layers; grey: one Jacobian in random bases"
    return panels.finish(f"Coupling against chance · {model_label(result.own)}", subtitle)


def alignment(result: Any) -> go.Figure:
    """Draw |A| of every pair of layers as a block of one map: rows for U'JV and V'JU, a column a side."""
    columns, layers = sides(result), result.own["layer"].values
    titles = [f"{side}, {what}" for what in ALIGNMENTS.values() for side, *_ in columns]
    panels = Panels(titles, columns=len(columns), row_height=420)
    some = np.unique(np.linspace(0, len(layers) - 1, min(len(layers), MOST_LAYERS)).round().astype(int))
    for number, (bases, (_, data, _)) in enumerate(product(ALIGNMENTS, columns)):
        shown = data.sel(bases=bases).isel(layer=some, layer_2=some)
        scaled = shown["alignment"] / shown["singular_value"].isel(rank=0, drop=True)
        if bases == "aligned":  # of a layer in its own bases it is diagonal by definition
            scaled = scaled.where(scaled["layer"] != scaled["layer_2"])
        panels.add(number, heat(block_matrix(scaled)))
    middle = 1 + result.own.sizes["row"] // 2
    places = {f"{layer}, vector {middle}": str(layer) for layer in layers[some]}
    ticks = {"tickvals": [*places], "ticktext": [*places.values()], "showgrid": False}
    panels.figure.update_xaxes(**ticks).update_yaxes(autorange="reversed", **ticks)
    one_colour_scale(panels.axes("bases of layer", "Jacobian of layer").figure, low=0.0)
    subtitle = "mean |A| over the layer's first singular value, a block a pair of layers; bright diagonals: alignment"
    return panels.finish(f"Alignment of layers · {model_label(result.own)}", subtitle)


def block_matrix(blocks: xr.DataArray) -> xr.DataArray:
    """Return [layer, layer_2, row, column] as one matrix of blocks with gaps; its ends name layer and vector."""
    values = blocks.transpose("layer", "row", "layer_2", "column").values
    n, k = values.shape[:2]
    gaps = np.array(((0, 0), (0, 1), (0, 0), (0, 1)))
    with_gaps = np.pad(values, gaps, constant_values=np.nan).reshape(n * (k + 1), -1)
    down, across = (
        [f"{layer}, vector {number}" for layer in blocks[dim].values for number in (*range(1, k + 1), "gap")]
        for dim in ("layer", "layer_2")
    )
    names = {"layer": down[:-1], "bases of layer": across[:-1]}
    return xr.DataArray(with_gaps[:-1, :-1], names, tuple(names))


def spectra(result: Any) -> go.Figure:
    """Draw the singular values of every layer's Jacobian against depth, a line a rank."""
    shown = sides(result)
    panels = Panels([side for side, *_ in shown], columns=len(shown), row_height=320, shared_yaxes=True)
    for number, (_, data, _) in enumerate(shown):
        values = data["singular_value"].transpose("rank", "layer")
        for place, curve in enumerate(values.values):
            shade = str(sample_colorscale(MARKS, place / max(1, len(values) - 1))[0])
            named = {"showlegend": place in (0, len(values) - 1), "mode": "lines+markers"}
            panels.add(number, line(data["layer"].values, curve, f"singular value {place + 1}", shade, **named))
    panels.figure.update_yaxes(type="log").update_xaxes(dtick=max(1, result.own.sizes["layer"] // 10))
    panels.axes("layer", "singular value")
    subtitle = "of the residual Jacobian at the chosen tokens, mean over prompts; blue: the first"
    return panels.finish(f"Singular values against depth · {model_label(result.own)}", subtitle)


def trajectories(result: Any) -> go.Figure:
    """Draw the last tokens of the first prompt in their top two principal components."""
    shown, scores = sides(result), on_both_sides(result.numbers("line_shape_score"), ".2f")
    titles = [f"{side}: line-shape score {score}" for (side, *_), score in zip(shown, scores, strict=True)]
    panels, rest = Panels(titles, columns=len(shown), row_height=320), result.own.sizes["state"] - 1
    for number, (_, data, _) in enumerate(shown):
        first = data.isel(prompt=0)
        paths = first["trajectory"].dropna("position")
        for place, position in enumerate(paths["position"].values[-MOST_TOKENS:]):
            x, y = paths.sel(position=position).transpose("component", "state").values
            colour = COLOURS[place % len(COLOURS)]
            marker = {"size": [7] + [4] * rest, "color": ["white"] + [colour] * rest}
            marker["line"] = {"color": "black", "width": [1] + [0] * rest}
            states = [f"x{state}" for state in paths["state"].values]
            more = {"mode": "lines+markers", "marker": marker, "text": states, "showlegend": False}
            panels.add(number, line(x, y, f"token {position}", colour, width=1.0, **more))
        for axis, update in enumerate((panels.figure.update_xaxes, panels.figure.update_yaxes)):
            share = float(first["trajectory_explained"].values[axis])
            update(title_text=f"principal component {axis + 1} ({share:.0%} of the variance)", row=1, col=number + 1)
    subtitle = f"x0 (white) to x{rest}, last {MOST_TOKENS} tokens of the first prompt; 1 is a line"
    return panels.finish(f"Trajectories through the layers · {model_label(result.own)}", subtitle)


def _growth_in_numbers(result: Any) -> str:
    r2, slope = (result.numbers(name) for name in ("growth_r2", "growth_slope"))
    return f"R² {r2:.2f}, {slope:.2f} a layer: medians over tokens; the first token is not in the mean"


growth = lines(
    {"": [(name, "log_norm", {"curve": name}) for name in CURVES]},
    "state",
    title="Growth of the residual stream",
    subtitle=_growth_in_numbers,
    x_title="after block (0: embedding)",
    y_title="ln |x|",
)


def add_squares(panels: Panels, maps: Sequence[xr.DataArray], x: str, y: str) -> None:
    """Add maps on one colour scale, their diagonals left empty: a Jacobian with itself is 1 by definition."""
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


FIGURES = {
    "map": coupling_map,
    "chance": against_chance,
    "alignment": alignment,
    "spectra": spectra,
    "trajectories": trajectories,
    "growth": growth,
}


def path_labels(data: xr.Dataset) -> list[str]:
    """Return the heading of each token-level picture."""
    return [f"{data[name].attrs['long_name']} by token, first prompt; {red}" for name, red in PATHS_SHOWN.items()]


def coloured_path(data: xr.Dataset, example: int) -> Any:
    """Return the tokens of the first prompt, coloured by how far a number of their path is from the median's."""
    first = data[["path", "token_text"]].isel(prompt=0, position=slice(CROP))
    values = first["path"].sel(quantity=list(PATHS_SHOWN)[example]).values
    values = np.where(np.isfinite(values), values, np.nan)
    return token_colours([str(token) for token in first["token_text"].values], values - np.nanmedian(values))


TOKENS = TokenView(path_labels, coloured_path)
