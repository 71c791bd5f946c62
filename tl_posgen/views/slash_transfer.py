"""Slash scores on random tokens beside those on text, and what the ablations leave of them."""

import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from tl_posgen.views.style import COLOURS, NULL_COLOUR, check_kind, finish, model_label, sides

KINDS = ("scatter", "ablations")
N_HEADS = 8  # the strongest heads, whose ablations are drawn
NAMES = {
    "none": "as it is",
    "no_rope": "RoPE removed",
    "means": "Q, K their means",
    "means_no_rope": "means, RoPE removed",
    "rank_one": "Q, K of rank one",
    "drop_high": "high planes dropped",
    "drop_medium": "medium planes dropped",
    "drop_low": "low planes dropped",
}


def plot(dataset: xr.Dataset, null: xr.Dataset | None = None, kind: str = "scatter") -> go.Figure:
    """kind "scatter": random tokens against text, a point a head; "ablations": the strongest heads, ablated."""
    check_kind(kind, KINDS)
    return _scatter(dataset, null) if kind == "scatter" else _ablations(dataset)


def _scatter(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    panels = {"": "all keys", "_without_first": "first token left out"}
    figure = make_subplots(rows=1, cols=2, subplot_titles=list(panels.values()))
    for column, suffix in enumerate(panels, start=1):
        for side, data in reversed(sides(dataset, null)):
            heads = data[["best_distance", f"natural{suffix}", f"random{suffix}"]].to_dataframe().reset_index()
            colour = NULL_COLOUR if data is null else COLOURS[0]
            trace = go.Scatter(
                x=heads[f"natural{suffix}"],
                y=heads[f"random{suffix}"],
                mode="markers",
                marker={"color": colour, "size": 8},
                name=side,
                legendgroup=side,
                showlegend=column == 1,
                text=[f"layer {row.layer} head {row.head}, D = {row.best_distance}" for row in heads.itertuples()],
                hovertemplate="%{text}<br>text %{x:.3f}, random tokens %{y:.3f}<extra></extra>",
            )
            figure.add_trace(trace, row=1, col=column)
        line = go.Scatter(x=[0, 1], y=[0, 1], mode="lines", line={"dash": "dot", "color": NULL_COLOUR}, name="equal")
        figure.add_trace(line.update(showlegend=column == 1), row=1, col=column)
    figure.update_xaxes(title_text="slash score on text").update_yaxes(title_text="on random tokens", col=1)
    subtitle = "each head at its best distance on text; on the dotted line the slash does not depend on the text"
    return finish(figure, f"Slash scores in and out of distribution · {model_label(dataset)}", subtitle)


def _ablations(dataset: xr.Dataset) -> go.Figure:
    strongest = dataset["natural"].to_series().nlargest(N_HEADS).index.to_list()
    labels = [
        f"L{layer} H{head}, D = {int(dataset.best_distance.sel(layer=layer, head=head))}" for layer, head in strongest
    ]
    figure = go.Figure()
    for number, kind in enumerate(str(kind) for kind in dataset["ablation"].values):
        scores = [float(dataset[f"ablated_{kind}"].sel(layer=layer, head=head)) for layer, head in strongest]
        figure.add_bar(x=labels, y=scores, name=NAMES[kind], marker_color=COLOURS[number % len(COLOURS)])
    baseline = [float(dataset["baseline_score"].sel(layer=layer, head=head)) for layer, head in strongest]
    marker = {"symbol": "line-ew-open", "size": 40, "color": "black"}
    figure.add_scatter(x=labels, y=baseline, mode="markers", marker=marker, name="uniform attention")
    figure.update_yaxes(title_text="slash score").update_layout(barmode="group")
    subtitle = "the strongest heads, each at its best distance on text; q and k changed, softmax taken anew"
    return finish(figure, f"What makes the slash · {model_label(dataset)}", subtitle)
