"""How the shallow transformer learns its slash head: curves over training, and the attention map step by step."""

import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from tl_posgen.views.style import COLOURS, SCALE, check_kind, finish

KINDS = ("training", "maps", "profile")
PANELS = {
    "loss": "squared loss",
    "score": "slash score at D",
    "r1_q": "r1 of Q before RoPE",
    "matching": "matching layer: diagonal less the rest",
}
DASHES = {"trained": "solid", "unseen": "dot"}


def plot(dataset: xr.Dataset, null: xr.Dataset | None = None, kind: str = "training") -> go.Figure:
    """kind "training": curves, a line a seed; "maps": one prompt's attention over training; "profile": its end."""
    check_kind(kind, KINDS)
    return {"training": _training, "maps": _maps, "profile": _profile}[kind](dataset)


def _title(dataset: xr.Dataset) -> str:
    return f"slash toy, D = {dataset.attrs['slash_distance']}, planes: {dataset.attrs['planes']}"


def _lines(curves: xr.DataArray, along: str) -> list[go.Scatter]:
    """A line a seed, and a dash for each kind of features where there are two."""
    kinds = [str(kind) for kind in curves["features"].values] if "features" in curves.dims else ["trained"]
    lines = []
    for kind in kinds:
        of_kind = curves.sel(features=kind) if "features" in curves.dims else curves
        for number, seed in enumerate(curves["seed"].values):
            curve = of_kind.sel(seed=seed)
            style = {"color": COLOURS[number % len(COLOURS)], "dash": DASHES[kind], "width": 1.6}
            name = f"seed {seed}" + (", unseen features" if kind == "unseen" else "")
            lines.append(go.Scatter(x=curve[along].values, y=curve.values, mode="lines", line=style, name=name))
    return lines


def _training(dataset: xr.Dataset) -> go.Figure:
    figure = make_subplots(rows=2, cols=2, subplot_titles=list(PANELS.values()), vertical_spacing=0.14)
    for index, name in enumerate(PANELS):
        for line in _lines(dataset[name], "step"):
            line.update(legendgroup=line.name, showlegend=name == "score")
            figure.add_trace(line, row=index // 2 + 1, col=index % 2 + 1)
    figure.update_xaxes(title_text="step", row=2)
    subtitle = "held-out prompts, a line a seed; dotted: features that were never trained on"
    return finish(figure, f"Learning · {_title(dataset)}", subtitle, height=640)


def _maps(dataset: xr.Dataset) -> go.Figure:
    """Small multiples: a row for each kind of features, a column a snapshot; the first seed."""
    steps, kinds = dataset["snapshot"].values, [str(kind) for kind in dataset["features"].values]
    titles = [f"step {step}" + ("" if kind == "trained" else ", unseen") for kind in kinds for step in steps]
    figure = make_subplots(rows=len(kinds), cols=len(steps), subplot_titles=titles, horizontal_spacing=0.01)
    for row, kind in enumerate(kinds, start=1):
        for column, step in enumerate(steps, start=1):
            pattern = dataset["pattern"].sel(features=kind, snapshot=step).isel(seed=0)
            heatmap = go.Heatmap(z=pattern.transpose("query", "key").values, coloraxis="coloraxis")
            heatmap.update(hovertemplate="query %{y}, key %{x}: %{z:.3f}<extra></extra>")
            figure.add_trace(heatmap, row=row, col=column)
    figure.update_xaxes(showticklabels=False).update_yaxes(showticklabels=False, autorange="reversed")
    figure.update_layout(coloraxis={"colorscale": SCALE, "cmin": 0, "cmax": 1, "colorbar": {"thickness": 12}})
    figure.update_annotations(font_size=11)
    subtitle = f"attention of one prompt, queries down, keys across; seed {dataset['seed'].values[0]}"
    return finish(figure, f"Attention over training · {_title(dataset)}", subtitle, height=120 + 190 * len(kinds))


def _profile(dataset: xr.Dataset) -> go.Figure:
    figure = go.Figure(_lines(dataset["profile"], "distance"))
    uniform = go.Scatter(x=dataset["distance"].values, y=dataset["baseline"].values, mode="lines")
    figure.add_trace(uniform.update(name="uniform attention", line={"color": "black", "dash": "dash", "width": 1.2}))
    figure.update_xaxes(title_text="distance").update_yaxes(title_text="slash score")
    return finish(figure, f"Slash score by distance, trained · {_title(dataset)}", "held-out prompts, at the last step")
