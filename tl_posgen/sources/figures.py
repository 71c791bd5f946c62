"""Figures of sources: maps, the check, and of single heads who writes their position and curves of pairs of sources."""

import re
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.models.selection import head_name
from tl_posgen.report.figures import (
    COLOURS,
    DIVERGING,
    NULL_COLOUR,
    Panels,
    at_labels,
    colour_axis,
    heat,
    line,
    model_label,
    sides,
)
from tl_posgen.report.head_figures import head_names, head_rows, said_of_rows, thinned
from tl_posgen.slash.layer_means import strongest
from tl_posgen.sources.constants import OF_SOURCE, PREDICTORS
from tl_posgen.sources.source_sums import SIDE_WORDS

SUBTITLE = "shares sum to 1 along a row; negative where a source works against the others"
FEW = 300  # cells that have their number written


def draw_layers(result: Any) -> go.Figure:
    """Draw the mean share over heads of every source, a row a layer, beside the random init."""
    both = [(side, _shares_of(result, data).mean("head")) for side, data, _ in sides(result)]
    return _maps(result, both, 26)


def draw_heads(result: Any) -> go.Figure:
    """Draw the share of every source, a row a head; of many heads, a row a layer."""
    both = [(side, head_rows(_shares_of(result, data), "source")) for side, data, _ in sides(result)]
    return _maps(result, both, 14, said_of_rows(both[0][1]))


def draw_check(result: Any) -> go.Figure:
    """Draw the fall of the slash score by what may predict it, a point a head and source."""
    panels = Panels(list(PREDICTORS), columns=len(PREDICTORS), row_height=320)
    for side, data, colour in reversed(sides(result)):
        share = _shares_of(result, data)
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


def _shares_of(result: Any, data: xr.Dataset) -> xr.DataArray:
    """Return the shares [layer, head, source] at the usual side and term, only those of sources that are there, if any
    is."""
    shares = at_labels(result, data["share"]).transpose("layer", "head", "source")
    there = shares.dropna("source", how="all")
    return there if there.sizes["source"] else shares


def _maps(result: Any, both: list[tuple[str, xr.DataArray]], height: int, said: str = "") -> go.Figure:
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


# Single heads


N_CURVES, N_HEADS = 6, 12  # heads shown
LEAST_SHARE = 0.1  # of a line
ATTENTION, MLP, BIAS = -0.8, -1.6, -2.4  # rows of what is no head


def draw_curves(result: Any) -> go.Figure:
    """Draw the curve of mean query and mean key, and those of its strongest pairs of sources, a panel a head of those
    whose scores have most of the usual term."""
    heads = sorted(strongest(at_labels(result, result.own["mean_square"]), N_CURVES))
    panels = Panels(head_names(heads), columns=3, row_height=260)
    data = thinned(result.own[["curve", "whole_curve", "pair_sources"]])
    distance, styles = data["distance"].values + 1, dict[str, tuple[str, str]]()
    for panel, (layer, head) in enumerate(heads):
        one = data.sel(layer=layer, head=head)
        panels.add(panel, line(distance, one["whole_curve"].values, "all sources", "black", width=2.4))
        if result.null is not None and "whole_curve" in result.null:
            null = thinned(result.null[["whole_curve"]]).sel(layer=layer, head=head)
            panels.add(panel, line(distance, null["whole_curve"].values, "random init, all sources", NULL_COLOUR))
        for pair, name in enumerate(one["pair_sources"].values):
            if name:
                n = len(styles)  # a colour and a dash that no other of the first 24 pairs has
                own_style = COLOURS[n % len(COLOURS)], ("dash", "dot", "dashdot")[n // len(COLOURS) % 3]
                colour, dash = styles.setdefault(str(name), own_style)
                panels.add(panel, line(distance, one["curve"].values[pair], str(name), colour, dash=dash))
    subtitle = "score of the mean query and mean key less its mean over distances; broken: query source · key source"
    figure = panels.axes("distance + 1", "logits").finish(f"Curves of sources · {model_label(result.own)}", subtitle)
    return figure.update_xaxes(type="log")


def draw_graph(result: Any) -> go.Figure:
    """Draw a line from each source to each head whose term it writes a share of, the width by the share."""
    both = [(side, data) for side, data, _ in sides(result)]
    heads = sorted(strongest(at_labels(result, result.own["mean_square"]), N_HEADS))
    panels = Panels([side for side, _ in both], columns=1, row_height=420)
    for number, (_, data) in enumerate(both):
        shares = at_labels(result, data["share"])
        for layer, head in heads:
            of_head = shares.sel(layer=layer, head=head).dropna("source")
            for name, share in of_head[abs(of_head) >= LEAST_SHARE].to_series().items():
                (x, y), colour = _place_of(str(name)), COLOURS[0] if share > 0 else COLOURS[1]
                words = f"{name} → {head_name(layer, head)}: {share:.2f}"
                arrow = go.Scatter(x=np.linspace(x, layer, 9), y=np.linspace(y, head, 9), text=words, hoverinfo="text")
                arrow.update(mode="lines", line={"width": 7 * min(abs(share), 1.2), "color": colour}, opacity=0.55)
                panels.add(number, arrow.update(name=None, showlegend=False))
        names = shares["source"].values.tolist()
        places = [*map(_place_of, names), *heads]
        marks = [*names, *head_names(heads)]
        xs, ys = zip(*places, strict=True)
        style = {"mode": "markers", "marker": {"size": 9, "color": "black"}, "name": None, "showlegend": False}
        panels.add(number, go.Scatter(x=xs, y=ys, text=marks, hoverinfo="text", **style))
    layers, rows = [sorted({int(one) for one in result.own[dim].values}) for dim in ("layer", "head")]
    ticks = {"tickvals": [ATTENTION, MLP, BIAS, *rows], "ticktext": ["attention", "MLP", "bias", *map(str, rows)]}
    panels.axes("layer", "head").figure.update_yaxes(**ticks).update_xaxes(tickvals=[-0.6, *range(max(layers) + 1)])
    panels.figure.update_xaxes(ticktext=["embed", *map(str, range(max(layers) + 1))])
    words = SIDE_WORDS[result.measure.usual()["side"]]
    subtitle = (
        f"from each source to the {len(heads)} heads whose scores have most of it: shares of at least "
        f"{LEAST_SHARE:.0%}, the width by the share; red: negative"
    )
    title = f"Who writes {result.measure.usual()['term']}, through {words} · {model_label(result.own)}"
    return panels.finish(title, subtitle)


def _place_of(source: str) -> tuple[float, float]:
    """Return where a source stands: heads at their layer and number, what is no head below them, behind its layer.

    Example:
        >>> [_place_of(name) for name in ("L1H3", "L0 MLP", "embed + L0 MLP", "pos_embed", "b_K")]
        [(1.0, 3.0), (0.4, -1.6), (-0.6, 0.0), (-0.6, 1.0), (-0.6, -2.4)]
    """
    head = re.fullmatch(r"L(\d+)H(\d+)", source)
    if head:
        return float(head[1]), float(head[2])
    layer = re.match(r"L(\d+) ", source)
    rows = {"embed": 0.0, "embed + L0 MLP": 0.0, "pos_embed": 1.0}
    row = next((row for word, row in (("attention", ATTENTION), ("MLP", MLP)) if source.endswith(word)), BIAS)
    row = rows.get(source, row)
    return (float(layer[1]) + 0.4 if layer else -0.6), row
