"""Figures of the cone: ranks by group of heads, cosines, gains, and the slash score of the axis alone."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import plotly.graph_objects as go

from tl_posgen.report.figures import Panels, equality, model_label
from tl_posgen.report.head_figures import head_map, head_points
from tl_posgen.slash.head_groups import TITLES, group_boxes, head_groups

Q_AND_K = {"Q": {"side": "q"}, "K": {"side": "k"}}


def ranks(result: Any, columns: Mapping[str, Any], title: str, subtitle: str) -> go.Figure:
    """Draw r1 by group of heads, with all tokens and without the first."""
    panels = group_boxes({words: head_groups(result, one) for one, words in TITLES.items()}, columns, "r1")
    panels.figure.update_yaxes(range=[0, 1.03])
    return panels.finish(f"{title} · {model_label(result.own)}", subtitle)


def counterfactual(result: Any) -> go.Figure:
    """Draw the slash score of the axis part alone, and of the rest, against the measured one."""
    panels = Panels(list(TITLES.values()), columns=2, row_height=280, shared_yaxes=True)
    kinds = {"axis only": ("only the axis part", "circle"), "off axis": ("all but the axis part", "x")}
    top = float(result.own["best_score"].sel(input=["measured", "axis only"]).max())
    for number, tokens in enumerate(TITLES):
        for group, colour, heads in reversed(head_groups(result, tokens)):
            score = heads["best_score"]
            for part, (label, symbol) in kinds.items():
                look = {"color": colour, "symbol": symbol, "size": 7}
                hover = "measured %{x:.3f}, then %{y:.3f}"
                points = head_points(score.sel(input="measured"), score.sel(input=part), hover, marker=look)
                panels.add(number, points.update(name=f"{group}: {label}"))
        panels.add(number, equality(top))
    panels.axes("measured slash score", "slash score after")
    subtitle = "each head at its best distance; inputs of W_Q and W_K changed in its layer alone, softmax taken anew"
    return panels.finish(f"Is the axis enough for the slash? · {model_label(result.own)}", subtitle)


FIGURES: Mapping[str, Callable[[Any], go.Figure]] = {
    "rank": partial(
        ranks,
        columns={name: ("r1", side) for name, side in Q_AND_K.items()},
        title="How near rank one are queries and keys?",
        subtitle="share of the first singular value in the energy of Q and K before RoPE, not centred; a point a head",
    ),
    "gain": head_map(
        *(("gain", side) for side in Q_AND_K.values()),
        title="Gain of the cone's axis",
        subtitle="|u'W| over its root mean square over directions: 1 is no preference for the axis u",
        limits=None,
    ),
    "counterfactual": counterfactual,
}
