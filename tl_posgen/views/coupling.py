"""Coupling of residual Jacobians: which layers and tokens act along the same directions, and how tokens move."""

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from tl_posgen.views.style import COLOURS, NULL_COLOUR, SCALE, check_kind, finish, model_label, sides

TOKEN_KINDS = ("self", "same_input", "same_output")
KINDS = ("map", "chance", "alignment", "trajectories", "growth", *TOKEN_KINDS)
MOST_PAIRS = 6  # neighbouring layers whose A is drawn
MOST_TOKENS = 16  # paths drawn of a prompt
CELLS_WRITTEN = 36  # columns of cells beside each other, up to which they carry their number


def plot(dataset: xr.Dataset, null: xr.Dataset | None = None, kind: str = "map", k: int | None = None) -> go.Figure:
    """kind "map": layer x layer coupling; "chance": every pair against random bases; "alignment": |A| of neighbouring
    layers; "trajectories": tokens in their top two principal components; "growth": log-norm against layer with its
    fit; "self", "same_input", "same_output": a map token x token per layer, where token_wise was asked. Each has the
    null beside or below. k: which number of singular vectors, the first measured if left out."""
    check_kind(kind, drawable(dataset))
    k = int(dataset["k"].values[0]) if k is None else k
    if kind in TOKEN_KINDS:
        return _tokens(dataset, null, kind, k)
    if kind in ("map", "chance"):
        return (_map if kind == "map" else _chance)(dataset, null, k)
    return {"alignment": _alignment, "trajectories": _trajectories, "growth": _growth}[kind](dataset, null)


def drawable(dataset: xr.Dataset) -> tuple[str, ...]:
    """No pairs of layers with one layer, no pairs of tokens unless they were measured."""
    missing = TOKEN_KINDS if "token_coupling" not in dataset else ()
    missing = (*missing, "map", "chance", "alignment") if dataset.sizes["layer"] < 2 else missing
    return tuple(kind for kind in KINDS if kind not in missing)


def _map(dataset: xr.Dataset, null: xr.Dataset | None, k: int) -> go.Figure:
    panels = sides(dataset, null)
    titles = [f"{side}: mean {float(data['mean_coupling'].sel(k=k)):.3f}" for side, data in panels]
    figure = make_subplots(rows=1, cols=len(panels), subplot_titles=titles)
    for column, (_, data) in enumerate(panels, start=1):
        couplings = data["coupling"].sel(k=k).transpose("layer", "layer_2")
        figure.add_trace(_square(couplings.values, data["layer"].values, len(panels)), row=1, col=column)
    figure.update_xaxes(title_text="bases of layer", type="category")
    figure.update_yaxes(title_text="Jacobian of layer", type="category", autorange="reversed")
    _one_colour_scale(figure)
    chance = float(dataset["mean_chance"].sel(k=k))
    subtitle = f"1 - || |A| - S ||_F / ||S||_F, top {k}; mean over pairs of layers; random bases reach {chance:.3f}"
    return finish(figure, f"Coupling of residual Jacobians · {model_label(dataset)}", subtitle, height=440)


