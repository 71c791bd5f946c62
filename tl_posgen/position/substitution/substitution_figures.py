"""Figures of the loss with all scores replaced, by stand-in, dose, correlation, searched split and head."""

import math
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from jaxtyping import Float

from tl_posgen.position.substitution.optimise_split import CONTROLS
from tl_posgen.report.figures import COLOURS, NULL_COLOUR, Panels, finish, head_map, line, model_label, sides
from tl_posgen.report.intervals import error_bars
from tl_posgen.report.sentences import said

NEEDED = {"search": "search_loss", "splits": "search_loss", "heads": "residual_cost"}


def drawn(data: xr.Dataset) -> list[str]:
    """Return the kinds of figures that have data: splits only if searched, heads only if their costs were measured."""
    return ["loss", "dose", "correlation", *(kind for kind, name in NEEDED.items() if name in data)]


NAMES = {
    "three_axis": "three-axis fit, all pairs",
    "three_axis_near": "three-axis fit, near pairs, width",
    "three_axis_attention": "three-axis fit, attended pairs",
    "mean_query": "mean query and key, distances",
    "k_q_simplify": "mean query and key, all distances",
    "mean_key": "mean key at distance",
    "triangle": "triangle of width",
    "own_profile": "own attention profile",
    "query_profile": "profile of each query",
}


def in_words(condition: object) -> str:
    """Return a condition's name for sentences and legends: 'triangle of width 8' for triangle_8."""
    name, _, number = str(condition).rpartition("_") if str(condition)[-1].isdigit() else (str(condition), "", "")
    return f"{NAMES.get(name, name.replace('_', ' '))} {number}".strip()


def share_texts(shares: Float[np.ndarray, " row"], form: str) -> list[str]:
    """Return the labels of bars; empty where a share is NaN."""
    return ["" if math.isnan(share) else format(share, form) for share in shares]


def loss(result: Any) -> go.Figure:
    """Draw the loss of every condition."""
    figure = go.Figure()
    for side, data, colour in sides(result):
        shares = share_texts(data["recovered"].values, ".0%") if data is result.dataset else None
        bar = go.Bar(
            x=[in_words(one) for one in data["condition"].values], y=data["loss_mean"].values, name=side, text=shares
        )
        figure.add_trace(bar.update(marker_color=colour, textposition="outside", textangle=0, cliponaxis=False))
    figure.update_layout(barmode="group", yaxis_title="loss, nats per token")
    subtitle = "every score replaced; on the bars the share of the loss recovered against uniform attention"
    return finish(figure, f"Loss with substituted scores · {model_label(result.dataset)}", subtitle)


def dose(result: Any) -> go.Figure:
    """Draw the loss against the share of the residual that is added back."""
    figure = go.Figure()
    for side, data, colour in sides(result):
        own = data is result.dataset
        for number, name in enumerate(data["stand_in"].values):
            curve, dash = data["dose_loss"].sel(stand_in=name), "solid" if own or not number else "dot"
            x, shade = curve["residual_share"].values, COLOURS[number] if own else colour
            figure.add_trace(
                line(x, curve.values, f"{in_words(name)}<br>{side}", shade, dash=dash, mode="lines+markers")
            )
    figure.add_hline(y=result.summary["loss_uniform_attention"], line_dash="dot", annotation_text="uniform attention")
    figure.update_layout(xaxis_title="share of the residual added back", yaxis_title="loss, nats per token")
    subtitle = "scores = stand-in + share × what it leaves out; 0 drops the residual, 1 is the unchanged model"
    return finish(figure, f"How much residual does it take? · {model_label(result.dataset)}", subtitle)


