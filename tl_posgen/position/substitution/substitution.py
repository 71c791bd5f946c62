"""Does the model run on position + content? Scores replaced by a split, and the loss that is left."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pandas as pd
import xarray as xr

from tl_posgen.core import options
from tl_posgen.core.formatting import in_brackets
from tl_posgen.core.measure import HEAD, Measure, Variable
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Count, Each, NonNegative, Positive, Real, Whole, Within
from tl_posgen.core.run import Run
from tl_posgen.interventions import WORTHLESS
from tl_posgen.position.substitution.hooks import by_constant, heads_from, substitute
from tl_posgen.position.substitution.numbers.splits import Threshold
from tl_posgen.position.substitution.substituted_loss import (
    CONTROLS,
    N_DOSES,
    NO_STAND_IN,
    PREDICTORS,
    REPLACED_BY,
    conditions_of,
    costs,
    losses_of_conditions,
    ranks,
    recovered,
    score_errors,
)
from tl_posgen.position.substitution.substitution_figures import (
    FIGURES,
    TOKEN_VIEW,
    WORDS,
    in_words,
)

COST_PROMPTS = 4
NO_SPLIT = (*NO_STAND_IN, *CONTROLS)
BY_HEAD, TO_END, TOKEN = ("condition", *HEAD), ("condition", "end"), ("condition", "shown_target")
SHARE = "(L_uniform - L) / (L_uniform - L_unchanged), NaN where the denominator is below .01 nats"
PREDICTION_KL = "KL(unchanged || replaced) of the next token"
KL_SHARE = "1 - KL / KL of uniform attention, NaN where the latter is below .01 nats"
COST = "rise of the loss, this head alone replaced: by the split of the width `cost_width`, or uniform"
EXACT = "nothing rotates, so position + content is the score itself and recovers all of the loss by construction"
Near = Annotated[Real, Within(1, words="a number of tokens, 1 or more")]


@dataclass(frozen=True)
class Substitution(Measure):
    r"""recovered = (L_uniform - L) / (L_uniform - L_unchanged): the loss L with all scores replaced, by condition.

    All attention scores are replaced in the running model, and the loss is measured. Recovered: share of the way from
    uniform attention (0) to the unchanged model (1). A high correlation alone would not tell.

    NaN where attention is worth less than .01 nats, as at random init: a share of nothing is noise.

    Conditions: `unchanged`; `uniform_attention` (one constant per head: the control); `three_axis`, the fit with all
    pairs weighted alike, `three_axis_near_<width>` (pairs weighted by max(width - distance, .05)) and
    `three_axis_attention` (by the attention they get; up to 1,024 tokens); `mean_key_<d0>`; `triangle_<width>` (the
    optimal split for p(d) proportional to width - d); `own_profile` (p is the head's own attention); `query_profile` (p
    is each query's own, from its position part alone: nothing is fitted); `mean_query_<n>` and `k_q_simplify` (a(i-j) +
    c(j) of the mean query and the mean key, p uniform on the first n distances, or on all); `position` and `content`
    alone, at the first width.

    Args:
        dummy_distances, widths: of the conditions.
        near_widths: of the three-axis fit weighted to near distances.
        mean_query_distances: how many distances the split of the mean query averages over.
        gamma, threshold, from_layer: replace only scores below this quantile of their "head", or of head 0's last row
            for the whole "layer", from this layer on; see `substitute`.
        head_costs: also replace each head alone, by the triangle of the first width.

    Raises:
        InputError: unusable prompts, a layer that does not exist.

    Source: the substitution with gamma = .97, threshold = "layer", d0 = 1000 and from_layer = 4, and `k_q_simplify`,
    are in the public code of the first author of Han & Ji 2025 (arXiv 2503.13305), github.com/Glaciohound/LM-Infinite;
    a quantile per head, the other conditions, the shares recovered and the residual's dose are
    ours. Their substitution alone: `authors_split`.

    Example:
        >>> from tl_posgen.models.tokens import bundled_text
        >>> cut = {"length": 32, "n_prompts": 2, "null_seeds": (), "progress": False}
        >>> own = Substitution()("mini", bundled_text(), **cut).numbers
        >>> [own("recovered", condition=one).value for one in ("unchanged", "uniform_attention")]
        [1.0, 0.0]
    """

    dummy_distances: Sequence[NonNegative] = (0, 64, 1000)
    widths: Annotated[Sequence[Positive], Each()] = (8, 256)
    near_widths: Sequence[Near] = (8,)
    mean_query_distances: Sequence[Count] = (8,)
    gamma: options.Threshold = 1.0
    threshold: Threshold = "head"
    from_layer: Whole = 0
    head_costs: bool = False

    usual_prompts = 16
    question = "Does the model run on position + content?"
    one_length = True
    matrices = 26
    rows = ("condition",)
    variables = {
        "loss": Variable("loss", "nats", "per token, every score replaced", ("condition", "prompt"), "loss"),
        "recovered": Variable("share recovered", "", SHARE, TO_END, "recovered", bounds=(-np.inf, 1)),
        "kl": Variable("KL of the predictions", "nats", PREDICTION_KL, ("condition", "prompt")),
        "kl_recovered": Variable("share of the predictions recovered", "", KL_SHARE, TO_END, bounds=(-np.inf, 1)),
        "attention_kl": Variable(
            "attention KL", "nats", "KL(own || stand-in), own q and k, mean over queries", BY_HEAD
        ),
        "r": Variable("r of stand-in and scores", "", "Pearson over visible scores, unchanged q and k", BY_HEAD),
        "rank": Variable("rank correlation with the share recovered", "", "Spearman over stand-ins", ("predictor",)),
        "dose_loss": Variable(
            *("loss by dose", "nats", "a share of what the stand-in leaves out added back"),
            ("stand_in", "residual_share", "prompt"),
        ),
        "cost": Variable("rise of the loss", "nats", COST, ("replaced_by", *HEAD)),
        "token_change": Variable("change of the loss", "nats", "first prompt, stand-in minus unchanged", TOKEN),
        "token_text": Variable("token", "", "first prompt", ("shown_target",)),
    }
    token_view = TOKEN_VIEW
    legend = (
        "condition: what stands for the scores; recovered: share of the loss between uniform attention and unchanged, "
        "low and high the ends of its 95% interval over prompts; r: correlation with the scores."
    )
    caveats = {
        "absolute": f"{EXACT}, position alone is uniform attention, and content alone recovers everything too.",
        "alibi": f"{EXACT}. Position alone is the slope, and content alone the scores without it.",
        "none": f"{EXACT}, position alone is uniform attention, and content alone recovers everything too.",
    }
    without_meaning = frozenset({"absolute", "alibi", "none"})
    words = WORDS
    figures = FIGURES

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"replaced_by": REPLACED_BY, "predictor": PREDICTORS}

    def passes(self, run: Run) -> int:
        n, heads = len(run.rows), heads_from(run.model, self.from_layer, run.where["layers"], run.where["heads"])
        all_conditions = len(conditions_of(self, run.tokens.shape[1])) + N_DOSES
        found = n * (1 + (all_conditions if run.init is None else len(NO_STAND_IN)))  # where nothing is to recover
        return found + min(n, COST_PROMPTS) * (1 + 2 * len(heads)) * (self.head_costs and run.init is None)

    def of_model(self, run: Run) -> xr.Dataset:
        heads = heads_from(run.model, self.from_layer, run.where["layers"], run.where["heads"])
        where: dict[str, Any] = {"gamma": self.gamma, "threshold": self.threshold, "heads": heads}
        substitute(run.model, by_constant, **where)  # what cannot be replaced is refused before work
        conditions = conditions_of(self, run.tokens.shape[1])
        data = losses_of_conditions(run, conditions, where).merge(score_errors(run, conditions, where))
        data["recovered"] = recovered(data["loss"], data["loss"])
        data["kl_recovered"] = recovered(data["kl"], data["kl"])
        data["rank"] = ranks(data)
        if run.init is not None or not self.head_costs:
            return data
        replaced, width = data["attention_kl"].isel(condition=0, drop=True).notnull(), float(self.widths[0])
        return data.assign(cost=costs(run, COST_PROMPTS, width, replaced)).assign_attrs(cost_width=width)

    def best(self, own: Numbers) -> str:
        """Return the split that recovers most of the loss."""
        splits = _splits_of([str(name) for name in own.data["condition"].values])
        return splits[int(own.data["recovered"].sel(condition=splits, end="value").fillna(-np.inf).values.argmax())]

    def worth(self, own: Numbers) -> Number:
        """Return the loss that uniform attention costs."""
        unchanged, uniform = (own.array("loss", condition=one) for one in NO_STAND_IN)
        return own.number(uniform - unchanged)

    def findings(self, own: Numbers) -> list[str]:
        worth = self.worth(own)
        null = in_brackets(f"{worth.null:.4f} nats" if worth.inits else "")
        if worth.value < WORTHLESS:
            return [
                f"Against uniform attention the model's own is worth {worth.with_interval:.3f} nats{null}: there is "
                "nothing to recover."
            ]
        best, names = self.best(own), own.data["condition"].values.tolist()
        share = {one: own("recovered", condition=one).with_interval for one in names}
        r, kl = (own("rank", predictor=one).plain for one in PREDICTORS)
        profile = own("kl_recovered", condition="query_profile").with_interval
        return [
            f"Position + content ({in_words(best)}, the best of {len(_splits_of(names))} splits on these prompts) "
            f"recovers {share[best]:.1%} of the {worth.with_interval:.3f} nats between the unchanged model and uniform "
            f"attention{null}; position alone {share['position']:.1%}, content alone {share['content']:.1%}. With the "
            f"profile of each query, where nothing is chosen or fitted: {share['query_profile']:.1%}, and "
            f"{profile:.1%} of the KL that uniform attention has from the unchanged model's predictions.",
            f"The fit a(i-j) + b(i) + c(j) correlates with the scores at r = "
            f"{own('r', condition='three_axis').plain:.3f}; in their place it recovers "
            f"{share['three_axis']:.1%} of the loss with all pairs weighted alike. Over "
            f"{len(names) - len(NO_STAND_IN)} stand-ins the rank correlation of r with the share recovered is {r:.2f}; "
            f"that of the attention KL is {kl:.2f}.",
        ]

    def table(self, own: Numbers) -> pd.DataFrame:
        """Return a row a condition."""
        found = []
        for one in own.data["condition"].values.tolist():
            share = own("recovered", condition=one)
            row = {"condition": one, "loss": own("loss", condition=one).value, "recovered": share.value}
            row |= {"low": share.low, "high": share.high, "r": own("r", condition=one).value}
            found.append(row | {"attention KL": own("attention_kl", condition=one).value})
        return pd.DataFrame(found)

    def kinds(self, data: xr.Dataset) -> Sequence[str]:
        return ["recovered", "dose", "correlation", *(["heads"] if "cost" in data else [])]


def _splits_of(conditions: Sequence[str]) -> list[str]:
    """Return the conditions that are splits into position + content."""
    return [name for name in conditions if name not in NO_SPLIT and not name.startswith("three_axis")]
