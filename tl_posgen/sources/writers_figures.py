"""Figures of single heads: who writes their position, as a graph, and curves of their strongest pairs of sources."""

import re
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.report.figures import COLOURS, NULL_COLOUR, Panels, at_labels, line, model_label, sides, thinned

N_CURVES, N_HEADS = 6, 12  # heads shown
LEAST_SHARE = 0.1  # of an arrow
MLP, BIAS = -1.5, -2.5  # rows of what is no head


def strongest(result: Any, n: int) -> list[tuple[int, int]]:
    """Return the heads whose scores have most of the usual term, in the model's order."""
    size = at_labels(result, result.own["mean_square"]).stack(unit=("layer", "head")).dropna("unit")
    chosen = size["unit"].values[np.argsort(-size.values, kind="stable")[:n]]
    return sorted((int(layer), int(head)) for layer, head in chosen)


def draw_curves(result: Any) -> go.Figure:
    """Draw the curve of mean query and mean key, and those of its strongest pairs of sources, a panel a head."""
    heads = strongest(result, N_CURVES)
    panels = Panels([f"L{layer}H{head}" for layer, head in heads], columns=3, row_height=260)
    data = thinned(result.own[["curve", "whole_curve", "pair_sources"]])
    distance, colours = data["distance"].values, dict[str, str]()
    for panel, (layer, head) in enumerate(heads):
        one = data.sel(layer=layer, head=head)
        panels.add(panel, line(distance, one["whole_curve"].values, "all sources", "black", width=2.4))
        if result.null is not None and "whole_curve" in result.null:
            null = thinned(result.null[["whole_curve"]]).sel(layer=layer, head=head)
            panels.add(panel, line(distance, null["whole_curve"].values, "random init, all sources", NULL_COLOUR))
        for pair, name in enumerate(one["pair_sources"].values):
            if name:
                colour = colours.setdefault(str(name), COLOURS[len(colours) % len(COLOURS)])
                panels.add(panel, line(distance, one["curve"].values[pair], str(name), colour, dash="dash"))
    subtitle = "score of the mean query and mean key less its mean over distances; dashed: query source · key source"
    figure = panels.axes("distance", "logits").finish(f"Curves of sources · {model_label(result.own)}", subtitle)
    return figure.update_xaxes(type="log")


def draw_graph(result: Any) -> go.Figure:
    """Draw an arrow from each source to each head whose term it writes a share of, the width by the share."""
    both = [(side, data) for side, data, _ in sides(result)]
    panels, heads = Panels([side for side, _ in both], columns=1, row_height=420), strongest(result, N_HEADS)
    for number, (_, data) in enumerate(both):
        shares = at_labels(result, data["share"])
        for layer, head in heads:
            of_head = shares.sel(layer=layer, head=head).dropna("source")
            panels.add(number, *arrows(of_head, (layer, head)))
        names = [name for name in shares["source"].values.tolist() if name.endswith("MLP") or "H" in name]
        places = [*map(place_of, ["embed", *names]), *heads]
        marks = ["embed", *names, *(f"L{layer}H{head}" for layer, head in heads)]
        xs, ys = zip(*places, strict=True)
        style = {"mode": "markers", "marker": {"size": 9, "color": "black"}, "name": None, "showlegend": False}
        panels.add(number, go.Scatter(x=xs, y=ys, text=marks, hoverinfo="text", **style))
    layers, rows = [sorted({int(one) for one in result.own[dim].values}) for dim in ("layer", "head")]
    ticks = {"tickvals": [MLP, BIAS, *rows], "ticktext": ["MLP", "bias", *map(str, rows)]}
    panels.axes("layer", "head").figure.update_yaxes(**ticks).update_xaxes(tickvals=[-0.6, *range(max(layers) + 1)])
    panels.figure.update_xaxes(ticktext=["embed", *map(str, range(max(layers) + 1))])
    words = {"k": "keys", "q": "queries"}[result.measure.usual()["side"]]
    subtitle = (
        f"arrows: shares of at least {LEAST_SHARE:.0%}; red: negative; the {len(heads)} heads with the largest E w^2"
    )
    title = f"Who writes {result.measure.usual()['term']}, through {words} · {model_label(result.own)}"
    return panels.finish(title, subtitle)


def arrows(shares: xr.DataArray, head: tuple[int, int]) -> list[go.Scatter]:
    """Return a line from the place of each source to the head, by the share."""
    found = []
    for name, share in zip(shares["source"].values.tolist(), shares.values, strict=True):
        if abs(share) >= LEAST_SHARE:
            (x, y), colour = place_of(name), COLOURS[0] if share > 0 else COLOURS[1]
            words = f"{name} → L{head[0]}H{head[1]}: {share:.2f}"
            points = {
                "x": np.linspace(x, head[0], 9),
                "y": np.linspace(y, head[1], 9),
                "hoverinfo": "text",
                "text": words,
            }
            style = {"mode": "lines", "line": {"width": 7 * min(abs(share), 1.2), "color": colour}, "opacity": 0.55}
            found.append(go.Scatter(name=None, showlegend=False, **points, **style))
    return found


def place_of(source: str) -> tuple[float, float]:
    """Return where a source stands: heads at their layer and number, what is no head below them, behind its layer.

    Example:
        >>> place_of("L1H3"), place_of("L0 MLP"), place_of("embed + L0 MLP"), place_of("b_K")
        ((1.0, 3.0), (0.4, -1.5), (-0.6, 0.0), (-0.6, -2.5))
    """
    head = re.fullmatch(r"L(\d+)H(\d+)", source)
    if head:
        return float(head[1]), float(head[2])
    layer = re.match(r"L(\d+) ", source)
    row = 0.0 if source.startswith("embed") or source.endswith("attention") else MLP if source.endswith("MLP") else BIAS
    return (float(layer[1]) + 0.4 if layer else -0.6), row
