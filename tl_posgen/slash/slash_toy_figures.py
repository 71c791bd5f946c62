"""Figures of the toy: curves over training, attention at some steps, the final slash scores."""

from itertools import cycle, product
from typing import Any

import plotly.graph_objects as go
import xarray as xr

from tl_posgen.report.figures import COLOURS, Panels, colour_axis, finish, heat, line


def heading(result: Any) -> str:
    """Return which toy it is."""
    toy = result.measure
    return f"slash toy, D = {toy.distance}, planes: {toy.planes.replace('_', ' and ')}"


def lines(curves: xr.DataArray, along: str) -> list[go.Scatter]:
    """Return a line a seed, and a dash for each kind of features where there are two."""
    if "features" not in curves.dims:
        curves = curves.expand_dims(features=["trained"])
    looks = {"trained": ("", "solid"), "unseen": (", unseen features", "dot")}
    return [
        line(curves[along].values, curves.sel(features=kind, seed=seed).values, f"seed {seed}{end}", colour, dash=dash)
        for kind, (end, dash) in looks.items()
        if kind in curves["features"]
        for seed, colour in zip(curves["seed"].values, cycle(COLOURS), strict=False)
    ]


def training(result: Any) -> go.Figure:
    """Draw curves over training, a line a seed."""
    data = result.own
    shown = {
        "squared loss": data["loss"],
        "slash score at D": data["score"],
        "r1 of Q before RoPE": data["r1"].sel(side="q"),
        "matching layer: diagonal less the rest": data["matching"],
    }
    panels = Panels(list(shown), columns=2, row_height=250)
    for number, curves in enumerate(shown.values()):
        panels.add(number, *lines(curves, "step"))
    subtitle = "held-out prompts, a line a seed; dotted: features that were never trained on"
    return panels.axes("step").finish(f"Learning · {heading(result)}", subtitle)


def maps(result: Any) -> go.Figure:
    """Draw small multiples: a row for each kind of features, a column a snapshot; the first seed."""
    data = result.own
    places = list(product(data["features"].values, data["snapshot"].values))
    titles = [f"step {step}" + ("" if kind == "trained" else ", unseen") for kind, step in places]
    panels = Panels(titles, columns=data.sizes["snapshot"], row_height=190, horizontal_spacing=0.01)
    for number, (kind, step) in enumerate(places):
        panels.add(number, heat(data["pattern"].isel(seed=0).sel(features=kind, snapshot=step, drop=True)))
    panels.figure.update_xaxes(showticklabels=False).update_yaxes(showticklabels=False, autorange="reversed")
    panels.figure.update_layout(coloraxis=colour_axis(0.0, 1.0)).update_annotations(font_size=11)
    subtitle = f"attention of one prompt, queries down, keys across; seed {data['seed'].values[0]}"
    return panels.finish(f"Attention over training · {heading(result)}", subtitle)


def profile(result: Any) -> go.Figure:
    """Draw the final slash scores at all distances."""
    data = result.own
    uniform = (data["distance"].values, data["uniform"].values, "uniform attention", "black")
    figure = go.Figure([*lines(data["profile"], "distance"), line(*uniform, dash="dash", width=1.2)])
    figure.update_xaxes(title_text="distance").update_yaxes(title_text="slash score")
    return finish(figure, f"Slash score by distance, trained · {heading(result)}", "held-out prompts, at the last step")
