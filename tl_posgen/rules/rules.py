"""Rules: which cheap rule of attention does a head obey, how much of its attention is recalled, and at what loss?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
import xarray as xr
from torch import Tensor

from tl_posgen.core.formatting import counted
from tl_posgen.core.measure import HEAD, Measure, Variable
from tl_posgen.core.numbers import Number, Numbers
from tl_posgen.core.options import Count, Each, NonNegative
from tl_posgen.core.run import Run
from tl_posgen.errors import InputError
from tl_posgen.models.metric import CHOSEN
from tl_posgen.models.selection import select_heads
from tl_posgen.rules.calibration import groups_of
from tl_posgen.rules.head_rules import ALL, REFERENCES, WORDS
from tl_posgen.rules.numbers.rule_scores import PREDICTING, RULES, Rule, Weights
from tl_posgen.rules.rules_figures import draw_plan, draw_recall
from tl_posgen.rules.trial import Trial, n_steps
from tl_posgen.stats.intervals import FEWEST
from tl_posgen.stats.rank_correlation import rank_correlation

CELL = ("rule", "budget")
GROUP = ("layer", "key_value_head")


@dataclass(frozen=True)
class Rules(Measure):
    r"""recall(B) = attention in the B keys that a rule ranks first / attention in the best B keys.

    Which cheap rule says where a head attends: the last keys, the first ones too, fixed distances, fixed keys, a mean
    query, or position + content? Means of queries and keys come from half of the prompts. On the other half: the
    attention in the first B keys by each rule, and the loss when the model sees only these. Beside them drawn keys, the
    best keys, and a random init, where almost any keys will do.

    Even prompts (the first, third, ..) calibrate, odd ones are measured; intervals are over the odd ones, from eight
    prompts on. A rule gives key j of query i, at d = i - j, a number to rank it by; the cheapest first: `window` -d;
    `sinks` the first four keys, then -d; `slashes` a(d), the score of the mean query and the mean key; `vertical` c(j),
    the mean query with the key less the mean key, averaged over distances; `slashes_and_vertical` a + c; `mean_query`
    the mean query with the key; `position_and_content` the query with the mean key, and with the key less the mean key,
    averaged over distances. Only the last one reads the query.

    The first key and the query's own are ranked as all others; recall is also given without the attention to the first
    key. A query that sees no more than B keys keeps them all, and is left out of the means. A key/value head keeps the
    union of what its query heads keep, `kept` keys; its recall is against as many best keys. Loss: with the rule in
    every head, over the tokens behind the first B.

    The plan: each key/value head has the cheapest rule whose union recalls t on the calibrating prompts, or all keys. t
    is a threshold with which the loss on these prompts rises by no more than epsilon nats. Bisection finds it, as if
    the rise fell with t; where it does not, a lower t may do as well. The plan's rise is measured on the odd prompts.
    R^2, of a rule's number with the score within queries, does not tell how a head ranks.

    Args:
        rules: which.
        budgets: B, keys that each query head may keep.
        epsilon: nats per token that the plan may cost; with a metric in the place of the loss, how far it may move,
            up or down.
        weights: of distances in these averages: "near" 1 / (d + 1), as attention mostly is near; "causal", as often as
            they occur; "uniform".
        alone: the rise of the loss also with the rule in one layer, or one key/value head, alone.

    Raises:
        InputError: fewer than two prompts; even or odd ones that are all no longer than the largest budget.
        UnsupportedModelError: a model whose scores cannot be replaced.

    Source: window and sinks: Xiao et al. 2023 (arXiv 2309.17453). mean_query after the trigonometric series of
    TriAttention (arXiv 2604.04921), the averaged turns after Expected Attention (arXiv 2510.00636), both reconstructed
    from abstracts and public text, without their weights and evictions. The other rules, the union's recall and the
    plan are ours.

    Example:
        >>> cut = {"length": 24, "n_prompts": 2, "consecutive": True, "null_seeds": (), "progress": False}
        >>> text = "Down, down, down. Would the fall never come to an end? " * 4
        >>> found = Rules(rules=["window", "position_and_content"], budgets=[6])("mini", text, **cut)
        >>> recall = found.sel(budget=6, tokens="all")["recall"].mean(("prompt", "layer", "head"))
        >>> bool(recall.sel(rule="drawn") < recall.sel(rule="position_and_content") < recall.sel(rule="oracle"))
        True
    """

    rules: Annotated[Sequence[Rule], Each()] = RULES
    budgets: Annotated[Sequence[Count], Each()] = (32, 64)
    epsilon: NonNegative = 0.05
    weights: Weights = "near"
    alone: Literal["none", "layer", "head"] = "none"

    question = "Which cheap rule of attention does a head obey, and what does it cost?"
    rows = (*CELL, *HEAD)
    whole_rows = True
    variables = {
        "recall": Variable(
            *("recall", "", "mass / mass of the best B keys", ("tokens", *CELL, "prompt", *HEAD), "recall"),
            bounds=(0, 1),
        ),
        "mass": Variable(
            *("attention kept", "", "in the rule's B keys", ("tokens", *CELL, "prompt", *HEAD)), bounds=(0, 1)
        ),
        "r2": Variable(
            *("R^2", "", "of the rule's number with the score, within queries", ("rule", "prompt", *HEAD)),
            bounds=(0, 1),
        ),
        "group_recall": Variable(
            *("recall of the union", "", "mass / mass of as many best keys", (*CELL, "prompt", *GROUP)), bounds=(0, 1)
        ),
        "kept": Variable("keys of the union", "", "of its query heads' B keys each", (*CELL, "prompt", *GROUP)),
        "loss": Variable("loss", "nats per token", "no rule, behind the first B tokens", ("budget", "prompt")),
        "rise": Variable("rise of the loss", "nats", "with the rule in every head", (*CELL, "prompt"), "rise"),
        "layer_rise": Variable("rise, one layer alone", "nats", "with the rule there", (*CELL, "prompt", "layer")),
        "group_rise": Variable("rise, one head alone", "nats", "with the rule there", (*CELL, "prompt", *GROUP)),
        "plan": Variable("cheapest rule", "", "its name, or all: every key", ("budget", *GROUP)),
        "plan_recall": Variable("recall that the plan asks for", "", "its threshold t", ("budget",)),
        "plan_rise": Variable("rise of the loss by the plan", "nats", "", ("budget", "prompt")),
        "mean_query": Variable("mean query", "", "before RoPE", (*HEAD, "component")),
        "mean_key": Variable("mean key", "", "before RoPE", (*HEAD, "component")),
        "reads": Variable("key/value head", "", "that the query head reads"),
        "n_distances": Variable("distances", "", "over which turns are averaged", ("layer",)),
    }
    legend = (
        "B: keys that a query head keeps; recall: attention in them against the best B keys, mean over heads (random "
        "init), its interval from eight prompts on; keys, union: how many keys the query heads of a key/value head "
        "keep together, and their recall; rise: "
        "of the loss, nats, the rule in every head; R²: of the rule's number with the score, within queries; rho: "
        "Spearman's, of R² with recall over heads."
    )
    figures = {"recall": draw_recall, "plan": draw_plan}
    caveats = {
        "absolute": "nothing turns, so slashes are the last keys, and a mean query ranks as vertical keys do.",
        "alibi": "slashes are the last keys where the slope is not zero.",
        "none": "nothing turns, so slashes are the last keys, and a mean query ranks as vertical keys do.",
    }

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"rule": [*self.in_order, *REFERENCES], "budget": sorted(self.budgets)}

    def usual(self) -> Mapping[str, Any]:
        return {"tokens": "all"}

    @property
    def in_order(self) -> list[Rule]:
        """Its rules, the cheapest first."""
        return [rule for rule in RULES if rule in self.rules]

    def prepare(self, model: Any, tokens: Sequence[Tensor]) -> "Rules":
        if len(tokens) < 2:
            raise InputError("rules: even prompts calibrate and odd ones are measured: give two at least")
        longest = min(max(map(len, half)) for half in (tokens[::2], tokens[1::2]))
        if longest < max(self.budgets) + 2:  # one query that sees more, and the token behind it
            shorter = f", or budgets up to {longest - 2}" if longest > 2 else ""
            raise InputError(
                f"rules: prompts of {longest} tokens with budgets={list(self.budgets)}: no key would be left out; give "
                f"prompts of {max(self.budgets) + 2} tokens or more{shorter}"
            )
        return self

    # The passes

    def passes(self, run: Run) -> int:
        chosen = select_heads(run.model, **run.where)
        n_groups = sum(len(groups_of(run.wrapped.layer(layer).geometry, heads)) for layer, heads in chosen.items())
        alone = {"none": 0, "layer": len(chosen), "head": n_groups}[self.alone]
        n_budgets, n_even = len(self.budgets), len(run.rows[::2])
        of_odd = 2 + n_budgets * (1 + len(self.labels()["rule"]) * (1 + alone))
        of_even = 3 + n_budgets * n_steps(n_groups, len(self.rules))
        return (len(run.rows) - n_even) * of_odd + n_even * of_even

    def of_model(self, run: Run) -> xr.Dataset:
        trial = Trial(self, run)
        found = trial.recalls(trial.odd)
        kept = {name: found.mean(name) for name in ("recall", "mass", "r2", "group_recall", "kept")}
        data = xr.Dataset(kept).merge(trial.means(found)).merge(trial.rises()).merge(trial.plans())
        data = data.merge(trial.rises_alone(self.alone)) if self.alone != "none" else data
        data = data.assign_coords(prompt=np.arange(1, len(run.rows), 2))[[n for n in self.variables if n in data]]
        either_way = int(CHOSEN.get() is not None)  # a metric may move up or down
        return data.assign_attrs(either_way=either_way, calibrating=len(trial.even))

    # Words

    def findings(self, own: Numbers) -> list[str]:
        budgets = self.labels()["budget"]
        said = [self.recall_sentence, self.plan_sentence, self.single_rule_sentence, self.without_first_sentence]
        return [say(own, budget) for budget in budgets for say in said]

    def recall_sentence(self, own: Numbers, budget: int) -> str:
        """Return which rule recalls most and what it costs, beside drawn keys."""
        rises = {rule: own("rise", rule=rule, budget=budget) for rule in (*self.in_order, "drawn")}
        recalls = {rule: own("recall", rule=rule, budget=budget) for rule in (*self.in_order, "drawn")}
        best = max(self.in_order, key=lambda rule: recalls[rule].value)
        return (
            f"Of the attention in the best {budget} keys, {WORDS[best]} recalls {recalls[best]:.3f}, the most "
            f"(mean over heads), and with it in every head the loss changes by {rises[best]:+.3f} nats; drawn keys "
            f"recall {recalls['drawn']:.3f} and change it by {rises['drawn']:+.3f}."
        )

    def plan_sentence(self, own: Numbers, budget: int) -> str:
        """Return how many key/value heads the plan gives each rule, and what it costs on the odd prompts."""
        counts = self.counts(own.side, budget)
        rules = ", ".join(f"{n} {WORDS[rule]}" for rule, n in counts.items() if n)
        rise, n = own("plan_rise", budget=budget), int(own.attrs.get("calibrating", 0))  # 0: a file does not say it
        on = counted(n, "calibrating prompt") if n else "the calibrating prompts"
        few = (
            f" On so few prompts a plan often costs more elsewhere: give {2 * FEWEST} prompts or more."
            if 0 < n < FEWEST
            else ""
        )
        return (
            f"Plan within {self.epsilon:g} nats on {on} at {budget} keys, the cheapest rules of "
            f"{sum(counts.values())} key/value heads: {rules}; on the other prompts the loss changes by {rise:+.3f}."
            f"{few}"
        )

    def single_rule_sentence(self, own: Numbers, budget: int) -> str:
        """Return the cheapest rule that would do in every head, which may cost less than the plan."""
        rises = {rule: own("rise", rule=rule, budget=budget) for rule in self.in_order}
        either_way = own.attrs["either_way"]
        within = [rule for rule, one in rises.items() if (abs(one.value) if either_way else one.value) <= self.epsilon]
        found = f"{WORDS[within[0]]}, {rises[within[0]]:+.3f}" if within else "none"
        change = "change" if either_way else "raise"
        return (
            f"The cheapest rule that, used in every head, does not {change} the loss on these other prompts by more "
            f"than {self.epsilon:g} nats: {found}."
        )

    def without_first_sentence(self, own: Numbers, budget: int) -> str:
        """Return the recall of attention to all keys but the first, and what each rule costs."""
        recalls = ", ".join(
            f"{WORDS[rule]} {own('recall', rule=rule, budget=budget, tokens='without first').plain:.3f} "
            f"({own('rise', rule=rule, budget=budget).plain:+.3f} nats)"
            for rule in self.labels()["rule"][:-1]
        )
        return (
            f"Recall of the best {budget} keys without the attention to the first key, and the change of the loss with "
            f"the rule in every head: {recalls}."
        )

    def counts(self, data: xr.Dataset, budget: int) -> dict[str, int]:
        """Return how many key/value heads the plan gives each rule."""
        plan = data["plan"].sel(budget=budget).values.ravel().tolist()
        return {rule: plan.count(rule) for rule in [*self.in_order, ALL]}

    def rank_correlation(self, own: Numbers, rule: str, budget: int) -> Number:
        """Return Spearman's rho over heads of R^2 with recall, with its interval for independent heads."""
        r2, recall = own.array("r2", rule=rule), own.array("recall", rule=rule, budget=budget)
        both = [own.of_side(one).mean("prompt").transpose(*HEAD).values.ravel() for one in (r2, recall)]
        found = rank_correlation(*map(torch.as_tensor, both))
        return Number(found.r, found.low, found.high)

    def table(self, own: Numbers) -> pd.DataFrame:
        """Return a row a budget and rule: recall, keys of the union, the rise of the loss, recall of the union, R^2 and
        how R^2 orders the heads; random init in brackets."""
        rows = []
        for budget, rule in product(self.labels()["budget"], self.labels()["rule"]):
            recall, union, kept, rise = (
                own(name, rule=rule, budget=budget) for name in ("recall", "group_recall", "kept", "rise")
            )
            beside = [
                f" ({one.of_inits.plain:{form}})" if own.inits else ""
                for one, form in ((recall, ".3f"), (rise, "+.3f"))
            ]
            cells = {"B": budget, "rule": WORDS[rule], "recall": f"{recall.plain:.3f}{beside[0]}"}
            cells |= {"keys": f"{kept.plain:.0f}", "rise": f"{rise.with_interval:+.3f}{beside[1]}"}
            cells |= {"recall, interval": f"{recall.with_interval:.3f}"} if recall.low == recall.low else {}
            cells |= {"union": f"{union.plain:.3f}"}
            cells |= {"R²": "", "rho": ""}
            if rule in PREDICTING:
                rho = self.rank_correlation(own, rule, budget)
                cells |= {"R²": f"{own('r2', rule=rule).plain:.2f}", "rho": f"{rho.with_interval:.2f}"}
            rows.append(cells)
        return pd.DataFrame(rows)
