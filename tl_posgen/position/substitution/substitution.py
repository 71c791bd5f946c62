"""Does the model run on position + content? Scores replaced by a split, and the loss that is left."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from tl_posgen.collector import Variable
from tl_posgen.errors import InputError
from tl_posgen.measure import Measure, Request
from tl_posgen.models.loss import prompts_of_one_length
from tl_posgen.models.model import Model
from tl_posgen.options import Options
from tl_posgen.position.decomposition.option_checks import check_share, check_whole
from tl_posgen.position.substitution import changed_tokens
from tl_posgen.position.substitution.hooks import by_constant, heads_from, substitute
from tl_posgen.position.substitution.optimise_split import CONTROLS, FAMILIES, optimise_split, passes_of
from tl_posgen.position.substitution.splits import Threshold
from tl_posgen.position.substitution.substituted_loss import (
    NO_STAND_IN,
    WORTHLESS,
    conditions_of,
    costs,
    measure,
    runs_of,
    search_dataset,
)
from tl_posgen.position.substitution.substitution_figures import FIGURES, drawn, in_words
from tl_posgen.procedure import Job
from tl_posgen.report.intervals import ENDS, mean_and_ends, with_ends
from tl_posgen.report.sentences import null_of, said, with_interval
from tl_posgen.result import Result
from tl_posgen.summary import NullSummary, Summary

COST_PROMPTS = 4
NO_SPLIT = (*NO_STAND_IN, *CONTROLS)


@dataclass(frozen=True)
class Substitution(Options):
    r"""recovered = (L_uniform - L) / (L_uniform - L_unchanged): the loss L with all scores replaced, by condition.

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
        search: look for the best split on other prompts of the text, and report it on these; see `optimise_split`.
        search_prompts: how many others, where the text has that many; half of a short text is kept to report on.
        search_steps: of gradient descent.
        head_costs: also replace each head alone, by the best triangle found, or the first width; None: as `search`.

    Raises:
        InputError: a share outside [0, 1], no width or one that is not above 0, a negative distance, layer or number of
            steps; later, unusable prompts, a layer that does not exist, a search with fewer than two prompts.

    Source: the substitution with gamma = .97, threshold = "layer", d0 = 1000 and from_layer = 4, and `k_q_simplify`,
    are in the public code of the first author of Han & Ji 2025 (arXiv 2503.13305); a quantile per head, the other
    conditions, the share recovered, the residual's dose and the searches are ours.

    Example:
        >>> import tl_posgen
        >>> from tl_posgen.models.tokens import bundled_text
        >>> from tl_posgen.position.substitution import substitution
        >>> cut = {"length": 32, "n_prompts": 2, "null_seeds": (), "progress": False}
        >>> found = substitution("mini", bundled_text(), search=False, **cut)
        >>> recovered = found.dataset["recovered"]
        >>> float(recovered.sel(condition="unchanged")), float(recovered.sel(condition="uniform_attention"))
        (1.0, 0.0)
    """

    dummy_distances: Sequence[int | float] = (0, 64, 1000)
    widths: Sequence[int | float] = (8, 256)
    near_widths: Sequence[int | float] = (8,)
    mean_query_distances: Sequence[int] = (8,)
    gamma: int | float = 1.0
    threshold: Threshold = "head"
    from_layer: int = 0
    search: bool = True
    search_prompts: int = 64
    search_steps: int = 60
    head_costs: bool | None = None

    def check(self) -> None:
        check_share("gamma", self.gamma)
        if self.gamma == 0:
            raise InputError("gamma 0 replaces no score, so nothing would be measured; give a share above 0, up to 1")
        check_whole("substitution", 0, from_layer=self.from_layer, search_steps=self.search_steps)
        check_whole("substitution", 1, search_prompts=self.search_prompts)
        if infinite := [x for x in (*self.dummy_distances, *self.widths, *self.near_widths) if not math.isfinite(x)]:
            raise InputError(f"dummy_distances and widths: {infinite[0]} is no distance; give finite numbers")
        if narrow := [width for width in self.near_widths if width < 1]:
            raise InputError(f"near_widths: {narrow[0]} leaves no near distance; give numbers of tokens, 1 or more")
        conditions_of(self, 1)

    @property
    def costs_heads(self) -> bool:
        return self.search if self.head_costs is None else self.head_costs


def run(model: Model, prompts: Any, request: Request, job: Job) -> Result:
    options = request.options
    assert isinstance(options, Substitution)
    heads = heads_from(model, options.from_layer, job.layers, job.heads)
    where: dict[str, Any] = {"gamma": options.gamma, "threshold": options.threshold, "heads": heads}
    substitute(model, by_constant, **where)  # what cannot be replaced is refused before work
    n_others = options.search_prompts if options.search else 0
    tokens, others = two_sets(model, prompts, job.length, job.n_prompts, n_others)
    half = len(tokens) // 2  # only a search looks at others
    held_out, others = (tokens, others) if others is not None else (tokens[:half], tokens[half:])
    conditions = conditions_of(options, tokens.shape[1])
    alone = passes_of(len(others), len(held_out), options.search_steps) if options.search else 0
    some = tokens[:COST_PROMPTS] if options.costs_heads else tokens[:0]
    job.plan(len(tokens) * runs_of(conditions), once=alone + len(some) * (1 + 2 * len(heads)))

    def of_model(one: Model, label: str, after: Mapping[str, Any]) -> xr.Dataset:
        data = measure(one, tokens, conditions, where, label)
        data.attrs |= {"gamma": options.gamma, "from_layer": options.from_layer}
        if one is not model:
            return data
        replaced, width = data["attention_kl"].isel(condition=0, drop=True).notnull(), float(options.widths[0])
        if options.search:
            found, widths = optimise_split(one, others, held_out, where, steps=options.search_steps, seed=job.seed)
            width = widths["triangle"]
            data = data.merge(search_dataset(found, data.isel(prompt=slice(len(held_out))), replaced))
            data.attrs |= {"search_prompts": len(others), "held_out_prompts": len(held_out), "search_width": width}
            data.attrs |= {f"search_width_{family}": widths[family] for family in ("three_axis", "mean_query")}
        if options.costs_heads:
            data = data.merge(costs(one, some, width, replaced))
            data.attrs["cost_width"] = width
        return data

    return job.result(request, model, list(tokens), of_model)


def two_sets(
    model: Model, prompts: Any, length: int | None, n_prompts: int | None, n_others: int
) -> tuple[Int[Tensor, "prompt pos"], Int[Tensor, "other pos"] | None]:
    """The prompts to report on, and further ones to search on: None where there are none, so that half must do."""
    if not n_others:
        return prompts_of_one_length(model, prompts, length, n_prompts), None
    rows = prompts_of_one_length(model, prompts, length, None)
    n = len(rows) if n_prompts is None else n_prompts
    if len(rows) < n:
        prompts_of_one_length(model, prompts, length, n_prompts)  # refuses, with what is there and what is missing
    if len(rows) < 2:
        raise InputError("search: some prompts are searched on and others reported on, so give two at least")
    return rows[:n], rows[n : n + n_others] if len(rows) > n + n // 2 else None


# What is shown


def summarise(data: xr.Dataset) -> Summary:
    conditions = [str(name) for name in data["condition"].values]

    def by_condition(values: xr.DataArray) -> dict[str, float]:
        return dict(zip(conditions, values.values.tolist(), strict=True))

    loss, ends = by_condition(data["loss_mean"]), {end: by_condition(data[f"recovered{end}"]) for end in ENDS}
    share = ends[""]
    r, kl = (by_condition(data[name].mean(("layer", "head"))) for name in ("r", "attention_kl"))
    splits = [name for name in conditions if name not in NO_SPLIT and not name.startswith("three_axis")]
    fits = [name for name in conditions if name.startswith("three_axis_")] or ["three_axis"]
    best, best_fit = (max(names, key=lambda name: np.nan_to_num(share[name], nan=-np.inf)) for names in (splits, fits))
    worth, searched = worth_of(data), search_summary(data)
    fitted = searched["search_recovered_free"]
    named = {"loss": loss, "r": r, "attention_kl": kl}
    return {
        **worth,
        "nothing_to_recover": worth["worth"] < WORTHLESS,
        "best": best,
        "n_splits": len(splits),
        "best_weighted_fit": best_fit,
        "r_best": r[best],
        "split_recovered": share["query_profile"] if fitted is None else fitted,
        "n_stand_ins": len(conditions) - len(NO_STAND_IN),
        "r_rank": float(data["r_rank"]),
        "kl_rank": float(data["kl_rank"]),
        "cost_width": data.attrs.get("cost_width"),
        **{f"{number}_{name}": value for number, values in named.items() for name, value in values.items()},
        **{f"recovered_{name}{end}": value for end, values in ends.items() for name, value in values.items()},
        **{f"recovered_best{end}": values[best] for end, values in ends.items()},
        **{f"recovered_best_weighted_fit{end}": values[best_fit] for end, values in ends.items()},
        **searched,
    }


def worth_of(data: xr.Dataset) -> dict[str, float]:
    """The loss that uniform attention costs, and its interval."""
    unchanged, uniform = (data["loss"].sel(condition=one).values for one in NO_STAND_IN)
    found = mean_and_ends("worth", uniform - unchanged, ())
    return {name: float(value) for name, (_, value) in found.items()}


def search_summary(data: xr.Dataset) -> dict[str, Any]:
    """What the searches found; None everywhere where nothing was searched."""
    widths = ("search_width", "search_width_three_axis", "search_width_mean_query")
    settings = {name: data.attrs.get(name) for name in ("search_prompts", "held_out_prompts", *widths)}
    names = [("search_recovered", end) for end in ENDS] + [("search_prediction_kl", "")]
    return settings | {
        f"{name}_{family}{end}": float(data[f"{name}{end}"].sel(family=family)) if name in data else None
        for name, end in names
        for family in FAMILIES
    }


def findings(own: Summary, null: NullSummary | None) -> list[str]:
    worth = f"{with_interval(own, 'worth')} nats"
    if own["nothing_to_recover"]:
        return [
            f"Against uniform attention the model's own is worth {worth} ({null_of(null, 'worth', '.4f', ' nats')}): "
            "there is nothing to recover."
        ]
    best = in_words(own["best"])
    return [
        f"Position + content ({best}, the best of {own['n_splits']} splits on these prompts) recovers "
        f"{percent(own, 'recovered_best')} of the {worth} between the unchanged model and uniform attention "
        f"({null_of(null, 'worth', '.4f', ' nats')}); position alone {percent(own, 'recovered_position')}, content "
        f"alone {percent(own, 'recovered_content')}.",
        f"What the correlation alone would have made one believe: a(i-j) + b(i) + c(j) is close to the scores, r = "
        f"{said(own['r_three_axis'], '.3f')}; in their place it recovers {percent(own, 'recovered_three_axis')} of the "
        f"loss with all pairs weighted alike, {percent(own, 'recovered_best_weighted_fit')} with other weights "
        f"({in_words(own['best_weighted_fit'])}, the best of them). The best split is at r = "
        f"{said(own['r_best'], '.3f')}. Over {own['n_stand_ins']} stand-ins the rank correlation of r with the share "
        f"recovered is {said(own['r_rank'], '.2f')}; that of the attention KL is {said(own['kl_rank'], '.2f')}.",
        *search_findings(own),
    ]


def percent(own: Summary, key: str) -> str:
    return with_interval(own, key, ".1%")


def search_findings(own: Summary) -> list[str]:
    if own["search_width"] is None:
        return []

    def found(family: str) -> str:
        return percent(own, f"search_recovered_{family}")

    kl = {name: said(own[f"search_prediction_kl_{name}"], ".3f") for name in ("triangle", "free", "imitating")}
    return [
        f"Chosen on {own['search_prompts']} prompts, reported on {own['held_out_prompts']} others: one triangle for "
        f"the model (width {own['search_width']:g}) recovers {found('triangle')}, a three-axis fit weighted to near "
        f"pairs (width {own['search_width_three_axis']:g}) {found('three_axis')}, the mean query and key (first "
        f"{own['search_width_mean_query']:g} distances) {found('mean_query')}, a distribution of distances per head "
        f"{found('distribution')}, a mean rotation and a reference key per head {found('free')}. "
        f"With the same freedom position alone recovers {found('position')}, content alone {found('content')}.",
        f"A loss may be recovered by other predictions: their KL from the unchanged model's is {kl['triangle']} nats "
        f"for the triangle and {kl['free']} for the split chosen by loss; chosen by that KL instead it is "
        f"{kl['imitating']}, and {found('imitating')} of the loss is recovered.",
    ]


def table(data: xr.Dataset) -> pd.DataFrame:
    """One row a condition, and below them the searched splits, held out."""
    columns = {"loss": "loss_mean", "recovered": "recovered", "low": "recovered_low", "high": "recovered_high"}
    frame = pd.DataFrame({"condition": data["condition"].values})
    frame = frame.assign(**{column: data[name].values for column, name in columns.items()})
    for column, name in (("r", "r"), ("attention KL", "attention_kl")):
        frame[column] = data[name].mean(("layer", "head")).values
    if "search_loss" not in data:
        return frame
    of_search = {column: data[f"search_{name.removesuffix('_mean')}"].values for column, name in columns.items()}
    rows = {"condition": [f"searched: {name}" for name in data["family"].values], **of_search}
    return pd.concat([frame, pd.DataFrame(rows)], ignore_index=True)


BY_CONDITION, BY_HEAD, FAMILY = ("condition",), ("condition", "layer", "head"), ("family",)
DOSE = ("stand_in", "residual_share")
SHARE = "(L_uniform - L) / (L_uniform - L_unchanged), NaN where the denominator is below .01 nats"
PREDICTION_KL = "KL(unchanged || substituted) of the next token, not searched on"
VARIABLES = {
    "loss": Variable("loss", "nats", "per token, every score replaced", dims=("condition", "prompt")),
    "loss_mean": Variable("loss", "nats", "mean over prompts", dims=BY_CONDITION),
    **with_ends("recovered", "share recovered", "", SHARE, BY_CONDITION),
    "attention_kl": Variable("attention KL", "nats", "KL(own || stand-in), own q and k, mean over queries", BY_HEAD),
    "r": Variable("r of stand-in and scores", "", "Pearson over visible scores, unchanged q and k", BY_HEAD),
    "r_rank": Variable("rank correlation of r and share", "", "Spearman over stand-ins, r a mean over heads", ()),
    "kl_rank": Variable("rank correlation of attention KL and share", "", "Spearman over stand-ins", ()),
    "dose_loss": Variable("loss by dose", "nats", "a share of what the stand-in leaves out added back", DOSE),
    "search_loss": Variable("loss, searched", "nats", "on prompts that were not searched on", FAMILY),
    "search_loss_chosen_on": Variable("loss, searched on", "nats", "on the prompts of the search", FAMILY),
    "search_prediction_kl": Variable("KL of the predictions", "nats", PREDICTION_KL, FAMILY),
    "search_parameters": Variable("numbers searched", "", "how many were chosen", FAMILY),
    **with_ends("search_recovered", "share recovered, searched", "", "on prompts not searched on", FAMILY),
    "distribution": Variable("p(d), searched", "", "of the family `distribution`", ("layer", "head", "distance")),
    "turn": Variable(
        "length of the mean rotation, searched", "", "by plane, fast to slow", ("free_family", "layer", "head", "plane")
    ),
    "residual_cost": Variable("residual dropped", "nats", "rise of the loss, this head alone split at `cost_width`"),
    "uniform_cost": Variable("uniform attention", "nats", "rise of the loss, this head alone uniform"),
    **changed_tokens.VARIABLES,
}
EXACT = "nothing rotates, so position + content is the score itself and recovers all of the loss by construction"

MEASURE = Measure(
    name="substitution",
    question="Does the model run on position + content?",
    explanation=(
        "All attention scores are replaced in the running model, and the loss is measured. Recovered: share of the way "
        "from uniform attention (0) to the unchanged model (1). A high correlation alone would not tell."
    ),
    source="gamma by layer, d0 = 1000, from_layer: public code of the first author of Han & Ji 2025; all else: ours",
    options=Substitution,
    procedure=run,
    matrices=26,
    variables=VARIABLES,
    summarise=summarise,
    findings=findings,
    figures=FIGURES,
    drawn=drawn,
    table=table,
    tokens=changed_tokens.TOKENS,
    legend=(
        "condition: what stands for the scores; recovered: share of the loss between uniform attention and unchanged, "
        "low and high the ends of its 95% interval over prompts; r: correlation with the scores."
    ),
    caveats={
        "absolute": f"{EXACT}, position alone is uniform attention, and content alone recovers everything too.",
        "alibi": f"{EXACT}. Position alone is the slope, and content alone the scores without it.",
        "none": f"{EXACT}, position alone is uniform attention, and content alone recovers everything too.",
    },
    without_meaning=frozenset({"absolute", "alibi", "none"}),
)
