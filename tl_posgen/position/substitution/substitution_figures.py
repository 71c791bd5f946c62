"""Figures of the loss with all scores replaced, by stand-in, dose, correlation, head and token."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.core import measure
from tl_posgen.core.formatting import format_number
from tl_posgen.core.measure import ENDS, TokenView
from tl_posgen.position.substitution.substituted_loss import CONTROLS
from tl_posgen.report.circuits import token_colours
from tl_posgen.report.figures import (
    COLOURS,
    NULL_COLOUR,
    finish,
    line,
    model_label,
    named_points,
    ranked_bars,
    sides,
)
from tl_posgen.report.head_figures import head_map

WORDS = {
    "uniform_attention": "uniform attention",
    "three_axis": "three-axis fit, all pairs",
    "three_axis_near": "three-axis fit, near pairs, width",
    "three_axis_attention": "three-axis fit, attended pairs",
    "mean_query": "mean query and key, distances below",
    "k_q_simplify": "mean query and key, all distances",
    "mean_key": "mean key at distance",
    "triangle": "triangle of width",
    "own_profile": "own attention profile",
    "query_profile": "profile of each query",
    "position": "position alone",
    "content": "content alone",
}
in_words = partial(measure.in_words, words=WORDS)


def _draw_recovered(result: Any) -> go.Figure:
    """Draw the share of the loss that every condition recovers, sorted, with its interval."""
    data = result.own.drop_sel(condition=["unchanged", "uniform_attention"])
    names = [str(name) for name in data["condition"].values]
    ends = data["recovered"].sel(end=list(ENDS)).transpose("end", "condition").values
    figure = _recovered_bars(names, [in_words(name) for name in names], ends, ".0%")
    worth = [f"{side} {_uniform_worth(one):.3f}" for side, one, _ in sides(result)]
    subtitle = (
        "every score replaced; 0: uniform attention, 1: the unchanged model; 95 % intervals over prompts; grey: one "
        f"part missing. What there is to recover, in nats: {', '.join(worth)}"
    )
    title = f"Loss recovered by each stand-in · {model_label(result.own)}"
    return finish(figure, title, subtitle, height=160 + 24 * len(names))


def _recovered_bars(labels: Sequence[str], names: Sequence[str], ends: np.ndarray, form: str) -> go.Figure:
    """Return a bar for each share recovered with its `ends` [end, name], controls in grey."""
    colours = [NULL_COLOUR if label in CONTROLS else COLOURS[0] for label in labels]
    figure = go.Figure(ranked_bars(names, ends, colours, form))
    figure.update_xaxes(title="share of the loss recovered", tickformat=".0%")
    return figure.update_yaxes(autorange="reversed", automargin=True)


def _uniform_worth(data: xr.Dataset) -> float:
    """Return what attention is worth: by how much the loss is higher with uniform attention."""
    losses = data["loss"].mean("prompt")
    return float(losses.sel(condition="uniform_attention") - losses.sel(condition="unchanged"))


def _draw_dose(result: Any) -> go.Figure:
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


def _draw_correlation(result: Any) -> go.Figure:
    """Draw the rise of the loss against the correlation of stand-in and scores, each point with its name."""
    figure, points, named = go.Figure(), np.empty((2, 0)), []
    for side, data, colour in reversed(sides(result)):
        stand_ins = data.drop_sel(condition=["unchanged", "uniform_attention"])
        x = stand_ins["r"].mean(("layer", "head")).values
        y = (stand_ins["loss"] - data["loss"].sel(condition="unchanged")).mean("prompt").values
        names = [in_words(name) for name in stand_ins["condition"].values]
        own, known = data is result.own, np.isfinite(x) & np.isfinite(y)
        look = {"mode": "markers", "marker": {"size": 10 if own else 7, "color": colour}, "name": side}
        figure.add_trace(go.Scatter(x=x, y=y, hovertext=names, **look))
        if own:
            points, named = np.stack([x, y])[:, known], [name for name, one in zip(names, known, strict=True) if one]
    worth, label = _uniform_worth(result.own), "uniform attention"
    figure.add_hline(y=worth, line_dash="dot", annotation_text=label, annotation_position="bottom left")
    r_rank, kl_rank = (
        format_number(float(result.own["rank"].sel(predictor=one)), ".2f") for one in ("r", "attention_kl")
    )
    figure.update_layout(xaxis_title="r of stand-in and scores, mean over heads", yaxis_title="rise of the loss, nats")
    subtitle = (
        "each point a stand-in; were correlation enough, they would fall from left to right; rank correlation of r "
        f"and share recovered {r_rank}, of attention KL {kl_rank}"
    )
    title = f"Correlation is not mechanism · {model_label(result.own)}"
    figure = finish(figure, title, subtitle, height=560)
    return named_points(figure, points, named, top=worth, height=420) if named else figure


def _shown_conditions(data: xr.Dataset) -> list[str]:
    """Return the conditions shown by token: the best stand-in, its two parts alone, three_axis, uniform attention."""
    others = [*CONTROLS, "three_axis", "uniform_attention"]
    best = data["recovered"].sel(end="value").drop_sel(condition=[*others, "unchanged"]).fillna(-np.inf)
    return [str(best["condition"].values[int(best.values.argmax())]), *others]


def _token_labels(data: xr.Dataset) -> list[str]:
    """Return the stand-in of each example."""
    said = "change of each token's loss, first prompt; red: worse"
    return [f"{in_words(one)}: {said}" for one in _shown_conditions(data)]


def _token_page(data: xr.Dataset, example: int) -> Any:
    """Return the tokens of the first prompt, coloured by the change of their loss."""
    changed = data["token_change"].sel(condition=_shown_conditions(data)[example])
    return token_colours([str(token) for token in data["token_text"].values], changed.values)


TOKEN_VIEW = TokenView(_token_labels, _token_page)
FIGURES = {
    "recovered": _draw_recovered,
    "dose": _draw_dose,
    "correlation": _draw_correlation,
    "heads": head_map(
        *(("cost", {"replaced_by": by}) for by in ("split", "uniform attention")),
        title="What each head's residual is worth",
        subtitle="rise of the loss (nats) with this head alone replaced: by the split of triangle {cost_width:g}; by "
        "nothing",
        limits=None,
    ),
}
