"""Coupling of residual Jacobians: which layers act along the same directions, and how tokens move through them."""

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from tl_posgen.views.style import COLOURS, NULL_COLOUR, check_kind, finish, model_label, sides

KINDS = ("map", "alignment", "trajectories")


def plot(dataset: xr.Dataset, null: xr.Dataset | None = None, kind: str = "map") -> go.Figure:
    """kind "map": layer x layer coupling beside its null; "alignment": |A| of neighbouring layers; "trajectories":
    tokens in their top two principal components."""
    check_kind(kind, KINDS)
    if kind == "map":
        return _map(dataset, null)
    return _alignment(dataset) if kind == "alignment" else _trajectories(dataset, null)


def _map(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    panels = sides(dataset, null)
    k = int(dataset["k"].values[0])
    titles = [f"{side}: mean {float(data['mean_coupling'].sel(k=k)):.3f}" for side, data in panels]
    figure = make_subplots(rows=1, cols=len(panels), subplot_titles=titles)
    for column, (_, data) in enumerate(panels, start=1):
        values = data["coupling"].sel(k=k).transpose("layer", "layer_2").values.copy()
        np.fill_diagonal(values, np.nan)  # a layer with itself is 1 by definition
        labels = [str(layer) for layer in data["layer"].values]
        heatmap = go.Heatmap(z=values, x=labels, y=labels, coloraxis="coloraxis", texttemplate="%{z:.2f}")
        figure.add_trace(heatmap, row=1, col=column)
    figure.update_xaxes(title_text="bases of layer", type="category")
    figure.update_yaxes(title_text="Jacobian of layer", type="category")
    figure.update_layout(coloraxis={"colorscale": "Viridis", "colorbar": {"thickness": 12}})
    chance = float(dataset["mean_chance"].sel(k=k))
    subtitle = f"1 - || |A| - S ||_F / ||S||_F, top {k}; mean over pairs of layers; random bases reach {chance:.3f}"
    return finish(figure, f"Coupling of residual Jacobians · {model_label(dataset)}", subtitle, height=440)


def _alignment(dataset: xr.Dataset) -> go.Figure:
    lower = dataset["lower_layer"].values
    titles = [f"layer {layer} in the bases of the next" for layer in lower]
    figure = make_subplots(rows=1, cols=max(1, len(lower)), subplot_titles=titles)
    for column, layer in enumerate(lower, start=1):
        values = dataset["alignment"].sel(lower_layer=layer).transpose("row", "column").values
        figure.add_trace(go.Heatmap(z=values, coloraxis="coloraxis"), row=1, col=column)
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(coloraxis={"colorscale": "Viridis", "colorbar": {"thickness": 12}})
    subtitle = "mean |A| over prompts; a bright diagonal is alignment"
    return finish(figure, f"Alignment of neighbouring layers · {model_label(dataset)}", subtitle, height=380)


def _trajectories(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    panels = sides(dataset, null)
    titles = [f"{side}: line-shape score {float(data['line_shape_score'].median()):.2f}" for side, data in panels]
    figure = make_subplots(rows=1, cols=len(panels), subplot_titles=titles)
    for column, (_, data) in enumerate(panels, start=1):
        paths = data["trajectory"].isel(prompt=0).dropna("position")
        for number, position in enumerate(paths["position"].values[-16:]):
            path = paths.sel(position=position).transpose("state", "component").values
            colour = NULL_COLOUR if data is null else COLOURS[number % len(COLOURS)]
            line = go.Scatter(
                x=path[:, 0],
                y=path[:, 1],
                mode="lines+markers",
                line={"color": colour, "width": 1},
                marker={"size": 4},
                name=f"token {position}",
                showlegend=False,
            )
            figure.add_trace(line, row=1, col=column)
    figure.update_xaxes(title_text="principal component 1")
    figure.update_yaxes(title_text="principal component 2", col=1)
    subtitle = "last tokens of the first prompt, layer by layer; a line-shape score of 1 is a straight line"
    return finish(figure, f"Trajectories through the layers · {model_label(dataset)}", subtitle, height=460)
