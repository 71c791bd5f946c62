"""Hooks by which the heads of a running model see only the keys that a rule keeps."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_posgen.core.options import Count, require
from tl_posgen.errors import InputError
from tl_posgen.hooks.replace_scores import HookList, RowByRow, replace_scores
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.model import Model
from tl_posgen.models.provenance import fingerprint
from tl_posgen.models.selection import Heads, Layers, head_name, select_heads
from tl_posgen.models.session import session_of
from tl_posgen.rules.numbers import RULES, Means, Rule, distances_of, drawn_scores, kept_keys, rule_scores

REFERENCES = ("drawn", "oracle")  # drawn keys, those of most attention
Calibration = Mapping[int, tuple[Sequence[int], Means]]  # layer -> its heads and their means


def apply_rules(
    model: Model, result: Any, rule: str, budget: int | None = None, *, layers: Layers = None, heads: Heads = None
) -> HookList:
    """score_ij <- -inf unless the rule keeps key j for query i; other scores stay.

    A query that sees no more keys than the budget keeps all; its own key and the first ones are ranked as any other.

    Args:
        result: of the measure `rules`, also after `tl_posgen.load`, whose calibration rules are made of.
        rule: one of `tl_posgen.rules.numbers.RULES`, "drawn" for drawn keys, or "oracle" for those of most attention.
        budget: keys that each head keeps; the smallest measured one if left out.
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
        >>> cut = {"length": 12, "n_prompts": 2, "consecutive": True, "null_seeds": (), "progress": False}
        >>> hooks = apply_rules(model, Rules(rules=["window"], budgets=[4])(model, text * 3, **cut), "window")
        >>> tokens = torch.arange(9)[None]
        >>> changed = (model.run_with_hooks(tokens, fwd_hooks=hooks) - model(tokens)).abs().amax((0, 2)) > 1e-3
        >>> changed.tolist()
        [False, False, False, False, True, True, True, True, True]
    """
    if getattr(result, "name", "") != "rules":
        raise InputError(f"apply_rules: {result!r} is no result of the measure rules")
    known = [*RULES, *REFERENCES]
    if rule not in known:
        raise InputError(f"apply_rules: rule = {rule!r}: choose from {', '.join(known)}")
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
    data, calibration = result.own, {}
    for layer in data["layer"].values.tolist():
        both = (
            data[["mean_query", "mean_key"]].sel(layer=layer).dropna("component", how="all").dropna("head", how="all")
        )
        q, k = (torch.from_numpy(both[one].transpose("head", "component").values.copy()) for one in both.data_vars)
        n_distances = int(data["n_distances"].sel(layer=layer))
        calibration[layer] = both["head"].values.tolist(), Means(q, k, n_distances, result.measure.weights)
    chosen = [(layer, head) for layer, (some, _) in calibration.items() for head in some]
    if layers is not None or heads is not None:
        measured = chosen
        chosen = [(layer, head) for layer, some in select_heads(model, layers, heads).items() for head in some]
        if lacking := [one for one in chosen if one not in measured]:
            raise InputError(
                f"apply_rules: {head_name(*lacking[0])} was not measured; choose measured layers and heads"
            )
    budget = int(data["budget"].min()) if budget is None else budget
    return rule_hooks(model, rule, budget, calibration, int(result.provenance.get("seed", 0)), heads=chosen)


def rule_hooks(
    model: Model, rule: str, budget: int, calibration: Calibration, seed: int, *, heads: Heads = None
) -> HookList:
    """Return the hooks of a rule from its calibration.

    Args:
        seed: of drawn keys.
    """

    def keys_seen(capture: LayerCapture, own: Float[Tensor, "head query key"]) -> Bool[Tensor, "head query key"]:
        visible = capture.geometry.sees(distances_of(capture.q.shape[1], capture.k.shape[1], capture.q.device))
        ranked = ranks_by(rule, capture, own.to(visible.device), calibration[capture.layer], seed)
        return kept_keys(ranked.detach(), visible, budget)

    return replace_scores(model, RowByRow(keys_seen, with_own=True), heads=heads)


def ranks_by(
    rule: str,
    capture: LayerCapture,
    own: Float[Tensor, "head query key"],
    calibration: tuple[Sequence[int], Means],
    seed: int,
) -> Float[Tensor, "head query key"]:
    """Return the numbers by which a rule ranks the keys of each query.

    Args:
        own: scores of the pass, by which the oracle ranks.
        calibration: heads of the layer and their means.
    """
    if rule == "oracle":
        return own
    q, k, geometry = capture.q, capture.k, capture.geometry
    heads = torch.tensor(list(capture.heads), device=q.device)
    if rule == "drawn":
        return drawn_scores(geometry.layer * geometry.n_heads + heads, q.shape[1], k.shape[1], seed)
    known, means = calibration
    places = [known.index(head) for head in capture.heads]
    means = Means(means.q[places], means.k[places], means.n_distances, means.weights)
    slopes = None if geometry.alibi_slopes is None else geometry.alibi_slopes.to(q.device)[heads]
    return rule_scores(cast(Rule, rule), q, k, means, geometry.rope, geometry.scale, slopes)
