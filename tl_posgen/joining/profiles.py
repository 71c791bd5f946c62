"""Head profiles: one row a head over the three subjects, and how its columns go together over heads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import pandas as pd
import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from tl_posgen.core.formatting import counted
from tl_posgen.core.measure import HEAD, Measure, Variable
from tl_posgen.core.numbers import TRAINED, Number, Numbers
from tl_posgen.core.options import Count, Within
from tl_posgen.core.run import Run
from tl_posgen.errors import InputError
from tl_posgen.joining.column_correlations import COLUMNS, LITERATURE_PAIRS, SCOPES, beyond_null, correlations, pairs_of
from tl_posgen.joining.head_costs import COSTS, TOGETHER, counts_up_to, head_costs
from tl_posgen.joining.literature import LITERATURE, literature_metrics
from tl_posgen.joining.numbers.repeated_tokens import repeated_prompts, repeated_scores
from tl_posgen.joining.profiles_figures import JOINT, correlation_maps, joint_costs, rank_table
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.selection import select_heads
from tl_posgen.models.tokens import bos_of
from tl_posgen.position.decomposition.variance import Variance
from tl_posgen.slash.slash import Slash

MOST_HEADS = 96  # whose costs are measured unless asked for
MOST_PAIRS = 3  # of columns, in a sentence; the table has all
PERIOD = 50
FROM_SLASH = {  # variable -> its name there
    "r1": "r1",
    "rank95": "rank95",
    "slash_score": "best_score",
    "slash_distance": "best_distance",
    "first_token": "first_token",
}
FROM_VARIANCE = ("mean_energy", "interaction", "position", "additive_r", "absolute")  # the last, if it was asked for
REPEATED = ("previous_token", "duplicate_token", "induction")
ON_REPEATED = "mean attention on repeated random tokens"
EDITS = (
    "without its interaction (f(q, d) + g(q, k) in the place of its scores), without its slash distance, with as much "
    "attention taken elsewhere, mean-ablated"
)
NO_TURN = "nothing rotates, so the interaction and its cost are zero by construction."


@dataclass(frozen=True)
class Profiles(Measure):
    r"""One row a head: rank and concentration of Q and K, interaction, slash, attention on repeated tokens, costs.

    One row a head over the three subjects: how near rank one and how constant its queries and keys are, how much of its
    scores is interaction, its slash, where it attends on repeated random tokens, and what the model loses without its
    interaction, its slash, or the head (mean ablation). Below, how the columns go together over heads and within
    layers; random init shows what comes without training.

    From the results of the same run: r1 and rank of Q and K before RoPE, the highest slash score and its distance,
    attention to the first token (`slash`); |E x|^2 / E|x|^2 of queries and keys, shares of interaction and position,
    additive r (`variance`), the first token left out; with Variance(absolute=True) among the measures, the share of the
    key's place too. On random tokens of which a block stands twice: mean attention to the previous token, to the
    earlier occurrence of the same token, and to the token after it. Costs are in nats per token: a head's scores
    replaced by the nearest f(q, d) + g(q, k) over the distances that it sees ("interaction"), no attention at its slash
    distance ("slash"), as much attention taken from drawn keys at other distances ("elsewhere", the control of
    "slash"), its output replaced by the mean over prompts and positions ("head"). Joint costs are those of the 1, 2,
    4, .. heads of the highest slash scores edited at once, beside as many drawn heads at their means.

    rho is Spearman's correlation of two columns over heads; within layers, that of the ranks with every layer's mean
    taken away. Pairs are said to go beyond random init from eight random inits on; heads are all of the model's, not a
    sample, so that such a pair is a fact about this model and not yet about others.

    Args:
        costs: whether to measure what heads cost, four runs a head and some thirty more; if left out, of models with up
            to 96 heads.
        cost_prompts: on how many of the prompts.
        period: length of the random block; 50 if left out, less where the context or the vocabulary is shorter.
        n_repeated: prompts of repeated tokens.
        metrics: "literature" adds head metrics of other papers as columns, one more pass a prompt: massive values and
            concentration of queries and keys, their mean in slow planes, entropy over frequencies, sink rate, and how
            far attention is positional (it keeps its places when the keys are permuted) or symbolic (it goes with
            the keys).

    Raises:
        InputError: prompts of different lengths; a period that does not fit.
        UnsupportedModelError: a layer whose scores cannot be replaced, where costs are measured.

    Source: induction score: Olsson et al. 2022; slash score: Cheng et al. 2026; the split: Han & Ji 2025; the
    table and its correlations: ours. Reconstructed from abstracts and public text: massive values after arXiv
    2502.01563, concentration (as a mean resultant length) after TriAttention (arXiv 2604.04921), the mean in slow
    planes after rotary offset features (arXiv 2503.01832), positional and symbolic after arXiv 2511.11579 (overlaps,
    and permutations of the keys before RoPE, are ours). Sink rate: Gu et al. 2024 (arXiv 2410.10781), their
    threshold, by query. Entropy over frequencies: ours, of a quantity several of them use.

    Example:
        >>> cut = {"length": 24, "n_prompts": 1, "null_seeds": (), "progress": False}
        >>> found = Profiles(costs=False)("mini", "Down, down, down. Would the fall never end?" * 3, **cut)
        >>> found.frame().columns[2:5].tolist()
        ['previous_token', 'duplicate_token', 'induction']
    """

    costs: bool | None = None
    cost_prompts: Count = 2
    period: Annotated[int, Within(2, words="a whole number, 2 or more")] | None = None
    n_repeated: Count = 4
    metrics: Literal["own", "literature"] = "own"

    usual_prompts = 8
    question = "What kind of head is it, and what goes together?"
    after = (Slash, Variance)
    one_length = True
    matrices = 10
    whole_rows = True
    legend = "pair: two columns of the heads' table; Spearman's rho, its 95% interval for independent heads (and null)."
    variables = {
        "r1": Variable("r1 of Q and K", "", "before RoPE, all tokens, see `slash`", ("side", *HEAD)),
        "rank95": Variable("rank of Q and K at 95%", "", "before RoPE, all tokens, see `slash`", ("side", *HEAD)),
        "mean_energy": Variable(
            "energy share of the mean", "", "|E x|^2 / E|x|^2 of queries or keys, first token left out", ("side", *HEAD)
        ),
        **{name: Variable(COLUMNS[name], "", "see `variance`") for name in FROM_VARIANCE[1:]},
        "slash_score": Variable(COLUMNS["slash_score"], "", "highest over D < N/2"),
        "slash_distance": Variable(COLUMNS["slash_distance"], "tokens", "the D of the highest slash score"),
        "first_token": Variable(COLUMNS["first_token"], "", "E_i S_i0"),
        **{
            name: Variable(COLUMNS[name], "", f"S_{{i, {place}}}, {ON_REPEATED}", headline=name, short=short)
            for name, place, short in zip(REPEATED, ("i-1", "i-T", "i-T+1"), ("prev", "dup", "ind"), strict=True)
        },
        "cost": Variable(
            "cost of the head", "nats", f"rise of the loss, this head alone {EDITS}", ("edit", "prompt", *HEAD)
        ),
        "joint_cost": Variable(
            "joint cost",
            "nats",
            "rise of the loss, the heads of the highest slash scores (or drawn ones) edited at once",
            ("edited", "n_heads", "prompt"),
        ),
        **LITERATURE,
        "rho": Variable(
            "Spearman's rho",
            "",
            "over heads, or of ranks with each layer's mean taken away; Bonett & Wright's interval, heads independent",
            ("scope", "end", "column", "column_2"),
            bounds=(-1, 1),
        ),
    }
    figures = {"correlations": correlation_maps, "heads": rank_table, "joint_costs": joint_costs}
    caveats = dict.fromkeys(("absolute", "alibi", "none"), NO_TURN)

    def kinds(self, data: xr.Dataset) -> Sequence[str]:
        return [kind for kind in self.figures if kind != "joint_costs" or "joint_cost" in data]

    def prepare(self, model: Any, tokens: Sequence[Tensor]) -> "Profiles":
        return replace(self, period=self.period_for(model))

    def period_for(self, model: Any) -> int:
        """Return the length of the random block; refuse one that does not fit into the context or the vocabulary."""
        n_first, context, vocabulary = len(first_tokens(model)), int(model.cfg.n_ctx), int(model.cfg.d_vocab)
        period = self.period or min(PERIOD, (context - n_first) // 2, vocabulary)
        if period > vocabulary or n_first + 2 * period > context:
            raise InputError(
                f"profiles: period={period}: two blocks of different tokens do not fit into a vocabulary of "
                f"{vocabulary} and a context of {context}; give a shorter one"
            )
        return period

    def passes(self, run: Run) -> int:
        n_heads = sum(map(len, select_heads(run.model, **run.where).values()))
        n_edits = len(COSTS) * n_heads + len(TOGETHER) * len(counts_up_to(n_heads))
        of_costs = min(self.cost_prompts, len(run.rows)) * (3 + n_edits) if self.costs_heads(n_heads) else 0
        return self.n_repeated + of_costs + (len(run.rows) if self.metrics == "literature" else 0)

    def costs_heads(self, n_heads: int) -> bool:
        """Return whether costs are measured, of so many heads."""
        return n_heads <= MOST_HEADS if self.costs is None else self.costs

    def of_model(self, run: Run) -> xr.Dataset:
        slash = run.found(Slash).sel(tokens="all", drop=True)
        variance = run.found(Variance).sel(tokens="without first", drop=True)
        selected = select_heads(run.model, **run.where)
        data = xr.Dataset({name: slash[source] for name, source in FROM_SLASH.items()})
        shares = variance[[name for name in FROM_VARIANCE if name in variance]]
        data = data.merge(shares).merge(self.on_repeated_tokens(run))
        if self.metrics == "literature":
            data = data.merge(means_of(run, lambda layer: literature_metrics(layer, run.seed)))
        if self.costs_heads(sum(map(len, selected.values()))):
            some = run.tokens[: self.cost_prompts]
            data = data.merge(head_costs(run, some, data["slash_score"], slash["best_distance"], selected))
        data["rho"] = correlations(data)
        return xr.Dataset({name: data[name].transpose(*self.variables[name].dims) for name in data.data_vars})

    def on_repeated_tokens(self, run: Run) -> xr.Dataset:
        """Return the three scores of every head, means over prompts of repeated random tokens."""
        first, period = first_tokens(run.model), self.period
        assert period is not None

        def scores(layer: LayerCapture) -> Mapping[str, Any]:
            assert layer.pattern is not None
            return vars(repeated_scores(layer.pattern, len(first), period))

        return means_of(run, scores, repeated_prompts(first, period, run.model.cfg.d_vocab, self.n_repeated, run.seed))

    def findings(self, own: Numbers) -> list[str]:
        n_heads = int(own.data["interaction"].notnull().sum())
        highest = [
            f"{COLUMNS[name]} {own.extreme(name):.2f}{own.number(own.array(name).max(HEAD)).null_in_brackets:.2f}"
            for name in ("slash_score", *REPEATED)
        ]
        on_text, *on_repeated = highest
        of_costs = cost_sentences(own, n_heads) if "cost" in own else []
        highest_sentence = (
            f"Of {counted(n_heads, 'head')}, highest: {on_text}; on repeated random tokens {', '.join(on_repeated)}."
        )
        return [*literature_sentences(own), highest_sentence, *of_costs, *pair_sentences(own)]

    def table(self, own: Numbers) -> pd.DataFrame:
        """Return a row for each pair of columns that the papers or our statistics connect: Spearman's rho with its
        interval, random init in brackets."""
        rows = []
        for a, b in pairs_of(own.data):
            numbers = {scope: own("rho", scope=scope, column=a, column_2=b) for scope in SCOPES}
            inits = {scope: f" ({number.of_inits.plain:.2f})" if own.inits else "" for scope, number in numbers.items()}
            cells = {scope: f"{number.with_interval:.2f}{inits[scope]}" for scope, number in numbers.items()}
            rows.append({"pair": f"{COLUMNS[a]}, {COLUMNS[b]}", **cells})
        return pd.DataFrame(rows)


def means_of(run: Run, values: Callable[[LayerCapture], Mapping[str, Any]], rows: Any = None) -> xr.Dataset:
    """Return means over prompts (or other rows of token ids) of values of each layer, which has its pattern."""
    sums = run.sums()
    run.capture(lambda layer: sums.add_layer(layer, values(layer)), needs=frozenset({"pattern"}), rows=rows)
    return sums.means()


def cost_sentences(own: Numbers, n_heads: int) -> list[str]:
    """Return what heads cost, one at a time and several at once, beside random init."""
    costs = {COLUMNS[f"cost_{edit}"]: own("cost", edit=edit) for edit in COSTS}
    most = "; ".join(f"{COLUMNS[f'cost_{edit}']} {own.extreme('cost', edit=edit):.3f}" for edit in COSTS)
    n = min(own.data["n_heads"].values.tolist(), key=lambda one: abs(one - n_heads / 4))
    numbers = {words: own("joint_cost", edited=edit, n_heads=n) for edit, words in JOINT.items()}
    at_random = [
        f"Random init, {words}: {listed(each, True)}."
        for words, each in (("one head at a time", costs), ("as many heads at once", numbers))
    ]
    return [
        f"Loss in nats per token, mean over heads, one head at a time: {listed(costs)}.",
        f"Loss with {n} of {counted(n_heads, 'head')} edited at once, highest slash scores first: {listed(numbers)}.",
        f"Heads that cost most, one at a time: {most}.",
        *(at_random if own.inits else []),
    ]


def listed(numbers: Mapping[str, Number], of_inits: bool = False) -> str:
    """Return numbers behind their names; or those of the random inits."""
    return "; ".join(f"{name} {one.of_inits.plain if of_inits else one.plain:.4f}" for name, one in numbers.items())


def literature_sentences(own: Numbers) -> list[str]:
    """Return the sentence of other papers' metrics that go together with what position costs, if they were measured."""
    pairs = [pair for pair in seen_pairs(own) if pair in LITERATURE_PAIRS]
    return [strongest_pairs(own, SCOPES[0], pairs, "columns of other papers")] if pairs else []