def correlation(result: Any) -> go.Figure:
    """Draw the rise of the loss against the correlation of stand-in and scores."""
    figure = go.Figure()
    for side, data, colour in reversed(sides(result)):
        stand_ins = data.drop_sel(condition=["unchanged", "uniform_attention"])
        x = stand_ins["r"].mean(("layer", "head")).values
        y = (stand_ins["loss_mean"] - data["loss_mean"].sel(condition="unchanged")).values
        names = [in_words(name) for name in stand_ins["condition"].values]
        if data is not result.dataset:
            marker = {"size": 9, "color": colour}
            figure.add_trace(go.Scatter(x=x, y=y, text=names, mode="markers", name=side, marker=marker))
            continue
        for number, name in enumerate(names):
            symbol = ("circle", "diamond")[number // len(COLOURS) % 2]
            marker = {"size": 11, "color": COLOURS[number % len(COLOURS)], "symbol": symbol}
            figure.add_trace(go.Scatter(x=x[[number]], y=y[[number]], mode="markers", name=name, marker=marker))
    summary, label = result.summary, "uniform attention"
    figure.add_hline(y=summary["worth"], line_dash="dot", annotation_text=label, annotation_position="bottom left")
    figure.update_layout(xaxis_title="r of stand-in and scores, mean over heads", yaxis_title="rise of the loss, nats")
    subtitle = (
        "each point a stand-in; were correlation enough, they would fall from left to right; rank correlation of r "
        f"and share recovered {said(summary['r_rank'], '.2f')}, of attention KL {said(summary['kl_rank'], '.2f')}"
    )
    return finish(figure, f"Correlation is not mechanism · {model_label(result.dataset)}", subtitle, height=520)


def search(result: Any) -> go.Figure:
    """Draw the share that each searched split recovers."""
    data = result.dataset
    share, families = data["search_recovered"].values, [str(family) for family in data["family"].values]
    counted = zip(families, data["search_parameters"].values, strict=True)
    names = [f"{family}<br>{int(n)} number{'s' if n > 1 else ''}" for family, n in counted]
    colours = [NULL_COLOUR if family in CONTROLS else COLOURS[0] for family in families]
    bars = go.Bar(x=names, y=share, text=share_texts(share, ".1%"), textposition="inside", insidetextanchor="start")
    figure = go.Figure(bars.update(marker_color=colours, error_y=error_bars(data, "search_recovered")))
    figure.update_layout(xaxis_title="what was searched, and over how many numbers", yaxis_title="share recovered")
    figure.update_yaxes(tickformat=".0%")
    chosen, reported = (result.summary[name] for name in ("search_prompts", "held_out_prompts"))
    subtitle = (
        f"chosen on {chosen} prompts, reported on {reported} others with a 95 % interval; "
        "grey: controls, one part missing, searched as hard"
    )
    return finish(figure, f"Searched splits · {model_label(data)}", subtitle)


def splits(result: Any) -> go.Figure:
    """Draw the searched distributions of distances and mean rotations, mean over the heads of a layer."""
    data = result.dataset
    families = [str(name) for name in data["free_family"].values if name != "content"]
    titles = [
        "p(d) of the searched distribution",
        *(f"length of the mean rotation by plane, {name}" for name in families),
    ]
    panels = Panels(titles)
    for number, layer in enumerate(data["layer"].values):
        colour, of_layer = COLOURS[number % len(COLOURS)], data.sel(layer=layer)
        weights = of_layer["distribution"].mean("head")
        panels.add(0, line(weights["distance"].values, weights.values, f"layer {layer}", colour))
        for panel, family in enumerate(families, start=1):
            turn = of_layer["turn"].sel(free_family=family).mean("head").values
            panels.add(panel, line(list(range(len(turn))), turn, f"layer {layer}", colour, mode="lines+markers"))
    panels.axes("plane, fast to slow").figure.update_xaxes(title_text="distance", row=1, col=1)
    panels.figure.update_yaxes(rangemode="tozero")
    subtitle = "mean over the heads of a layer; length 1: this plane carries content, 0: position averages it away"
    return panels.finish(f"The splits found · {model_label(data)}", subtitle)


FIGURES = {one.__name__: one for one in (loss, dose, correlation, search, splits)} | {
    "heads": head_map(
        *("residual_cost", "uniform_cost"),
        title="What each head's residual is worth",
        subtitle="rise of the loss (nats) with this head alone replaced: by the split of triangle {cost_width:g}; by "
        "nothing",
        limits=None,
    )
}
