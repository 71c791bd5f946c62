"""Slash scores on random tokens beside those on text, what the ablations leave of them, and the patterns themselves."""

import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from tl_posgen.views.circuits import attention_maps
from tl_posgen.views.style import COLOURS, NULL_COLOUR, check_kind, finish, model_label, sides

KINDS = ("scatter", "ablations")
N_HEADS = 8  # the strongest heads, whose ablations are drawn
N_DISTANCES = 5  # panels of the scatter in one row
VARIANTS = {"all": ("", "all keys"), "without_first": ("_without_first", "first token left out")}
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
    return _scatter(dataset, null) if kind == "scatter" else _ablations(dataset, null)


def show(dataset: xr.Dataset, example: int = 0):
    """A circuitsvis page of one of the strongest heads: its pattern on text and on random tokens, side by side."""
    patterns = dataset["pattern"].isel(example=example).transpose("source", "query", "key").values
    text, random = (dataset["token"].sel(source=source).values for source in ("natural", "random"))
    both = [f"{one} ¦ {other}" for one, other in zip(text, random, strict=True)]
    return attention_maps(patterns, both, ["text", "random"])


def examples(dataset: xr.Dataset) -> list[str]:
    """Which head each example is, with its scores on both."""
    labels = []
    for layer, head in zip(dataset["example_layer"].values, dataset["example_head"].values, strict=True):
        of_head = dataset[["best_distance", "natural", "random"]].sel(layer=layer, head=head)
        labels.append(
            f"layer {layer}, head {head}, D = {int(of_head.best_distance)}: slash score {float(of_head.natural):.3f} "
            f"on text, {float(of_head.random):.3f} on random tokens (each token: of the text ¦ drawn at random)"
        )
    return labels


def _scatter(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    """A column a distance, a row with and a row without the first token."""
    distances = [int(distance) for distance in dataset["at"].values][:N_DISTANCES]
    figure = make_subplots(
        rows=2,
        cols=len(distances),
        subplot_titles=[_panel(dataset, null, variant, at) for variant in VARIANTS for at in distances],
        horizontal_spacing=0.04,
        vertical_spacing=0.16,
    )
    for row, (suffix, label) in enumerate(VARIANTS.values(), start=1):
        for column, distance in enumerate(distances, start=1):
            for side, data in sides(dataset, null):
                points = _points(data, f"score{suffix}", distance)
                look = {"color": NULL_COLOUR, "symbol": "x-thin-open"} if data is null else {"color": COLOURS[0]}
                points.update(name=side, legendgroup=side, showlegend=row == column == 1, marker={"size": 7, **look})
                figure.add_trace(points, row=row, col=column)
            top = float(dataset[f"score{suffix}"].sel(distance=distance).max())
            line = go.Scatter(x=[0, top], y=[0, top], mode="lines", line={"dash": "dot", "color": "black", "width": 1})
            line.update(name="equal", showlegend=row == column == 1, hoverinfo="skip")
            figure.add_trace(line, row=row, col=column)
        figure.update_yaxes(title_text=f"random tokens<br>{label}", row=row, col=1)
    figure.update_xaxes(title_text="on text", row=2)
    figure.update_annotations(font_size=11)
    subtitle = "a point a head, a column a distance D; r: Pearson over heads, ρ: Spearman; dotted: equal"
    title = f"Slash scores in and out of distribution · {model_label(dataset)}"
    return finish(figure, title, subtitle, height=640)


def _panel(dataset: xr.Dataset, null: xr.Dataset | None, variant: str, distance: int) -> str:
    at, of_null = (
        None if data is None else data[["pearson", "spearman"]].sel(variant=variant, at=distance)
        for data in (dataset, null)
    )
    assert at is not None
    beside = "" if of_null is None else f" (null {float(of_null.pearson):.2f})"
    return f"D = {distance}: r {float(at.pearson):.2f}{beside}, ρ {float(at.spearman):.2f}"


def _points(data: xr.Dataset, name: str, distance: int) -> go.Scatter:
    heads = data[name].sel(distance=distance, drop=True).stack(head_of=("layer", "head"))
    return go.Scatter(
        x=heads.sel(source="natural").values,
        y=heads.sel(source="random").values,
        mode="markers",
        text=[f"layer {layer} head {head}" for layer, head in heads["head_of"].values],
        hovertemplate=f"%{{text}}, D = {distance}<br>text %{{x:.3f}}, random tokens %{{y:.3f}}<extra></extra>",
    )


def _ablations(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    shown = sides(dataset, null)
    figure = make_subplots(rows=len(shown), cols=1, subplot_titles=[side for side, _ in shown], vertical_spacing=0.16)
    for row, (_, data) in enumerate(shown, start=1):
        for trace in _bars(data):
            figure.add_trace(trace.update(showlegend=row == 1, legendgroup=trace.name), row=row, col=1)
    figure.update_yaxes(title_text="slash score").update_layout(barmode="group")
    subtitle = "the strongest heads, each at its best distance on text; q and k changed, softmax taken anew"
    if dataset.attrs.get("left_out"):
        subtitle += "; no layer has rotary planes, so none can be turned off"
    title = f"What makes the slash · {model_label(dataset)}"
    return finish(figure, title, subtitle, height=150 + 270 * len(shown))


def _bars(dataset: xr.Dataset) -> list:
    strongest = dataset["natural"].to_series().nlargest(N_HEADS).index.to_list()
    labels = [
        f"L{layer} H{head}, D = {int(dataset.best_distance.sel(layer=layer, head=head))}" for layer, head in strongest
    ]
    traces: list = []
    for number, kind in enumerate(str(kind) for kind in dataset["ablation"].values):
        scores = [float(dataset[f"ablated_{kind}"].sel(layer=layer, head=head)) for layer, head in strongest]
        traces.append(go.Bar(x=labels, y=scores, name=NAMES[kind], marker_color=COLOURS[number % len(COLOURS)]))
    baseline = [float(dataset["baseline_score"].sel(layer=layer, head=head)) for layer, head in strongest]
    marker = {"symbol": "line-ew-open", "size": 40, "color": "black"}
    return [*traces, go.Scatter(x=labels, y=baseline, mode="markers", marker=marker, name="uniform attention")]
