"""Do the planes of a head foretell how additive it is? The bound of its planes against its interaction share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import xarray as xr

from tl_posgen.core.feed import one_pass
from tl_posgen.core.formatting import counted, format_number
from tl_posgen.core.measure import HEAD, TOKENS, Measure, Variable
from tl_posgen.core.numbers import Numbers, one_side
from tl_posgen.core.options import Distances, Positive
from tl_posgen.core.run import Run
from tl_posgen.models.loading.shuffled_like import shuffled_label, shuffled_like
from tl_posgen.models.model import Model
from tl_posgen.position.planes.head_correlations import WEIGHTS, correlations, pooled, r_and_rho
from tl_posgen.position.planes.plane_sufficiency_figures import certified, scatter
from tl_posgen.position.planes.planes import EPS, Planes
from tl_posgen.position.planes.rope_layers import require_rope

ROW, GROUP = ("weights", "tokens", *HEAD), ("weights", "tokens")
OF_PLANES = Planes.variables


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
    figures = {"scatter": scatter, "certified": certified}
    legend = "first out: the first token left out; a row a kind of weights, over whose heads correlations are taken."

    def planes(self) -> Planes:
        """Return the measure of planes that this one rests on."""
        return Planes(eps=self.eps, n_distances=self.n_distances)

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"weights": WEIGHTS, "eps": self.planes().all_eps}

    def usual(self) -> Mapping[str, Any]:
        return {"weights": WEIGHTS[0], "eps": self.eps}

    def of_model(self, run: Run) -> xr.Dataset:
        run.plan(len(run.rows), once=len(run.rows))

        def measured(model: Model, label: str) -> xr.Dataset:
            how: dict[str, Any] = {**run.where, "label": label, "intervals": run.init is None}
            found = one_pass(model, run.rows, [self.planes()], **how)["planes"]
            interaction = found["share"].sel(part="interaction", drop=True)
            return found[["score_sum", "std", "additive", "planes_met"]].assign(interaction=interaction)

        each = [measured(run.model, run.label)]
        if run.init is None:
            each.append(measured(shuffled_like(run.model, run.seed), shuffled_label(run.seed)))
        heads = xr.concat(each, "weights", data_vars="all", combine_attrs="override")
        heads = heads.assign_coords(weights=list(WEIGHTS[: len(each)]))
        heads = heads.transpose("group", *ROW, ..., missing_dims="ignore")
        return heads.merge(correlations(one_side(heads)))

    def findings(self, own: Numbers) -> list[str]:
        all_tokens, rest = TOKENS

        def correlated(numbers: Numbers, weights: str) -> str:
            r, rho = (numbers(name, weights=weights, tokens=rest) for name in ("pearson", "spearman"))
            return f"{r.with_interval:.2f} (Spearman {rho.with_interval:.2f})"

        def mean(name: str, form: str, tokens: str) -> str:
            trained, shuffled = (own(name, weights=weights, tokens=tokens) for weights in WEIGHTS)
            random = f"{trained.null:{form}}, " if own.inits else ""
            return f"{trained.with_interval:{form}} ({random}shuffled {shuffled.with_interval:{form}})"

        trained, shuffled = (correlated(own, weights) for weights in WEIGHTS)
        random = f"random init {correlated(own.of_inits, WEIGHTS[0])}, " if own.inits else ""
        r, rho = (format_number(one, ".2f") for one in r_and_rho(pooled(own, rest)))
        return [
            f"Over {counted(own('n_heads', tokens=rest).value, 'head')}, first token left out, the sum of the plane "
            f"scores correlates with the interaction share at r = {trained}; {random}shuffled {shuffled}, pooled {r} "
            f"(Spearman {rho}).",
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

        random = [row("random init", own.of_inits, WEIGHTS[0])] if own.inits else []
        if own.is_null:
            return pd.DataFrame(random)
        last = {"weights": "pooled", **dict(zip(columns, r_and_rho(pooled(own, TOKENS[1])), strict=False))}
        return pd.DataFrame([row("trained", own, WEIGHTS[0]), *random, row("shuffled", own, WEIGHTS[1]), last])
