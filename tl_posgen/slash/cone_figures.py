"""Figures of the cone: ranks by group of heads, cosines, gains, and the slash score of the axis alone."""

from collections.abc import Callable, Mapping
from typing import Any

import plotly.graph_objects as go
import xarray as xr

from tl_posgen.report.figures import Panels, equality, head_maps, line, model_label, sides
from tl_posgen.slash.head_groups import TOKENS, group_boxes, head_groups, head_points

BEST = ("best_measured", "best_axis_only", "best_off_axis", "best_uniform")


def ranks(title: str, subtitle: str, names: Mapping[str, str]) -> Callable[[Any], go.Figure]:
    """Return a figure of r1 by group of heads, with all tokens and without the first."""

    def figure(result: Any) -> go.Figure:
        panels = group_boxes({words: head_groups(result, one) for one, words in TOKENS.items()}, names, "r1")
        panels.figure.update_yaxes(range=[0, 1.03])
        return panels.finish(f"{title} · {model_label(result.dataset)}", subtitle)

    return figure


def axis_map(
    title: str, subtitle: str, limits: tuple[float, float] | None, **labels: str
) -> Callable[[Any], go.Figure]:
    """Return a figure of head maps of W_Q's and W_K's effect on the axis, all tokens."""

    def figure(result: Any) -> go.Figure:
        both = [data.sel(variant="all") for _, data, _ in sides(result)]
        null = both[1] if len(both) > 1 else None
        heading = f"{title} · {model_label(result.dataset)}"
        return head_maps(both[0], null, labels, title=heading, subtitle=subtitle, limits=limits)

    return figure


def cosines(result: Any) -> go.Figure:
    """Draw histograms of the cosines of inputs with their axis, one panel per layer."""
    layers, data = result.dataset["layer"].values, result.dataset.sel(variant="all")
    titles = [
        f"layer {layer}: mean {mean:.2f}, r1 {r1:.2f}"
        for layer, mean, r1 in zip(layers, data["cosine_mean"].values, data["r1_h"].values, strict=True)
    ]
    panels = Panels(titles, shared_yaxes="all", horizontal_spacing=0.03)
    for number, layer in enumerate(layers):
        for side, one, colour in sides(result):
            share = one["cosine_share"].sel(variant="all", layer=layer)
            curve = line(one["cosine"].values, share.values, side, colour, width=1.4, fill="tozeroy")
            panels.add(number, curve.update(line_shape="hvh"))
    panels.axes("cosine with the axis", "share of inputs").figure.update_xaxes(range=[-1, 1])
    panels.figure.update_yaxes(tickformat=".0%")
    subtitle = "cosine of each attention input, after the norm, with their top right-singular vector; all tokens"
    return panels.finish(f"The cone of attention inputs · {model_label(result.dataset)}", subtitle)


def counterfactual(result: Any) -> go.Figure:
    """Draw the slash score of the axis part alone, and of the rest, against the measured score."""
    panels = Panels(list(TOKENS.values()), columns=2, row_height=280, shared_yaxes=True)
    kinds = {"best_axis_only": ("only the axis part", "circle"), "best_off_axis": ("all but the axis part", "x")}
    top = float(result.dataset[["best_measured", "best_axis_only"]].to_array().max())
    for number, variant in enumerate(TOKENS):
        for group, colour, heads in reversed(head_groups(result, variant)):
            for name, (label, symbol) in kinds.items():
                look = {"color": colour, "symbol": symbol, "size": 7}
                points = head_points(heads, "best_measured", name, "measured %{x:.3f}, then %{y:.3f}", marker=look)
                panels.add(number, points.update(name=f"{group}: {label}"))
        panels.add(number, equality(top))
    panels.axes("measured slash score", "slash score after")
    subtitle = "each head at its best distance; inputs of W_Q and W_K changed in its layer alone, softmax taken anew"
    return panels.finish(f"Is the axis enough for the slash? · {model_label(result.dataset)}", subtitle)


FIGURES = {
    "rank": ranks(
        "How near rank one are queries and keys?",
        "share of the first singular value in the energy of Q and K before RoPE, not centred; a point a head",
        {"r1_q": "Q", "r1_k": "K"},
    ),
    "cosines": cosines,
    "gain": axis_map(
        "Gain of the cone's axis",
        "|u'W| over its root mean square over directions: 1 is no preference for the axis u",
        None,
        gain_q="W_Q",
        gain_k="W_K",
    ),
    "share": axis_map(
        "Energy of queries and keys from the cone's axis",
        "share of |H W|² that the axis part of the inputs H makes",
        (0.0, 1.0),
        axis_share_q="Q",
        axis_share_k="K",
    ),
    "counterfactual": counterfactual,
    "bias": ranks(
        "What biases add to rank one",
        "r1 of H W and of H W + b, before any norm of queries and keys; a bias alone has r1 = 1",
        {
            "r1_input_q": "Q, input part",
            "r1_sum_q": "Q, with bias",
            "r1_input_k": "K, input part",
            "r1_sum_k": "K, with bias",
        },
    ),
}


def drawn(data: xr.Dataset) -> list[str]:
    """Return the kinds of figures: `bias` only if there are biases."""
    biased = bool((data["bias_share_q"] > 0).any() | (data["bias_share_k"] > 0).any())
    return [*(kind for kind in FIGURES if kind != "bias"), *(["bias"] if biased else [])]
