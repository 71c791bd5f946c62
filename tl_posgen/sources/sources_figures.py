"""Figures of sources: a map layer x source beside the random init, and one of every head."""

from typing import Any

import plotly.graph_objects as go
import xarray as xr

from tl_posgen.models.selection import head_name
from tl_posgen.report.figures import DIVERGING, Panels, at_labels, colour_axis, heat, model_label, sides
from tl_posgen.report.head_figures import head_rows, said_of_rows
from tl_posgen.sources.source_sums import SIDE_WORDS

SUBTITLE = "shares sum to 1 along a row; negative where a source works against the others"
OF_SOURCE = ("layer", "head", "source")
PREDICTORS = {  # of the fall of the slash score -> its variable
    "position share": "share",
    "energy of the constant": "constant_energy",
    "energy of the source": "energy",
}
FEW = 300  # cells that have their number written


def draw_layers(result: Any) -> go.Figure:
    """Draw the mean share over heads of every source, a row a layer, beside the random init."""
    both = [(side, shares_of(result, data).mean("head")) for side, data, _ in sides(result)]
    return maps(result, both, 26)


def draw_heads(result: Any) -> go.Figure:
    """Draw the share of every source, a row a head; of many heads, a row a layer."""
    both = [(side, head_rows(shares_of(result, data), "source")) for side, data, _ in sides(result)]
    return maps(result, both, 14, said_of_rows(both[0][1]))


def draw_check(result: Any) -> go.Figure:
    """Draw the fall of the slash score by what may predict it, a point a head and source."""
    panels = Panels(list(PREDICTORS), columns=len(PREDICTORS), row_height=320)
    for side, data, colour in reversed(sides(result)):
        share = shares_of(result, data)
        columns = xr.Dataset({"share": share, **{name: data[name] for name in ("fall", "constant_energy", "energy")}})
        points = columns.where(share.notnull().sum("source") > 1).stack(unit=OF_SOURCE).dropna("unit")
        names = [f"{head_name(*place)}, {source}" for *place, source in points["unit"].values]
        dots = {"text": names, "mode": "markers", "name": side, "marker": {"color": colour, "size": 5}}
        for number, name in enumerate(PREDICTORS.values()):
            panels.add(number, go.Scatter(x=points[name].values, y=points["fall"].values, **dots))
    for number, name in enumerate(PREDICTORS.values()):
        if name != "share":
            panels.figure.update_xaxes(type="log", col=number + 1)
    panels.axes("", "fall of the slash score")
    subtitle = "1 - score without the source's constant in the keys / score; a point a head and source"
    return panels.finish(f"Constants of sources, removed · {model_label(result.own)}", subtitle)


def shares_of(result: Any, data: xr.Dataset) -> xr.DataArray:
    """Return the shares [layer, head, source] at the usual side and term, only those of sources that are there, if any
    is."""
    shares = at_labels(result, data["share"]).transpose("layer", "head", "source")
    there = shares.dropna("source", how="all")
    return there if there.sizes["source"] else shares


def maps(result: Any, both: list[tuple[str, xr.DataArray]], height: int, said: str = "") -> go.Figure:
    """Draw one map a model."""
    size = 110 + height * max(len(one) for _, one in both)
    panels = Panels([side for side, _ in both], columns=1, row_height=size, vertical_spacing=0.5 * 70 / size)
    for number, (_, one) in enumerate(both):
        panels.add(number, heat(one, texttemplate="%{z:.2f}" if one.size <= FEW else None))
    panels.figure.update_layout(coloraxis=colour_axis(-1.0, 1.0, DIVERGING))
    panels.figure.update_yaxes(type="category", autorange="reversed", title_text=both[0][1].dims[0])
    panels.figure.update_xaxes(type="category", tickangle=35, nticks=32)
    usual = result.measure.usual()
    words = SIDE_WORDS[usual["side"]]
    return panels.finish(f"Sources of {usual['term']}, {words} · {model_label(result.own)}", SUBTITLE + said)
