"""Graph of sources: an arrow from each source to the heads whose scores it writes a share of."""

import re
from typing import Any

import numpy as np
import plotly.graph_objects as go

from tl_posgen.models.selection import head_name
from tl_posgen.report.figures import COLOURS, Panels, at_labels, model_label, sides
from tl_posgen.report.head_figures import head_names
from tl_posgen.slash.dominance import strongest

SIDE_WORDS: dict[str, str] = {"k": "keys", "q": "queries"}
N_HEADS = 12  # heads shown
LEAST_SHARE = 0.1  # of a line
ATTENTION, MLP, BIAS = -0.8, -1.6, -2.4  # rows of what is no head


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
        >>> [_place_of(name) for name in ("L1H3", "L0 MLP", "embed", "pos_embed", "b_K")]
        [(1.0, 3.0), (0.4, -1.6), (-0.6, 0.0), (-0.6, 1.0), (-0.6, -2.4)]
    """
    head = re.fullmatch(r"L(\d+)H(\d+)", source)
    if head:
        return float(head[1]), float(head[2])
    layer = re.match(r"L(\d+) ", source)
    rows = {"embed": 0.0, "pos_embed": 1.0, "attention": ATTENTION, "MLP": MLP}
    row = rows.get(source.split()[-1], BIAS)
    return (float(layer[1]) + 0.4 if layer else -0.6), row
