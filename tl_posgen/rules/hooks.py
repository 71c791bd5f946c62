"""Hooks by which heads of a running model see only the keys that a rule keeps."""

import os
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_posgen.core.null_models import check_seed
from tl_posgen.core.options import Count, require
from tl_posgen.core.report import load
from tl_posgen.errors import InputError
from tl_posgen.hooks.replace_scores import HookList, RowByRow, replace_scores
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.model import Model
from tl_posgen.models.provenance import fingerprint
from tl_posgen.models.selection import select_heads
from tl_posgen.models.wrapped import wrap
from tl_posgen.rules.head_rules import ALL, HeadRule, RuleTable
from tl_posgen.rules.numbers.kept_keys import kept_keys
from tl_posgen.rules.numbers.rule_scores import PREDICTING, Means, distances_of, drawn_scores, rule_scores

Table = Any  # a RuleTable, a result of `rules`, or a path


def apply_rules(model: Model, table: Table, budget: int | None = None, rule: str | None = None) -> HookList:
    """score_ij <- -inf unless the rule of the head's key/value head keeps key j for query i; other scores stay.

    Each query head chooses its budget of keys; all query heads of a key/value head see the union. A query that sees no
    more keys than the budget keeps all; its own key and the first ones are ranked as any other.

    Args:
        table: a `tl_posgen.rules.RuleTable`, the path of one as JSON, a result of the measure `rules`, or the directory
            of a report with it.
        budget, rule: of a result: one of its budgets, the smallest if left out; one of its rules in every head, its
            plan if left out.

    Returns:
        Hooks for `model.hooks(fwd_hooks=...)` or `run_with_hooks`, alone or joined to others. They work row by row, so
        a model also writes on under them with a KV cache, and under `tl_posgen.streaming` memory is linear in the
        number of tokens, by any rule: scores are formed, ranked and masked a block of rows at a time. They say what
        the rule does to the model, and save no time.

    Raises:
        InputError: a table that was calibrated on other weights; a head that does not exist; no such table, budget or
            rule.
        UnsupportedModelError: see `tl_posgen.hooks.replace_scores`.

    Source: ours; for the rules' own see `tl_posgen.rules.numbers.rule_scores`.

    Example:
        >>> from tl_posgen import load_model
        >>> from tl_posgen.rules import Rules
        >>> model, text = load_model("mini"), "Down, down, down. Would the fall never come to an end?"
        >>> cut = {"length": 12, "n_prompts": 2, "consecutive": True, "null_seeds": (), "progress": False}
        >>> hooks = apply_rules(model, Rules(rules=["window"], budgets=[4])(model, text * 3, **cut), rule="window")
        >>> tokens = torch.arange(9)[None]
        >>> changed = (model.run_with_hooks(tokens, fwd_hooks=hooks) - model(tokens)).abs().amax((0, 2)) > 1e-3
        >>> changed.tolist()
        [False, False, False, False, True, True, True, True, True]
    """
    require("budget", budget, Count | None)
    require("rule", rule, str | None)
    table = table_of(table, budget, rule)
    found, wanted = fingerprint(model), table.calibration.get("weights")
    if found != wanted:
        raise InputError(
            f"rules: calibrated on {table.calibration.get('model')}, weights {wanted}, and this model's are {found}; "
            f"measure rules of this model{backend_hint(table, model)}"
        )
    check_heads(model, table.heads)
    return hooks_of(model, table.heads, check_seed(table.calibration.get("seed", 0)))


def backend_hint(table: RuleTable, model: Model) -> str:
    """Return what to try where the table is, or may be, of the other backend; else nothing."""
    own, here = table.calibration.get("backend"), wrap(model).backend.name
    if own == here:
        return ""
    hint = (
        ". HookedTransformer and TransformerBridge hold the same weights in other matrices: give the backend on which"
    )
    return f"{hint} they were calibrated" + (f" ({own}, and this model's is {here})" if own else "")