def pair_sentences(own: Numbers) -> list[str]:
    """Return the sentences of the other columns that go together."""
    unseen, pairs = unseen_patterns(own), [pair for pair in seen_pairs(own) if pair not in LITERATURE_PAIRS]
    found = [strongest_pairs(own, scope, pairs, "columns") for scope in SCOPES]
    if unseen:
        names = ", ".join(COLUMNS[name] for name in REPEATED if name in unseen)
        found.append(f"No head attends more than at random init, so that its pairs are not looked at: {names}.")
    return found + [beyond_null(own.dataset["rho"], scope, unseen) for scope in SCOPES if own.inits]


def seen_pairs(own: Numbers) -> list[tuple[str, str]]:
    """Return the pairs of columns but those of patterns that no head shows more than at random init."""
    unseen = unseen_patterns(own)
    return [pair for pair in pairs_of(own.data) if not unseen & {*pair}]


def strongest_pairs(own: Numbers, scope: str, pairs: Sequence[tuple[str, str]], words: str) -> str:
    """Return those of these pairs whose rank correlation is largest, beside random init."""
    found = [(own("rho", scope=scope, column=a, column_2=b), a, b) for a, b in pairs]
    known = sorted((one for one in found if one[0]), key=lambda one: -abs(one[0].value))
    parts = [f"{COLUMNS[a]} with {COLUMNS[b]} {rho:.2f}" for rho, a, b in known[:MOST_PAIRS]]
    largest = "; ".join(parts) or "none is defined"
    return f"Rank correlation of {words} {scope}, largest of {len(pairs)} pairs: {largest}."


def unseen_patterns(own: Numbers) -> frozenset[str]:
    """Return the patterns on repeated tokens that no head shows more than the heads of random inits do."""
    highest = {name: own.array(name).max(HEAD) for name in REPEATED} if own.inits else {}
    return frozenset(name for name, one in highest.items() if one.sel(init=TRAINED) <= one.sel(init=own.inits).max())


def first_tokens(model: Any) -> Int[Tensor, " start"]:
    """Return what prompts of repeated tokens begin with: a BOS token, where the tokenizer puts one."""
    return torch.tensor([] if model.tokenizer is None else bos_of(model), dtype=torch.int64)
