"""Interaction share against the sum of the plane scores, and the heads that the criterion certifies."""

from typing import Any

import plotly.graph_objects as go
import xarray as xr

from tl_posgen.core.formatting import format_number
from tl_posgen.core.measure import HEAD, TOKENS
from tl_posgen.position.planes.head_correlations import WEIGHTS, pooled, r_and_rho
from tl_posgen.report.figures import COLOURS, NULL_COLOUR, Panels, finish, line, model_label
from tl_posgen.report.head_figures import head_names

LOOKS = {"trained": (COLOURS[0], "circle"), "random init": (NULL_COLOUR, "diamond-open")}
LOOKS |= {"shuffled": (COLOURS[1], "square-open")}
PANELS = dict(zip(TOKENS, ("all tokens", "first token left out"), strict=True))


def kinds_of_weights(result: Any) -> dict[str, xr.Dataset]:
    """Return the dataset of the trained weights, of the first random init, and of the shuffled weights."""
    trained, shuffled = (result.own.sel(weights=weights) for weights in WEIGHTS)
    random = {} if result.null is None else {"random init": result.null.sel(weights=WEIGHTS[0])}
    return {"trained": trained, **random, "shuffled": shuffled}


def scatter(result: Any) -> go.Figure:
    """Draw the interaction share against the sum of the plane scores: a point a head, correlations in the legend."""

    def in_words(found: xr.Dataset) -> str:
        return "r = {}, rho = {}".format(*(format_number(one, ".2f") for one in r_and_rho(found)))

    titles = [f"{label}; pooled: {in_words(pooled(result.numbers, tokens))}" for tokens, label in PANELS.items()]
    panels = Panels(titles, columns=2, row_height=320, shared_yaxes=True)
    for panel, (tokens, label) in enumerate(PANELS.items()):
        for kind, data in kinds_of_weights(result).items():
            (colour, symbol), one = LOOKS[kind], data.sel(tokens=tokens)
            heads = one[["score_sum", "interaction"]].to_dataframe(dim_order=list(HEAD)).dropna()
            hover = "%{text}<br>sum of scores %{x:.2f}, interaction %{y:.3f}<extra></extra>"
            points = go.Scatter(x=heads["score_sum"], y=heads["interaction"], mode="markers", hovertemplate=hover)
            points.update(text=[f"{kind}, {head}" for head in head_names(heads.index)], name=f"{kind}: {in_words(one)}")
            panels.add(panel, points.update(marker={"color": colour, "symbol": symbol, "size": 8}))
            panels.figure.data[-1].update(legendgroup=label, legendgrouptitle={"text": label}, showlegend=True)
    panels.axes("sum of plane scores / std of the scores", "interaction share, kd + qkd")
    panels.figure.update_xaxes(rangemode="tozero").update_yaxes(rangemode="tozero")
    subtitle = "a point a head; r: Pearson, rho: Spearman, over the heads of one kind of weights"
    return panels.finish(f"Do the planes foretell how additive a head is? · {model_label(result.own)}", subtitle)


def certified(result: Any) -> go.Figure:
    """Draw the share of heads that the sufficient criterion certifies, by its tolerance."""
    figure = go.Figure()
    for kind, data in kinds_of_weights(result).items():
        (colour, symbol), share = LOOKS[kind], data["additive"].sel(tokens=TOKENS[0]).mean(HEAD)
        marker = {"symbol": symbol, "size": 9}
        figure.add_trace(line(share["eps"].values, share.values, kind, colour, mode="lines+markers", marker=marker))
    eps = result.own["eps"].values
    figure.update_xaxes(title_text="eps, the tolerance of each plane", type="log", tickvals=eps)
    figure.update_yaxes(title_text="share of heads certified", range=[-0.03, 1.03], tickformat=".0%")
    subtitle = "in every plane: the key nearly constant, or too small to matter, or hardly turning; all tokens"
    return finish(figure, f"Heads that the criterion certifies · {model_label(result.own)}", subtitle)