def table_of(table: Table, budget: int | None, rule: str | None) -> RuleTable:
    """Return a table of rules from whatever stands for one."""
    if isinstance(table, str | os.PathLike) and Path(table).is_dir():
        table = load(table).results.get("rules")
    if isinstance(table, RuleTable | str | os.PathLike):
        if budget is not None or rule is not None:
            raise InputError("budget and rule choose from a result; a table has its own: leave them out")
        return table if isinstance(table, RuleTable) else RuleTable.from_json(table)
    return RuleTable.from_result(table, budget, rule)


def check_heads(model: Model, rules: Sequence[HeadRule]) -> None:
    """Refuse rules of heads that a model lacks, that read other keys than the rule says, or that have two rules."""
    seen: set[tuple[int, int]] = set()
    for one in rules:
        (geometry,) = geometry_of(model, [one.layer])
        select_heads(model, None, [(one.layer, head) for head in one.heads])
        place = f"rule of layer {one.layer}, key/value head {one.key_value_head}"
        if any(geometry.key_head(head) != one.key_value_head for head in one.heads):
            raise InputError(f"{place}: query heads {list(one.heads)} do not read it")
        if (one.layer, one.key_value_head) in seen:
            raise InputError(f"{place}: has a rule already; give one, with all its query heads, which see their union")
        seen.add((one.layer, one.key_value_head))
        if one.rule in PREDICTING and one.means is not None and one.means.q.shape[1] != geometry.d_head:
            raise InputError(f"{place}: its means have {one.means.q.shape[1]} components, and heads {geometry.d_head}")


def hooks_of(model: Model, rules: Sequence[HeadRule], seed: int = 0) -> HookList:
    """Return the hooks of rules for a model on which they were calibrated.

    Args:
        seed: of drawn keys.
    """
    found: HookList = []
    rules = sorted((one for one in rules if one.rule != ALL), key=lambda one: one.layer)
    for layer, some in groupby(rules, key=lambda one: one.layer):
        of_layer = list(some)
        heads = [(layer, head) for one in of_layer for head in one.heads]
        found += replace_scores(model, RowByRow(partial(keys_seen, of_layer, seed), with_own=True), heads=heads)
    return found


def keys_seen(
    rules: Sequence[HeadRule], seed: int, capture: LayerCapture, own: Float[Tensor, "head query key"]
) -> Bool[Tensor, "head query key"]:
    """Return the keys of a layer that the rules of its heads keep; all of a head without a rule.

    Args:
        own: scores of the pass, which the oracle ranks by.
    """
    n_queries, n_keys = capture.q.shape[1], capture.k.shape[1]
    visible = capture.geometry.sees(distances_of(n_queries, n_keys, capture.q.device))
    seen = torch.ones(len(capture.heads), n_queries, n_keys, dtype=torch.bool, device=capture.q.device)
    for one in rules:
        places = [list(capture.heads).index(head) for head in one.heads]
        is_oracle = one.rule == "oracle"
        ranked = own[places].to(visible.device) if is_oracle else ranks_by(one.rule, capture, places, one.means, seed)
        seen[places] = kept_keys(ranked.detach(), visible, one.budget or n_keys).any(0)
    return seen


def ranks_by(
    rule: Any, capture: LayerCapture, places: Sequence[int], means: Means | None, seed: int
) -> Float[Tensor, "head query key"]:
    """Return the numbers by which a rule, or the drawn one, ranks the keys of each query.

    Args:
        places: of the heads along the axis of the capture.
        means: of these heads.
    """
    q, k, geometry = capture.q[places], capture.k[places], capture.geometry
    heads = torch.tensor([capture.heads[place] for place in places], device=q.device)
    if rule == "drawn":
        return drawn_scores(geometry.layer * geometry.n_heads + heads, q.shape[1], k.shape[1], seed)
    slopes = None if geometry.alibi_slopes is None else geometry.alibi_slopes.to(q.device)[heads]
    held = Means(q[:, 0], k[:, 0], 1) if means is None else means  # which window and sinks do not read
    return rule_scores(rule, q, k, held, geometry.rope, geometry.scale, slopes)