def _chance(dataset: xr.Dataset, null: xr.Dataset | None, k: int) -> go.Figure:
    panels = sides(dataset, null)
    figure = make_subplots(rows=1, cols=len(panels), subplot_titles=[side for side, _ in panels], shared_yaxes=True)
    for column, (_, data) in enumerate(panels, start=1):
        found = data[["coupling", "coupling_low", "coupling_high", "chance_low", "chance_high"]].sel(k=k)
        layers = data["layer"].values
        band = np.concatenate([found["chance_high"].values, found["chance_low"].values[::-1]])
        area = go.Scatter(x=[*layers, *layers[::-1]], y=band, fill="toself", fillcolor="rgba(156,163,175,.35)")
        area.update(
            line={"width": 0}, mode="lines", name="random bases, 95 %", showlegend=column == 1, hoverinfo="skip"
        )
        figure.add_trace(area, row=1, col=column)
        for number, other in enumerate(layers):
            pairs = found.sel(layer_2=other, layer=[layer for layer in layers if layer != other])
            points = go.Scatter(
                x=pairs["layer"].values + 0.06 * (number - (len(layers) - 1) / 2),
                y=pairs["coupling"].values,
                error_y={
                    "array": (pairs["coupling_high"] - pairs["coupling"]).values,
                    "arrayminus": (pairs["coupling"] - pairs["coupling_low"]).values,
                    "thickness": 1,
                    "width": 0,
                },
                mode="markers",
                marker={"color": COLOURS[number % len(COLOURS)], "size": 6},
                name=f"bases of layer {other}",
                legendgroup=str(other),
                showlegend=column == 1,
            )
            figure.add_trace(points, row=1, col=column)
    figure.update_xaxes(title_text="Jacobian of layer", dtick=max(1, dataset.sizes["layer"] // 10))
    figure.update_yaxes(title_text=f"coupling, top {k}", col=1)
    subtitle = "mean and 95 % interval over prompts of every pair of layers; grey: one Jacobian in random bases"
    return finish(figure, f"Coupling against chance · {model_label(dataset)}", subtitle)


def _alignment(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    rows = sides(dataset, null)
    lower, layers = dataset["lower_layer"].values, dataset["layer"].values.tolist()
    lower = lower[np.unique(np.linspace(0, len(lower) - 1, MOST_PAIRS).round().astype(int))]
    titles = [f"{layer} in bases of {layers[layers.index(layer) + 1]}" for layer in lower]
    figure = make_subplots(
        rows=len(rows), cols=len(lower), subplot_titles=titles, row_titles=[side for side, _ in rows],
        vertical_spacing=0.1, horizontal_spacing=0.03,
    )  # fmt: skip
    for row, (_, data) in enumerate(rows, start=1):
        for column, layer in enumerate(lower, start=1):
            found = data.sel(lower_layer=layer)["alignment"].transpose("row", "column").values
            largest = data["singular_value"].sel(layer=layer).values[0]
            heatmap = go.Heatmap(z=found / largest, coloraxis="coloraxis", hovertemplate="%{z:.2f}<extra></extra>")
            figure.add_trace(heatmap, row=row, col=column)
    figure.update_yaxes(autorange="reversed", showticklabels=False).update_xaxes(showticklabels=False)
    _one_colour_scale(figure, cmin=0)
    subtitle = "mean |A| over prompts, over the first singular value of the layer; a bright diagonal is alignment"
    title = f"Alignment of neighbouring layers · {model_label(dataset)}"
    return finish(figure, title, subtitle, height=130 + 210 * len(rows))


def _trajectories(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    panels = sides(dataset, null)
    titles = [f"{side}: line-shape score {float(data['mean_line_shape_score']):.2f}" for side, data in panels]
    figure = make_subplots(rows=1, cols=len(panels), subplot_titles=titles)
    for column, (_, data) in enumerate(panels, start=1):
        first = data.isel(prompt=0)
        paths = first["trajectory"].dropna("position")
        for number, position in enumerate(paths["position"].values[-MOST_TOKENS:]):
            path = paths.sel(position=position).transpose("state", "component").values
            line = go.Scatter(x=path[:, 0], y=path[:, 1], mode="lines+markers", name=f"token {position}")
            line.update(line={"color": COLOURS[number % len(COLOURS)], "width": 1}, marker={"size": 4})
            line.update(showlegend=False, text=[f"x{state}" for state in paths["state"].values])
            figure.add_trace(line, row=1, col=column)
            start = go.Scatter(x=path[:1, 0], y=path[:1, 1], mode="markers", showlegend=False, hoverinfo="skip")
            start.update(marker={"color": "white", "line": {"color": "black", "width": 1}, "size": 7})
            figure.add_trace(start, row=1, col=column)
        for axis, update in ((0, figure.update_xaxes), (1, figure.update_yaxes)):
            share = float(first["trajectory_explained"].values[axis])
            update(title_text=f"principal component {axis + 1} ({share:.0%} of the variance)", row=1, col=column)
    subtitle = (
        f"x0 (white) to x{dataset.sizes['state'] - 1}, last {MOST_TOKENS} tokens of the first prompt; 1 is a line"
    )
    return finish(figure, f"Trajectories through the layers · {model_label(dataset)}", subtitle, height=460)


def _growth(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    panels = sides(dataset, null)
    titles = [
        f"{side}: R² {float(data['mean_growth_r2']):.2f}, {float(data['mean_growth_slope']):.2f} a layer"
        for side, data in panels
    ]
    figure = make_subplots(rows=1, cols=len(panels), subplot_titles=titles)
    lines = {
        "log_norm": ("mean over tokens", {"color": COLOURS[0]}),
        "log_norm_line": ("exponential growth, fitted", {"color": COLOURS[1], "dash": "dash"}),
        "log_norm_first": ("first token", {"color": NULL_COLOUR}),
    }
    for column, (_, data) in enumerate(panels, start=1):
        for name, (label, style) in lines.items():
            curve = data[name].mean("prompt")
            line = go.Scatter(x=data["state"].values, y=curve.values, line=style, name=label, legendgroup=name)
            mode = "lines" if name == "log_norm_line" else "lines+markers"
            figure.add_trace(line.update(mode=mode, showlegend=column == 1), row=1, col=column)
    figure.update_xaxes(title_text="after block (0: embedding)", dtick=max(1, dataset.sizes["state"] // 10))
    figure.update_yaxes(title_text="ln |x|", col=1)
    subtitle = "mean over prompts; R² and growth: median over tokens; the first token is not in the mean"
    return finish(figure, f"Growth of the residual stream · {model_label(dataset)}", subtitle)


def _tokens(dataset: xr.Dataset, null: xr.Dataset | None, kind: str, k: int) -> go.Figure:
    rows, layers = sides(dataset, null), dataset["layer"].values
    figure = make_subplots(
        rows=len(rows), cols=len(layers), subplot_titles=[f"layer {layer}" for layer in layers],
        row_titles=[side for side, _ in rows], horizontal_spacing=0.03, vertical_spacing=0.14,
    )  # fmt: skip
    for row, (_, data) in enumerate(rows, start=1):
        for column, layer in enumerate(layers, start=1):
            found = data["token_coupling"].sel(kind=kind, k=k, layer=layer).transpose("token", "token_2")
            figure.add_trace(_square(found.values, found["token"].values, len(layers)), row=row, col=column)
    figure.update_xaxes(type="category").update_yaxes(type="category", autorange="reversed")
    figure.update_xaxes(title_text="bases at token", row=len(rows)).update_yaxes(title_text="Jacobian at", col=1)
    _one_colour_scale(figure)
    first, last = dataset["token"].values[[0, -1]]
    what = {
        "self": "d f(x_t) / d x_t of each token t",
        "same_input": f"d f(x_t) / d x_{first} for each output token t",
        "same_output": f"d f(x_{last}) / d x_t for each input token t",
    }[kind]
    title = f"Coupling of tokens, {kind.replace('_', ' ')} · {model_label(dataset)}"
    return finish(figure, title, f"{what}; top {k}, mean over prompts", height=150 + 220 * len(rows))


def _square(values: np.ndarray, labels: np.ndarray, beside: int) -> go.Heatmap:
    values = values.copy()
    np.fill_diagonal(values, np.nan)  # a Jacobian with itself is 1 by definition
    names = [str(label) for label in labels]
    return go.Heatmap(
        z=values, x=names, y=names, coloraxis="coloraxis",
        texttemplate="%{z:.2f}" if beside * len(names) <= CELLS_WRITTEN else None,
        hovertemplate="%{y} in the bases of %{x}: %{z:.3f}<extra></extra>",
    )  # fmt: skip


def _one_colour_scale(figure: go.Figure, **limits: int | float) -> None:
    figure.update_layout(coloraxis={"colorscale": SCALE, "colorbar": {"thickness": 12}, **limits})
