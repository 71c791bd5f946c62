"""What heads and the model do when pairs see another distance than theirs."""

import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from tl_posgen.views.style import COLOURS, NULL_COLOUR, check_kind, finish, head_maps, layer_curves, model_label, sides

KINDS = ("map", "agreement", "curves", "loss")


def plot(dataset: xr.Dataset, null: xr.Dataset | None = None, kind: str = "map") -> go.Figure:
    """kind "map": how additive each head is in distance and key; "agreement": whether the key part stays; "curves": the
    distance curve of the intervention beside the fitted one; "loss": the model's loss at dummy distances."""
    check_kind(kind, KINDS)
    model = model_label(dataset)
    if kind == "map":
        measures = {"additive_r": "additive r", "interaction_share": "interaction share"}
        subtitle = "each query against each key at every distance: table = distance part + key part + interaction"
        return head_maps(dataset, null, measures, title=f"Dummy-distance tables · {model}", subtitle=subtitle)
    if kind == "agreement":
        reference = dataset["d0"].values[0]
        title, subtitle = (
            f"Does the key part stay? · {model}",
            f"correlation over keys with the key part at d0 = {reference}",
        )
        return layer_curves(
            dataset, null, "key_agreement", "d0", title=title, subtitle=subtitle, y_title="correlation", log_x=True
        )
    return _curves(dataset) if kind == "curves" else _loss(dataset, null)


def _curves(dataset: xr.Dataset) -> go.Figure:
    layers = dataset["layer"].values
    figure = make_subplots(cols=len(layers), rows=1, subplot_titles=[f"layer {layer}" for layer in layers])
    for column, layer in enumerate(layers, start=1):
        for number, head in enumerate(dataset["head"].values):
            for name, dash in (("curve_intervention", "solid"), ("curve_fit", "dot")):
                curve = dataset[name].sel(layer=layer, head=head)
                label = f"head {head}" if dash == "solid" else f"head {head}, fitted a"
                line = {"dash": dash, "color": COLOURS[number % len(COLOURS)]}
                trace = go.Scatter(x=curve["distance"].values + 1, y=(curve - curve.mean()).values, name=label)
                trace.update(line=line, showlegend=column == 1, legendgroup=label, mode="lines")
                figure.add_trace(trace, row=1, col=column)
    figure.update_xaxes(type="log", title_text="distance + 1").update_yaxes(title_text="score less its mean", col=1)
    subtitle = "solid: every pair put at d, which fixes the slope; dotted: a of the fit, its slope a convention"
    return finish(figure, f"Score by distance · {model_label(dataset)}", subtitle)


def _loss(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    figure = make_subplots(cols=2, rows=1, subplot_titles=["every pair at d0", "distances frozen beyond the limit"])
    for side, data in sides(dataset, null):
        colour = NULL_COLOUR if data is null else COLOURS[0]
        for column, (name, along) in enumerate((("loss_at", "d0"), ("loss_beyond", "limit")), start=1):
            trace = go.Scatter(x=data[along].values + 1, y=data[name].values, name=side, line={"color": colour})
            figure.add_trace(trace.update(showlegend=column == 1, mode="lines+markers"), row=1, col=column)
            figure.add_hline(y=float(data["loss"]), line_dash="dot", line_color=colour, row=1, col=column)  # pyright: ignore[reportArgumentType]
    figure.update_xaxes(type="log").update_xaxes(title_text="d0 + 1", col=1).update_xaxes(title_text="limit + 1", col=2)
    figure.update_yaxes(title_text="loss, nats per token", col=1)
    subtitle = "all heads of all layers; dotted: the untouched model"
    return finish(figure, f"Loss at dummy distances · {model_label(dataset)}", subtitle)
