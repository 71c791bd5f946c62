"""Rules: which cheap rule of attention does a head obey, how much of its attention is recalled, and at what loss?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, cast

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double, double_device
from tl_posgen.core.measure import HEAD, TOKENS, Variable
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Count, Each, require
from tl_posgen.core.run import Run
from tl_posgen.editing.printed_hooks import HookList, printing_call
from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.editing.score_functions import RowByRow
from tl_posgen.errors import InputError
from tl_posgen.interventions import Interventions
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.model import Model
from tl_posgen.models.provenance import fingerprint
from tl_posgen.models.selection import Heads, Layers, head_name, select_heads
from tl_posgen.models.session import Session, session_of
from tl_posgen.report.kinds import bars
from tl_posgen.rules.numbers import RULES, Means, Rule, best_keys, distances_of, drawn_scores, kept_keys, rule_scores

REFERENCES = ("drawn", "oracle")  # drawn keys, those of most attention
WORDS = {  # rule -> its name in sentences, tables and figures
    "sinks": "sinks and window",
    "slashes": "slashes a(d)",
    "vertical": "vertical keys c(j)",
    "slashes_and_vertical": "a(d) + c(j)",
    "mean_query": "mean query",
    "position_and_content": "position + content",
    "drawn": "drawn keys",
    "oracle": "best keys",
}
_SMALLEST = 1e-300  # attention; of none at all, a rule recalls 0
BLOCK = 256  # queries whose attention is in memory
Calibration = Mapping[int, tuple[list[int], Means]]  # layer -> its heads and their means


# Hooks


@printing_call
def apply_rules(
    model: Model | Session,
    result: Any,
    rule: str,
    budget: int | None = None,
    *,
    layers: Layers = None,
    heads: Heads = None,
) -> HookList:
    """score_ij <- -inf unless the rule keeps key j for query i; other scores stay.

    A query that sees no more keys than the budget keeps all; its own key and the first ones are ranked as any other.

    Args:
        result: of the measure `rules`, also after `tl_posgen.load`, whose calibration rules are made of.
        rule: one of `tl_posgen.rules.numbers.RULES`, "drawn" for drawn keys, or "oracle" for those of most attention.
        budget: keys that each head keeps; as many as were measured if left out.
        layers, heads: of those measured; all of them if left out.

    Returns:
        Hooks for `model.hooks(fwd_hooks=...)` or `run_with_hooks`, alone or joined to others. They work row by row, so
        a model also writes on under them with a KV cache, and under `tl_posgen.streaming` memory is linear in the
        number of tokens. They say what the rule does to the model, and save no time.

    Raises:
        InputError: no result of `rules`, or one that was calibrated on other weights; a rule that is not known; a head
            that was not measured.
        UnsupportedModelError: see `tl_posgen.hooks.replace_scores`.

    Source: ours; for the rules' own see `tl_posgen.rules.numbers.rule_scores`.

    Example:
        >>> from tl_posgen import load_model
        >>> from tl_posgen.rules import Rules
        >>> model, text = load_model("mini"), "Down, down, down. Would the fall never come to an end?"
        >>> cut = {"length": 12, "n_prompts": 2, "consecutive": True, "nulls": 0, "progress": False}
        >>> hooks = apply_rules(model, Rules(rules=["window"], budget=4)(model, text * 3, **cut), "window")
        >>> tokens = torch.arange(9)[None]
        >>> changed = (model.run_with_hooks(tokens, fwd_hooks=hooks) - model(tokens)).abs().amax((0, 2)) > 1e-3
        >>> changed.tolist()
        [False, False, False, False, True, True, True, True, True]
    """
    if getattr(result, "name", "") != "rules":
        raise InputError(f"apply_rules: {result!r} is no result of the measure rules")
    choices = [*RULES, *REFERENCES]
    if rule not in choices:
        raise InputError(f"apply_rules: rule = {rule!r}: choose from {', '.join(choices)}")
    require("budget", budget, Count | None)
    session = session_of(model)
    here, there = fingerprint(session), result.provenance.get("weights")
    if here != there:
        backends = result.provenance.get("backend"), session.backend.name
        hint = (
            f". HookedTransformer and TransformerBridge hold the same weights in other matrices: give the backend on "
            f"which they were calibrated ({backends[0]}, and this model's is {backends[1]})"
        )
        raise InputError(
            f"rules: calibrated on {result.provenance.get('model')}, weights {there}, and this model's are {here}; "
            f"measure rules of this model{hint if backends[0] != backends[1] else ''}"
        )
    calibration = _calibration_of(result.trained)
    chosen = measured = [(layer, head) for layer, (head_numbers, _) in calibration.items() for head in head_numbers]
    if layers is not None or heads is not None:
        chosen = [(layer, head) for layer, picked in select_heads(session, layers, heads).items() for head in picked]
    if lacking := [place for place in chosen if place not in measured]:
        raise InputError(f"apply_rules: {head_name(*lacking[0])} was not measured; choose measured layers and heads")
    n_kept, seed = budget or int(result.measure.budget), int(result.provenance.get("seed", 0))
    return _rule_hooks(session, rule, n_kept, calibration, seed, chosen)


def _calibration_of(data: xr.Dataset) -> Calibration:
    """Return the means of every layer."""
    calibration = {}
    for layer in data["layer"].values.tolist():
        means = data[["mean_query", "mean_key"]].sel(layer=layer)
        means = means.dropna("component", how="all").dropna("head", how="all").transpose("head", "component")
        q, k = (torch.from_numpy(means[name].values.copy()) for name in means.data_vars)
        calibration[layer] = means["head"].values.tolist(), Means(q, k, int(data.attrs["n_distances"]))
    return calibration


def _rule_hooks(
    model: Model | Session,
    rule: str,
    budget: int,
    calibration: Calibration,
    seed: int,
    heads: Sequence[tuple[int, int]],
) -> HookList:
    """Return the hooks of a rule from its calibration; the seed is that of drawn keys."""

    def keys_seen(capture: LayerCapture, own_scores: Float[Tensor, "head query key"]) -> Bool[Tensor, "head query key"]:
        visible = capture.geometry.sees(distances_of(capture.q.shape[1], capture.k.shape[1], capture.q.device))
        ranked = _ranks_by(rule, capture, own_scores.to(visible.device), calibration[capture.layer], seed)
        return kept_keys(ranked.detach(), visible, budget)

    return replace_scores(model, RowByRow(keys_seen, with_own=True), heads=heads)


def _ranks_by(
    rule: str,
    capture: LayerCapture,
    own_scores: Float[Tensor, "head query key"],
    calibration: tuple[list[int], Means],
    seed: int,
) -> Float[Tensor, "head query key"]:
    """Return the numbers by which a rule ranks the keys of each query; the oracle ranks by `own_scores`, those of the
    pass."""
    if rule == "oracle":
        return own_scores
    q, k, geometry = capture.q, capture.k, capture.geometry
    heads = torch.tensor(list(capture.heads), device=q.device)
    if rule == "drawn":
        return drawn_scores(geometry.layer * geometry.n_heads + heads, q.shape[1], k.shape[1], seed)
    calibrated, means = calibration
    places, n = [calibrated.index(head) for head in capture.heads], means.n_distances
    means = Means(means.q[places], means.k[places], geometry.reach(n))
    bias = geometry.distance_bias(distances_of(q.shape[1], k.shape[1], q.device).to(q.dtype), capture.heads)
    return rule_scores(cast(Rule, rule), q, k, means, geometry.rope, geometry.scale, bias)


# The measure


@dataclass(frozen=True)
class Rules(Interventions):
    r"""recall = attention in the B keys that a rule ranks first / attention in the best B keys.

    Which cheap rule says where a head attends: the last keys, the first ones too, fixed distances, fixed keys, a mean
    query, or position + content? Means of queries and keys come from half of the prompts. The other half says how much
    attention goes to the first B keys by each rule, and what the loss is when every head sees only these. Drawn keys,
    the best keys, and a random init, where almost any keys will do, stand beside them.

    Even prompts (the first, third, ..) calibrate, odd ones are measured; intervals are over the odd ones, from eight
    prompts on. A rule gives key j of query i, at d = i - j, a number to rank it by; the cheapest first: `window` -d;
    `sinks` the first four keys, then -d; `slashes` a(d), the score of the mean query and the mean key; `vertical` c(j),
    the mean query with the key less the mean key, averaged over distances; `slashes_and_vertical` a + c; `mean_query`
    the mean query with the key; `position_and_content` the query with the mean key, and with the key less the mean key,
    averaged over distances. Only the last one reads the query. These averages weigh distance d by 1 / (d + 1).

    The first key and the query's own are ranked as all others; recall is also given without the attention to the first
    key. A query that sees no more than B keys keeps them all, and is left out of the means. Loss: with the rule in
    every head, over the tokens behind the first B.

    Args:
        rules: which rules are compared.
        budget: B, keys that each query head may keep.

    Raises:
        InputError: fewer than two prompts, prompts of different lengths, or no longer than the budget.
        UnsupportedModelError: a model whose scores cannot be replaced.

    Source: window and sinks: Xiao et al. 2023 (arXiv 2309.17453). mean_query after the trigonometric series of
    TriAttention (arXiv 2604.04921), the averaged turns after Expected Attention (arXiv 2510.00636), both reconstructed
    from abstracts and public text, without their weights and evictions. The other rules are ours.

    Example:
        >>> cut = {"length": 24, "n_prompts": 2, "consecutive": True, "nulls": 0, "progress": False}
        >>> text = "Down, down, down. Would the fall never come to an end? " * 4
        >>> found = Rules(rules=["window", "position_and_content"], budget=6)("mini", text, **cut)
        >>> recall = found.sel(tokens="all")["recall"].mean(("prompt", "layer", "head"))
        >>> bool(recall.sel(rule="drawn") < recall.sel(rule="position_and_content") < recall.sel(rule="oracle"))
        True
    """

    rules: Annotated[Sequence[Rule], Each()] = RULES
    budget: Count = 32

    question = "Which cheap rule of attention does a head obey, and what does it cost?"
    rows = ("rule", *HEAD)
    whole_rows = True
    words = WORDS
    variables = {
        "recall": Variable.share(
            "recall",
            "mass / mass of the best B keys",
            ("tokens", "rule", "prompt", *HEAD),
            "recall",
            judged=True,
            interval=False,
        ),
        "loss": Variable("loss", "nats per token", "behind the first B tokens", ("condition", "prompt"), "loss"),
        "mean_query": Variable("mean query", "", "before RoPE", (*HEAD, "component")),
        "mean_key": Variable("mean key", "", "before RoPE", (*HEAD, "component")),
    }
    legend = "recall: attention in a rule's keys against the best ones, mean over heads; the rule in every head."
    figures = {
        "recall": bars(
            {
                "all keys": [("recall", "recall")],
                "without the first key": [
                    ("recall", "recall", {"first_token": False}),
                ],
            },
            "rule",
            title="Recall of rules",
            subtitle="attention in the {budget} keys that a rule keeps / in as many best keys, mean over heads, on "
            "prompts it was not calibrated on",
        ),
        **Interventions.figures,
    }
    caveats = {
        "absolute": "nothing turns, so slashes are the last keys, and a mean query ranks as vertical keys do.",
        "alibi": "slashes are the last keys where the slope is not zero.",
        "none": "nothing turns, so slashes are the last keys, and a mean query ranks as vertical keys do.",
    }

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"rule": [*(rule for rule in RULES if rule in self.rules), *REFERENCES]}  # the cheapest first

    def prepare(self, session: Session, tokens: Sequence[Tensor]) -> "Rules":
        if len(tokens) < 2:
            raise InputError("rules: even prompts calibrate and odd ones are measured: give two at least")
        n = len(tokens[0])
        if n < self.budget + 2:  # one query that sees more, and the token behind it
            shorter = f", or a budget of {n - 2}" if n > 2 else ""
            raise InputError(
                f"rules: prompts of {n} tokens with budget={self.budget}: no key would be left out; give prompts of "
                f"{self.budget + 2} tokens or more{shorter}"
            )
        return self

    def refuse(self, run: Run) -> None:
        """Leave the conditions, which need the calibration, to `of_model`."""

    def of_model(self, run: Run) -> xr.Dataset:
        sums, recalls = run.sums(), run.sums()

        def add_means(layer: LayerCapture) -> None:  # the first token of each prompt is left out
            vectors = {"mean_query": layer.q, "mean_key": layer.k}
            sums.add_layer(layer, {name: double(x)[:, 1:].mean(1) for name, x in vectors.items()})

        run.capture(add_means, rows=run.rows[::2])
        means = sums.means().assign_attrs(n_distances=len(run.rows[0]))
        calibration = _calibration_of(means)

        def add_recall(layer: LayerCapture) -> None:
            recalls.add_layer(layer, {"recall": self._recall(layer, calibration[layer.layer], run.seed)})

        odd = replace(run, rows=run.rows[1::2], before={**run.before, self.name: means})
        odd.capture(add_recall, frozenset({"pattern"}))
        data = recalls.means().merge(super().of_model(odd)).merge(means).assign_attrs(means.attrs)
        return data.assign_coords(prompt=np.arange(1, len(run.rows), 2))

    def conditions(self, run: Run) -> Mapping[str, Any]:
        calibration = _calibration_of(run.data)
        heads = [(layer, head) for layer, (head_numbers, _) in calibration.items() for head in head_numbers]
        arguments = (self.budget, calibration, run.seed, heads)
        return {rule: _rule_hooks(run.session, rule, *arguments) for rule in self.labels()["rule"]}

    def under(self, run: Run, hooks: Any) -> Mapping[str, Any]:
        return {"loss": run.losses_under(hooks)[:, self.budget :].mean(-1).numpy()}

    def _recall(
        self, capture: LayerCapture, calibration: tuple[list[int], Means], seed: int
    ) -> Float[Tensor, "tokens rule head"]:
        """Return means over the queries that see more than the budget, with and without the attention to the first key;
        NaN where there is none."""
        device, rules = double_device(capture.device), self.labels()["rule"]
        recall = torch.zeros(len(TOKENS), len(rules), len(capture.heads), dtype=DOUBLE, device=device)
        n_queries = torch.zeros((), dtype=DOUBLE, device=device)
        for start in range(0, capture.length, BLOCK):
            stop = min(capture.length, start + BLOCK)
            if stop <= self.budget:
                continue
            rows, scores = capture.of_rows(start, stop), capture.score_rows(start, stop)
            visible = capture.geometry.sees(distances_of(stop - start, stop, scores.device))
            counted = (visible.sum(-1) > self.budget).to(device)
            pattern = double(capture.pattern_rows(start, stop))
            patterns = torch.stack([pattern, pattern])
            patterns[1, ..., 0] = 0
            best = patterns.topk(self.budget).values.sum(-1).clamp(min=_SMALLEST)
            n_queries += counted.sum()
            for number, rule in enumerate(rules):
                keys = best_keys(_ranks_by(rule, rows, scores, calibration, seed), visible, self.budget).to(device)
                held = patterns.gather(-1, keys.expand(len(TOKENS), -1, -1, -1)).sum(-1)
                recall[:, number] += (held / best)[..., counted].sum(-1)
        return recall / n_queries

    def findings(self, numbers: Numbers) -> list[str]:
        rises, (*rules, drawn, _) = self.rises(numbers), self.labels()["rule"]
        recalls = {rule: numbers("recall", rule=rule) for rule in rules}
        recalls[drawn] = numbers.number(numbers.array("recall", rule=drawn), (0, 1))  # of drawn keys no more is said
        best = max(rules, key=lambda rule: recalls[rule].value)
        without_first = {rule: numbers("recall", rule=rule, first_token=False) for rule in recalls}
        phrases = [
            f"{self.in_words(rule)} {number.plain:.3f}{number.null_in_brackets:.3f}"
            for rule, number in without_first.items()
        ]
        return [
            f"Of the attention in the best {self.budget} keys, {self.in_words(best)} recalls {recalls[best]:.3f}, "
            f"the most (mean over heads), and with it in every head the loss changes by {rises[best]:+.3f} nats; "
            f"drawn keys recall {recalls[drawn]:.3f} and change it by {rises[drawn]:+.3f}.",
            f"Recall of the best {self.budget} keys without the attention to the first key: {', '.join(phrases)}.",
        ]

    def table(self, numbers: Numbers) -> pd.DataFrame:
        """Return a row a rule: its loss and rise, and recall with the first key and without."""
        columns = {
            "recall": numbers.array("recall", rule=None),
            "recall without the first key": numbers.array("recall", rule=None, first_token=False),
        }
        recall = numbers.frame(columns, "rule")
        return super().table(numbers).merge(recall.rename(columns={"rule": "condition"}), on="condition", how="left")
