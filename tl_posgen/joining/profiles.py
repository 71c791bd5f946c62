"""Head profiles: one row a head over the three subjects, and how its columns go together over heads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from tl_posgen.collector import HeadRows, Variable
from tl_posgen.errors import InputError
from tl_posgen.joining import profiles_figures as figures
from tl_posgen.joining.column_correlations import COLUMNS, PAIRS, RHO, beyond_null, correlations, pairs_of
from tl_posgen.joining.head_costs import COSTS, head_costs, runs_of
from tl_posgen.joining.repeated_tokens import repeated_prompts, repeated_scores
from tl_posgen.measure import Measure, Request
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.loss import prompts_of_one_length, require_one_length
from tl_posgen.models.model import Model
from tl_posgen.models.selection import select_heads
from tl_posgen.models.tokens import bos_of
from tl_posgen.options import Options, fits
from tl_posgen.procedure import Job
from tl_posgen.report.intervals import ENDS, with_ends
from tl_posgen.report.sentences import at_head, extremes, null_of, with_interval
from tl_posgen.result import Result
from tl_posgen.summary import NullSummary, Summary

MOST_HEADS = 96  # whose costs are measured unless asked for
PERIOD = 50
FROM_SLASH = {"r1_q": "r1_q", "r1_k": "r1_k", "rank95_q": "rank95_q", "rank95_k": "rank95_k"}
FROM_SLASH |= {"slash_score": "best_score", "slash_distance": "best_distance", "first_token": "first_token"}
FROM_VARIANCE = ("mean_energy_q", "mean_energy_k", "interaction", "position", "additive_r")
REPEATED = ("previous_token", "duplicate_token", "induction")


@dataclass(frozen=True)
class Profiles(Options):
    r"""One row a head: rank and concentration of Q and K, interaction, slash, attention on repeated tokens, costs.

    From the results of the same run: r1 and rank of Q and K before RoPE, the highest slash score and its distance,
    attention to the first token (`slash`); |E x|^2 / E|x|^2 of queries and keys, shares of interaction and position,
    additive r (`variance`). On random tokens of which a block stands twice: mean attention to the previous token, to
    the earlier occurrence of the same token, and to the token after it (`previous_token`, `duplicate_token`,
    `induction`). And what one head alone costs, in nats per token: its scores replaced by the nearest f(q, d) + g(q, k)
    over the prompt's distances (`cost_interaction`), no attention at its slash distance (`cost_slash`), its output
    replaced by the mean over prompts and positions (`cost_head`: mean ablation).

    rho is Spearman's correlation of two columns over heads, `rho_within_layers` that of the ranks with every layer's
    mean taken away. Of so many pairs one in twenty lies beyond its interval by chance.

    Args:
        costs: whether to measure what heads cost, three runs a head; if left out, of models with up to 96 heads.
        cost_prompts: on how many of the prompts.
        period: length of the random block; 50 if left out, less where the context or the vocabulary is shorter.
        n_repeated: prompts of repeated tokens.

    Raises:
        InputError: a number that is none, prompts of different lengths where costs are measured.
        UnsupportedModelError: a layer whose scores cannot be replaced, where costs are measured.

    Source: induction score: Olsson et al. 2022; slash score: Cheng et al. 2026; the split: Han & Ji 2025; the
    table and its correlations: ours.

    Example:
        >>> import tl_posgen
        >>> cut = {"length": 24, "n_prompts": 1, "costs": False, "null_seeds": (), "progress": False}
        >>> found = tl_posgen.profiles("mini", "Down, down, down. Would the fall never end?" * 3, **cut)
        >>> found.frame(intervals=False).columns[2:5].tolist()
        ['r1_q', 'r1_k', 'rank95_q']
    """

    costs: bool | None = None
    cost_prompts: int = 2
    period: int | None = None
    n_repeated: int = 4

    def check(self) -> None:
        least = {"cost_prompts": 1, "n_repeated": 1, "period": 2}
        for name, low in least.items():
            value = getattr(self, name)
            if not (name == "period" and value is None) and (not fits(value, int) or value < low):
                raise InputError(f"profiles: {name}={value!r}: give a whole number, {low} or more")


def run(model: Model, prompts: Any, request: Request, job: Job) -> Result:
    options = request.options
    assert isinstance(options, Profiles)
    tokens = prompts_of_one_length(model, prompts, job.length, job.n_prompts)
    repeated_block(model, options)
    n_heads = sum(map(len, select_heads(model, job.layers, job.heads).values()))
    costs = n_heads <= MOST_HEADS if options.costs is None else options.costs
    some = tokens[: options.cost_prompts] if costs else tokens[:0]
    job.plan(options.n_repeated + len(some) * runs_of(n_heads))

    def of_model(one: Model, label: str, after: Mapping[str, xr.Dataset]) -> xr.Dataset:
        slash, variance = after["slash"], after["variance"]
        data = xr.Dataset({name: slash[source] for name, source in FROM_SLASH.items()})
        repeated = on_repeated_tokens(one, options, job)
        data = data.merge(variance[list(FROM_VARIANCE)]).merge(repeated)
        if costs:
            selected = select_heads(one, job.layers, job.heads)
            data = data.merge(head_costs(one, some, slash["best_distance"], selected))
        return data.merge(correlations(data)).assign_attrs(model=label, **repeated.attrs)

    return job.result(request, model, list(tokens), of_model)


def repeated_block(model: Model, options: Profiles) -> tuple[Int[Tensor, " start"], int]:
    """What prompts of repeated tokens begin with, and the length of their block; InputError where it does not fit."""
    first = torch.tensor([] if model.tokenizer is None else bos_of(model), dtype=torch.int64)
    context, vocabulary = int(model.cfg.n_ctx), int(model.cfg.d_vocab)
    period = options.period or min(PERIOD, (context - len(first)) // 2, vocabulary)
    if period > vocabulary or len(first) + 2 * period > context:
        raise InputError(
            f"profiles: period={period}: two blocks of different tokens do not fit into a vocabulary of {vocabulary} "
            f"and a context of {context}; give a shorter one"
        )
    return first, period


def on_repeated_tokens(model: Model, options: Profiles, job: Job) -> xr.Dataset:
    """The three scores of every head, means over prompts of repeated random tokens."""
    first, period = repeated_block(model, options)
    drawn = repeated_prompts(first, period, int(model.cfg.d_vocab), options.n_repeated, job.seed)
    rows = HeadRows()

    for number, prompt in enumerate(drawn):

        def take(layer: LayerCapture, number: int = number) -> None:
            assert layer.pattern is not None
            layer.prompt = number
            rows.add(layer, **vars(repeated_scores(layer.pattern, len(first), period)))

        run_capture(model, prompt[None], take, needs=frozenset({"pattern"}), layers=job.layers, heads=job.heads)
    return xr.Dataset({name: rows.array(name).mean("prompt") for name in REPEATED}, attrs={"period": period})


# What is shown


def summarise(data: xr.Dataset) -> Summary:
    """Means and extremes of every column; `rho_<a>_<b>` and `rho_within_layers_<a>_<b>` of the pairs in `PAIRS`, with
    their ends; and of all pairs, in the order of `first` and `second`, `all_rho` and so on as lists."""
    columns = [str(name) for name in data["column"].values]
    found: dict[str, Any] = {"columns": columns, "n_heads": int(data["interaction"].notnull().sum())}
    found["period"] = int(data.attrs["period"])
    for name in columns:
        found |= {name: float(data[name].mean())} | extremes(data, name)
    for a, b in PAIRS:
        if {a, b} <= set(columns):
            one = data.sel(column=a, column_2=b)
            found |= {f"{rho}_{a}_{b}{end}": float(one[f"{rho}{end}"]) for rho in RHO for end in ENDS}
    rows, others = np.triu_indices(len(columns), 1)
    return found | {f"all_{rho}{end}": data[f"{rho}{end}"].values[rows, others].tolist() for rho in RHO for end in ENDS}


def findings(own: Summary, null: NullSummary | None) -> list[str]:
    lines = []
    for words, rho in (("over heads", "rho"), ("within layers", "rho_within_layers")):
        pairs = [(a, b) for a, b in PAIRS if f"rho_{a}_{b}" in own]
        parts = [
            f"{COLUMNS[a]} with {COLUMNS[b]} {with_interval(own, f'{rho}_{a}_{b}', '.2f')} "
            f"({null_of(null, f'{rho}_{a}_{b}', '.2f')})"
            for a, b in pairs
        ]
        lines.append(f"Rank correlation {words} ({own['n_heads']} heads): {'; '.join(parts)}.")
    if null is not None:
        lines += [
            beyond_null(own, null, rho, words) for rho, words in zip(RHO, ("Over heads", "Within layers"), strict=True)
        ]
    highest = [
        f"{COLUMNS[name]} {at_head(own[f'{name}_highest_head'], own[f'{name}_highest'], '.2f')} "
        f"({null_of(null, f'{name}_highest', '.2f')})"
        for name in ("slash_score", *REPEATED)
    ]
    lines.append(f"Highest: {', '.join(highest)}.")
    costs = [
        f"{COLUMNS[f'cost_{what}']} {own[f'cost_{what}']:.4f}, most in "
        f"{at_head(own[f'cost_{what}_highest_head'], own[f'cost_{what}_highest'])} "
        f"({null_of(null, f'cost_{what}', '.4f')})"
        for what in COSTS
        if f"cost_{what}" in own
    ]
    return [
        *lines,
        *([f"Loss in nats per token, mean over heads, one head at a time: {'; '.join(costs)}."] if costs else []),
    ]


def table(data: xr.Dataset) -> pd.DataFrame:
    """A row for each pair of columns that the papers or our statistics connect."""
    rows = []
    for a, b in pairs_of(data):
        one = data.sel(column=a, column_2=b)
        row: dict[str, Any] = {"column": COLUMNS[a], "with": COLUMNS[b]}
        for words, rho in (("over heads", "rho"), ("within layers", "rho_within_layers")):
            ends = zip(("", ", from", ", to"), ENDS, strict=True)
            row |= {f"{words}{of}": float(one[f"{rho}{end}"]) for of, end in ends}
        rows.append(row)
    return pd.DataFrame(rows)


def check_prompts(options: Profiles, tokens: Any) -> None:
    """Refuse prompts of different lengths."""
    require_one_length("profiles", tokens)


PAIR = ("column", "column_2")
FISHER = "of the 95 % interval for independent heads (Bonett & Wright)"
ON_REPEATED = "mean attention on repeated random tokens"
COST = "rise of the loss, this head alone"
VARIABLES = {
    **{
        name: Variable(COLUMNS[name], "", "before RoPE, all tokens, see `slash`")
        for name in ("r1_q", "r1_k", "rank95_q", "rank95_k")
    },
    "mean_energy_q": Variable(COLUMNS["mean_energy_q"], "", "|E q|^2 / E|q|^2, first token left out"),
    "mean_energy_k": Variable(COLUMNS["mean_energy_k"], "", "|E k|^2 / E|k|^2, first token left out"),
    **{name: Variable(COLUMNS[name], "", "see `variance`") for name in ("interaction", "position", "additive_r")},
    "slash_score": Variable(COLUMNS["slash_score"], "", "highest over D < N/2"),
    "slash_distance": Variable(COLUMNS["slash_distance"], "tokens", "the D of the highest slash score"),
    "first_token": Variable("attention to the first token", "", "E_i S_i0"),
    "previous_token": Variable(
        COLUMNS["previous_token"], "", f"S_{{i, i-1}}, {ON_REPEATED}", headline="previous_token", short="prev"
    ),
    "duplicate_token": Variable(
        COLUMNS["duplicate_token"], "", f"S_{{i, i-T}}, {ON_REPEATED}", headline="duplicate_token", short="dup"
    ),
    "induction": Variable(
        COLUMNS["induction"], "", f"S_{{i, i-T+1}}, {ON_REPEATED}", headline="induction", short="ind"
    ),
    **with_ends(
        "cost_interaction", COLUMNS["cost_interaction"], "nats", f"{COST} f(q, d) + g(q, k)", ("layer", "head")
    ),
    **with_ends("cost_slash", COLUMNS["cost_slash"], "nats", f"{COST} without its slash distance", ("layer", "head")),
    **with_ends("cost_head", COLUMNS["cost_head"], "nats", f"{COST} mean-ablated", ("layer", "head")),
    **with_ends("rho", "Spearman's rho", "", "over heads", PAIR, FISHER),
    **with_ends("rho_within_layers", "rho within layers", "", "of ranks, each layer's mean taken away", PAIR, FISHER),
}

MEASURE = Measure(
    name="profiles",
    question="What kind of head is it, and what goes together?",
    explanation=(
        "One row a head over the three subjects: how near rank one and how constant its queries and keys are, how much "
        "of its scores is interaction, its slash, where it attends on repeated random tokens, and what the model loses "
        "without its interaction, its slash, or the head (mean ablation). Below, how the columns go together over "
        "heads and within layers; random init shows what comes without training."
    ),
    source="induction score: Olsson et al. 2022; slash score: Cheng et al. 2026; the table and its correlations: ours",
    options=Profiles,
    procedure=run,
    after=("slash", "variance"),
    check_prompts=check_prompts,
    matrices=5,
    variables=VARIABLES,
    summarise=summarise,
    findings=findings,
    figures={"correlations": figures.correlation_maps, "heads": figures.rank_table},
    table=table,
    caveats={
        "absolute": "nothing rotates, so the interaction and its cost are zero by construction.",
        "alibi": "nothing rotates, so the interaction and its cost are zero by construction.",
        "none": "nothing rotates, so the interaction and its cost are zero by construction.",
    },
)
