"""Figures of the loss with all scores replaced, by stand-in, dose, correlation, searched split, head and token."""

import math
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from jaxtyping import Float

from tl_posgen.core.measure import TokenView
from tl_posgen.core.numbers import format_number
from tl_posgen.position.substitution.optimise_split import CONTROLS
from tl_posgen.report.circuits import token_colours
from tl_posgen.report.figures import COLOURS, NULL_COLOUR, Panels, finish, head_map, line, model_label, sides

NEEDED = {"search": "search_loss", "splits": "search_loss", "heads": "cost"}
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


def draw_loss(result: Any) -> go.Figure:
    """Draw the loss of every condition."""
    figure = go.Figure()
    for side, data, colour in sides(result):
        shares = share_texts(data["recovered"].sel(end="value").values, ".0%") if data is result.own else None
        bar = go.Bar(
            x=[in_words(one) for one in data["condition"].values],
            y=data["loss"].mean("prompt").values,
            name=side,
            text=shares,
        )
        figure.add_trace(bar.update(marker_color=colour, textposition="outside", textangle=0, cliponaxis=False))
    figure.update_layout(barmode="group", yaxis_title="loss, nats per token")
    subtitle = "every score replaced; on the bars the share of the loss recovered against uniform attention"
    return finish(figure, f"Loss with substituted scores · {model_label(result.own)}", subtitle)


def draw_dose(result: Any) -> go.Figure:
    """Draw the loss against the share of the residual that is added back."""
    figure = go.Figure()
    for side, data, colour in sides(result):
        own = data is result.own
        for number, name in enumerate(data["stand_in"].values):
            curve, dash = data["dose_loss"].sel(stand_in=name).mean("prompt"), "solid" if own or not number else "dot"
            x, shade = curve["residual_share"].values, COLOURS[number] if own else colour
            figure.add_trace(
                line(x, curve.values, f"{in_words(name)}<br>{side}", shade, dash=dash, mode="lines+markers")
            )
    figure.add_hline(
        y=float(result.own["loss"].sel(condition="uniform_attention").mean()),
        line_dash="dot",
        annotation_text="uniform attention",
    )
    figure.update_layout(xaxis_title="share of the residual added back", yaxis_title="loss, nats per token")
    subtitle = "scores = stand-in + share × what it leaves out; 0 drops the residual, 1 is the unchanged model"
    return finish(figure, f"How much residual does it take? · {model_label(result.own)}", subtitle)


def draw_correlation(result: Any) -> go.Figure:
    """Draw the rise of the loss against the correlation of stand-in and scores."""
    figure = go.Figure()
    for side, data, colour in reversed(sides(result)):
        stand_ins = data.drop_sel(condition=["unchanged", "uniform_attention"])
        x = stand_ins["r"].mean(("layer", "head")).values
        y = (stand_ins["loss"] - data["loss"].sel(condition="unchanged")).mean("prompt").values
        names = [in_words(name) for name in stand_ins["condition"].values]
        if data is not result.own:
            marker = {"size": 9, "color": colour}
            figure.add_trace(go.Scatter(x=x, y=y, text=names, mode="markers", name=side, marker=marker))
            continue
        for number, name in enumerate(names):
            symbol = ("circle", "diamond")[number // len(COLOURS) % 2]
            marker = {"size": 11, "color": COLOURS[number % len(COLOURS)], "symbol": symbol}
            figure.add_trace(go.Scatter(x=x[[number]], y=y[[number]], mode="markers", name=name, marker=marker))
    losses, label = result.own["loss"].mean("prompt"), "uniform attention"
    worth = float(losses.sel(condition="uniform_attention") - losses.sel(condition="unchanged"))
    figure.add_hline(y=worth, line_dash="dot", annotation_text=label, annotation_position="bottom left")
    r_rank, kl_rank = (
        format_number(float(result.own["rank"].sel(predictor=one)), ".2f") for one in ("r", "attention_kl")
    )
    figure.update_layout(xaxis_title="r of stand-in and scores, mean over heads", yaxis_title="rise of the loss, nats")
    subtitle = (
        "each point a stand-in; were correlation enough, they would fall from left to right; rank correlation of r "
        f"and share recovered {r_rank}, of attention KL {kl_rank}"
    )
    return finish(figure, f"Correlation is not mechanism · {model_label(result.own)}", subtitle, height=520)


def draw_search(result: Any) -> go.Figure:
    """Draw the share that each searched split recovers."""
    data = result.own
    share, low, high = data["search_recovered"].transpose("end", "family").values
    families = [str(family) for family in data["family"].values]
    counted = zip(families, data["n_parameters"].values, strict=True)
    names = [f"{family}<br>{int(n)} number{'s' if n > 1 else ''}" for family, n in counted]
    colours = [NULL_COLOUR if family in CONTROLS else COLOURS[0] for family in families]
    bars = go.Bar(x=names, y=share, text=share_texts(share, ".1%"), textposition="inside", insidetextanchor="start")
    error_bars = {"array": high - share, "arrayminus": share - low, "thickness": 1, "width": 0}
    figure = go.Figure(bars.update(marker_color=colours, error_y=error_bars))
    figure.update_layout(xaxis_title="what was searched, and over how many numbers", yaxis_title="share recovered")
    figure.update_yaxes(tickformat=".0%")
    chosen, reported = (data.attrs[name] for name in ("search_prompts", "held_out_prompts"))
    subtitle = (
        f"chosen on {chosen} prompts, reported on {reported} others with a 95 % interval; "
        "grey: controls, one part missing, searched as hard"
    )
    return finish(figure, f"Searched splits · {model_label(data)}", subtitle)


def draw_splits(result: Any) -> go.Figure:
    """Draw the searched distributions of distances and mean rotations, mean over the heads of a layer."""
    data = result.own
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


def shown_conditions(data: xr.Dataset) -> list[str]:
    """Return the conditions shown by token: the best stand-in, its two parts alone, three_axis, uniform attention."""
    others = [*CONTROLS, "three_axis", "uniform_attention"]
    best = data["recovered"].sel(end="value").drop_sel(condition=[*others, "unchanged"]).fillna(-np.inf)
    return [str(best["condition"].values[int(best.values.argmax())]), *others]


def token_labels(data: xr.Dataset) -> list[str]:
    """Return the stand-in of each example."""
    return [f"{in_words(one)}: change of each token's loss, first prompt; red: worse" for one in shown_conditions(data)]


def token_page(data: xr.Dataset, example: int) -> Any:
    """Return the tokens of the first prompt, coloured by the change of their loss."""
    changed = data["token_change"].sel(condition=shown_conditions(data)[example])
    return token_colours([str(token) for token in data["token_text"].values], changed.values)


TOKEN_VIEW = TokenView(token_labels, token_page)
FIGURES = {
    "loss": draw_loss,
    "dose": draw_dose,
    "correlation": draw_correlation,
    "search": draw_search,
    "splits": draw_splits,
    "heads": head_map(
        *(("cost", {"replaced_by": by}) for by in ("split", "uniform attention")),
        title="What each head's residual is worth",
        subtitle="rise of the loss (nats) with this head alone replaced: by the split of triangle {cost_width:g}; by "
        "nothing",
        limits=None,
    ),
}
