"""What heads and the model do when pairs see another distance than theirs."""

import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from tl_posgen.views.style import COLOURS, NULL_COLOUR, check_kind, finish, head_maps, layer_curves, model_label, sides

KINDS = ("map", "agreement", "curves", "loss")


def plot(dataset: xr.Dataset, null: xr.Dataset | None = None, kind: str = "map") -> go.Figure:
    """kind "map": the share of distance, key and their interaction; "agreement": whether the key part stays; "curves":
    the distance curve of the intervention beside the fitted one; "loss": the model's loss at dummy distances."""
    check_kind(kind, KINDS)
    model = model_label(dataset)
    if kind == "map":
        measures = {"distance_share": "distance", "key_share": "key", "interaction_share": "interaction"}
        subtitle = "each query against each key at every distance: shares of the table's variance"
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
    n_columns = min(4, len(layers))
    n_rows = -(-len(layers) // n_columns)
    titles = [f"layer {layer}" for layer in layers]
    figure = make_subplots(cols=n_columns, rows=n_rows, subplot_titles=titles, vertical_spacing=0.3 / n_rows)
    for index, layer in enumerate(layers):
        for number, head in enumerate(dataset["head"].values):
            for name, dash in (("curve_intervention", "solid"), ("curve_fit", "dot")):
                curve = dataset[name].sel(layer=layer, head=head)
                line = {"dash": dash, "width": 1.5, "color": COLOURS[number % len(COLOURS)]}
                trace = go.Scatter(x=curve["distance"].values + 1, y=(curve - curve.mean()).values, name=f"head {head}")
                trace.update(line=line, showlegend=index == 0 and dash == "solid", legendgroup=f"{head}", mode="lines")
                figure.add_trace(trace, row=index // n_columns + 1, col=index % n_columns + 1)
    figure.update_xaxes(type="log").update_yaxes(title_text="score less its mean", col=1)
    figure.update_xaxes(title_text="distance + 1", row=n_rows)
    subtitle = "solid: every pair put at d, which fixes the slope; dotted: a of the fit, its slope a convention"
    return finish(figure, f"Score by distance · {model_label(dataset)}", subtitle, height=140 + 250 * n_rows)


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
