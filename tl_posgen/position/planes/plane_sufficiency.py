"""Do the planes of a head foretell how additive it is? The bound of its planes against its interaction share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
import xarray as xr

from tl_posgen.core.feed import one_pass
from tl_posgen.core.formatting import counted, format_number
from tl_posgen.core.measure import ENDS, HEAD, TOKENS, Measure, Variable
from tl_posgen.core.numbers import Numbers, one_side, shuffled_label
from tl_posgen.core.options import Distances, Positive
from tl_posgen.core.run import Run
from tl_posgen.models.loading.shuffled_like import shuffled_like
from tl_posgen.models.model import Model
from tl_posgen.models.provenance import null_label
from tl_posgen.position.planes.planes import EPS, Planes, require_rope
from tl_posgen.report.figures import COLOURS, NULL_COLOUR, Panels, finish, line, model_label
from tl_posgen.report.head_figures import head_names
from tl_posgen.stats.agreement import fisher_interval, pearson, spearman

ROW, GROUP = ("weights", "tokens", *HEAD), ("weights", "tokens")
OF_PLANES = Planes.variables
WEIGHTS = ("own", "shuffled")
LOOKS = {
    "trained": (COLOURS[0], "circle"),
    "random init": (NULL_COLOUR, "diamond-open"),
    "shuffled": (COLOURS[1], "square-open"),
}
PANELS = {"all": "all tokens", "without first": "first token left out"}


def kinds_of_weights(result: Any) -> dict[str, xr.Dataset]:
    """Return the dataset of the trained weights, of the first random init, and of the shuffled weights."""
    trained, shuffled = (result.own.sel(weights=weights) for weights in WEIGHTS)
    random = {} if result.null is None else {"random init": result.null.sel(weights=WEIGHTS[0])}
    return {"trained": trained, **random, "shuffled": shuffled}


def _draw_scatter(result: Any) -> go.Figure:
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


def _draw_certified(result: Any) -> go.Figure:
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


@dataclass(frozen=True)
class PlaneSufficiency(Measure):
    r"""corr over heads of sum_m s_m / std(W) with the interaction share kd + qkd, s_m = scale E|q^m| E|k^m - kbar^m| x
    max_d 2|sin(theta_m d / 2)|.

    In each plane: mean length of the query, times how far keys stray from their mean, times how far the plane turns.
    Summed over planes, relative to the standard deviation of the scores, this bounds what a split into position and
    content can miss; here it is set against the interaction share, for trained weights, a random initialisation, and
    the trained weights with the entries of every matrix shuffled.

    A small sum is sufficient for an additive head; whether it also tells heads apart is what this measures. Weights are
    shuffled by the seed of the analysis, which keeps their sizes. The intervals of correlations are Fisher's, of
    independent heads; those of pooled heads, each under several weights, have none.

    Args:
        eps, n_distances: as in `Planes`.

    Raises:
        UnsupportedModelError: a model without RoPE.

    Source: ours

    Example:
        >>> found = PlaneSufficiency()("mini", "Down, down, down. Would the fall never end?", null_seeds=())
        >>> found.sel(tokens="all")["pearson"].dims, len(found.frame())
        (('weights', 'end'), 16)
    """

    eps: Positive = EPS
    n_distances: Distances | None = None

    question = "Do a head's planes foretell how additive it is?"
    variables = {
        "score_sum": Variable("sum of plane scores / std", "", OF_PLANES["score_sum"].description, ROW, interval=True),
        "interaction": Variable("interaction share", "", "share of std^2", ROW, interval=True, bounds=(0, 1)),
        "std": Variable("std of the scores", "logits", OF_PLANES["std"].description, ROW, interval=True),
        "additive": Variable("certified additive", "", OF_PLANES["additive"].description, (*ROW, "eps")),
        "planes_met": Variable("planes that meet a condition", "", "share of the head's planes", ROW),
        "pearson": Variable("Pearson's r", "", "score_sum with interaction, over heads", (*GROUP, "end")),
        "spearman": Variable("Spearman's rho", "", "score_sum with interaction, by rank", GROUP),
        "n_heads": Variable("number of heads", "", "that have both numbers", GROUP),
    }
    requires = require_rope
    figures = {"scatter": _draw_scatter, "certified": _draw_certified}
    legend = "first out: the first token left out; a row a kind of weights, over whose heads correlations are taken."

    def planes(self) -> Planes:
        """Return the measure of planes that this one rests on."""
        return Planes(eps=self.eps, n_distances=self.n_distances)

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"weights": WEIGHTS, "eps": self.planes().all_eps}

    def usual(self) -> Mapping[str, Any]:
        return {"weights": WEIGHTS[0], "eps": self.eps}

    def passes(self, run: Run) -> int:
        return len(run.rows) * (1 + (run.init is None))  # with shuffled weights too

    def of_model(self, run: Run) -> xr.Dataset:
        def measured(model: Model, label: str) -> xr.Dataset:
            how: dict[str, Any] = {**run.where, "label": label, "intervals": run.init is None}
            found = one_pass(model, run.rows, [self.planes()], **how)["planes"]
            interaction = found["share"].sel(part="interaction", drop=True)
            return found[["score_sum", "std", "additive", "planes_met"]].assign(interaction=interaction)

        each = [measured(run.model, run.label)]
        if run.init is None:
            each.append(measured(shuffled_like(run.model, run.seed), null_label(shuffled_label(run.seed))))
        heads = xr.concat(each, "weights", data_vars="all", combine_attrs="override")
        heads = heads.assign_coords(weights=list(WEIGHTS[: len(each)]))
        heads = heads.transpose("group", *ROW, ..., missing_dims="ignore")
        return heads.merge(_correlations(one_side(heads)))

    def findings(self, own: Numbers) -> list[str]:
        all_tokens, rest = TOKENS

        def correlated(numbers: Numbers, weights: str) -> str:
            r, rho = (numbers(name, weights=weights, tokens=rest) for name in ("pearson", "spearman"))
            return f"{r.with_interval:.2f} (Spearman {rho.with_interval:.2f})"

        def mean(name: str, form: str, tokens: str) -> str:
            trained, shuffled = (own(name, weights=weights, tokens=tokens) for weights in WEIGHTS)
            nulls = f"{trained.null:{form}}, " if trained.nulls else ""
            return f"{trained.with_interval:{form}} ({nulls}weights shuffled here {shuffled.with_interval:{form}})"

        trained, shuffled = (correlated(own, weights) for weights in WEIGHTS)
        random = f"random init {correlated(own.of_inits, WEIGHTS[0])}, " if own.inits else ""
        r, rho = (format_number(one, ".2f") for one in r_and_rho(pooled(own, rest)))
        return [
            f"Over {counted(own('n_heads', tokens=rest).value, 'head')}, first token left out, the sum of the plane "
            f"scores correlates with the interaction share at r = {trained}; {random}weights shuffled here {shuffled}, "
            f"pooled {r} (Spearman {rho}).",
            f"First token left out, mean sum of scores {mean('score_sum', '.2f', rest)}, interaction share "
            f"{mean('interaction', '.3f', rest)}; with it, certified additive {mean('additive', '.0%', all_tokens)} of "
            "heads. A sum above 1 bounds nothing by itself: it ranks heads, it does not prove them additive.",
        ]

    def table(self, own: Numbers) -> pd.DataFrame:
        """Return a row a kind of weights: correlations and means over heads, as the sentences give them."""
        columns = {
            f"{name}, first out": (name, TOKENS[1]) for name in ("pearson", "spearman", "score_sum", "interaction")
        }
        columns |= {f"{name}, all tokens": (name, TOKENS[0]) for name in ("additive", "planes_met")}

        def row(kind: str, numbers: Numbers, weights: str) -> dict[str, Any]:
            found = {one: numbers(name, weights=weights, tokens=of).value for one, (name, of) in columns.items()}
            return {"weights": kind, **found}

        if own.is_null:
            return pd.DataFrame([row(own.of, own, WEIGHTS[0])])
        nulls = [row(kind, null, WEIGHTS[0]) for kind, null in own.by_null.items()]
        last = {"weights": "pooled", **dict(zip(columns, r_and_rho(pooled(own, TOKENS[1])), strict=False))}
        return pd.DataFrame(
            [row("trained", own, WEIGHTS[0]), *nulls, row("weights shuffled here", own, WEIGHTS[1]), last]
        )


def correlation(sides: Sequence[xr.Dataset]) -> xr.Dataset:
    """Return pearson [end], with Fisher's interval of independent heads, spearman and n_heads over all heads of these
    datasets; a head that never varies, or has no planes, has no number and is left out."""
    columns = [np.stack([side[name].values.ravel() for name in ("score_sum", "interaction")]) for side in sides]
    both = np.concatenate(columns, axis=1)
    x, y = torch.from_numpy(both[:, ~np.isnan(both).any(0)])
    r = pearson(x, y)
    ends = [float(one) for one in (r, *fisher_interval(r, len(x)))]
    data = {"pearson": ("end", ends), "spearman": float(spearman(x, y)), "n_heads": float(len(x))}
    return xr.Dataset(data, {"end": list(ENDS)})


def _correlations(heads: xr.Dataset) -> xr.Dataset:
    """Return the correlations of score_sum and interaction [weights, tokens, layer, head] over layers and heads."""
    weights = heads["weights"].values
    each = [[correlation([heads.sel(weights=one, tokens=tokens)]) for tokens in TOKENS] for one in weights]
    found: xr.Dataset = xr.combine_nested(each, ["weights", "tokens"]).transpose("weights", "tokens", "end")
    return found.assign_coords(weights=weights, tokens=list(TOKENS))


def pooled(own: Numbers, tokens: str) -> xr.Dataset:
    """Return the correlation over the heads of all kinds of weights, of random inits those of the first; its interval
    means nothing, as a head under three kinds of weights is one head."""
    sides = [own.data.sel(weights=weights) for weights in WEIGHTS]
    sides += [one_side(own.dataset, init).sel(weights=WEIGHTS[0]) for init in own.inits[:1]]
    return correlation([side.sel(tokens=tokens) for side in sides])


def r_and_rho(found: xr.Dataset) -> tuple[float, float]:
    """Return Pearson's r and Spearman's rho of a correlation."""
    return float(found["pearson"].sel(end="value")), float(found["spearman"])
