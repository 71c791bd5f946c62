"""Hooks that replace scores by position + content, or by one of the two."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.core.options import NonNegative, require
from tl_posgen.editing.printed_hooks import HookList, printing_call
from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.editing.score_functions import RowByRow, ScoresOf, finished
from tl_posgen.errors import InputError, check_choice, check_share, check_whole
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.capture.padding import require_places
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Heads, Layers, select_heads
from tl_posgen.models.session import Session, session_of
from tl_posgen.models.tokens import check_ids
from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.numbers.pair_moments import pair_moments_from_scores
from tl_posgen.position.decomposition.numbers.pair_weights_fit import fit_pair_weights
from tl_posgen.position.decomposition.numbers.three_axis_fit import fit_three_axis
from tl_posgen.position.decomposition.three_axis import Weights
from tl_posgen.position.substitution.numbers import (
    ThresholdOf,
    add_residual,
    attention_from_afar,
    below_quantile,
    positional_profile,
    running_mean_key,
)
from tl_posgen.rope.splits import DistanceDistribution, attention_profile, point_mass, split_scores, uniform

_Part = Literal["both", "position", "content"]
_Query = Literal["own", "mean"]
_MeanKey = Literal["prompt", "seen"]
Keys = Sequence[int] | Bool[Tensor, "layer key"]


@printing_call
def substitute(
    model: Model | Session,
    by: ScoresOf,
    *,
    gamma: int | float = 1.0,
    threshold: ThresholdOf | str = "head",
    residual: int | float = 0.0,
    from_layer: int = 0,
    layers: Layers = None,
    heads: Heads = None,
) -> HookList:
    """W_ij <- S_ij + residual (W_ij - S_ij) where W_ij lies at or below the gamma quantile; S = by(capture).

    Args:
        by: the stand-in: `by_split(...)`, `by_three_axis`, `by_constant`, or any function of a `LayerCapture`.
        gamma: a quantile of one prompt's visible scores; 1 replaces all of them.
        threshold: a quantile of each "head", or one per "layer", of the last row of head 0.
        residual: share of the residual W - S that is added back; 0 drops it, 1 changes nothing.
        from_layer: the first layer to change, of those chosen.
        layers, heads: as in `replace_scores`; all if left out.

    Raises:
        InputError: gamma or residual outside [0, 1], a layer or head that does not exist; threshold "layer" without
            head 0.
        UnsupportedModelError: see `replace_scores`.

    Source: the public code of the first author of Han & Ji 2025 (arXiv 2503.13305) for the mean-key split at d0 = 1000
    of scores below the gamma = 0.97 quantile, one threshold per layer, in layers >= 4; a quantile per head, and
    everything else here, is ours.

    Example:
        >>> import torch
        >>> from tl_posgen import load_model
        >>> model, tokens = load_model("mini"), torch.arange(12)[None]
        >>> hooks = substitute(model, by_constant, residual=1.0)
        >>> torch.allclose(model.run_with_hooks(tokens, fwd_hooks=hooks), model(tokens), atol=1e-4)
        True
    """
    if isinstance(by, DistanceDistribution) or any(
        by is profile for profile in (own_profile, query_profile, all_positions)
    ):
        name = getattr(by, "__name__", "this")
        raise InputError(f"substitute: {name} gives distances, and no scores; give by_split({name})")
    if not callable(by):
        raise InputError(
            f"substitute: by={by!r:.60}: give by_split(...), by_three_axis, or a function of a LayerCapture"
        )
    check_share("gamma", gamma)
    check_share("residual", residual)
    check_choice("threshold", threshold, get_args(ThresholdOf))
    chosen = heads_from(model, from_layer, layers, heads)
    without_first = {layer for layer, _ in chosen} - {layer for layer, head in chosen if head == 0}
    if threshold == "layer" and without_first:
        raise InputError(
            f"threshold 'layer' is a quantile of head 0, which is not chosen in layer {min(without_first)}; choose it "
            "too, or threshold='head'"
        )
    scores_of = partial(stand_in, by=by, gamma=gamma, residual=residual, threshold=threshold)
    alone = gamma == 1 and isinstance(by, RowByRow)  # a quantile is one of the whole prompt's scores
    return replace_scores(model, RowByRow(scores_of) if alone else scores_of, heads=chosen)


@printing_call
def authors_split(model: Model | Session, *, layers: Layers = None, heads: Heads = None) -> HookList:
    """W_ij <- f(q_i, i - j) + g(q_i, k_j) of the mean key at d0 = 1000 where W_ij is at most the 0.97 quantile of the
    last row of head 0, in layers from 4 on.

    The substitution of the authors with their settings: `substitute` by `by_split(point_mass(1000))`.

    Args:
        layers, heads: as in `replace_scores`; with them head 0, whose scores give the threshold.

    Raises:
        InputError: no chosen layer from 4 on, a layer without its head 0, or a layer or head that does not exist.
        UnsupportedModelError: see `replace_scores`.

    Source: the public code of the first author of Han & Ji 2025 (arXiv 2503.13305), github.com/Glaciohound/LM-Infinite.
    """
    options = {"gamma": 0.97, "threshold": "layer", "from_layer": 4}
    return substitute(model, by_split(point_mass(1000)), layers=layers, heads=heads, **options)


def heads_from(
    model: Model | Session, from_layer: int, layers: Layers = None, heads: Heads = None
) -> list[tuple[int, int]]:
    """Return (layer, head) of the chosen heads from this layer on; refuse a layer behind which none is left."""
    check_whole("scores replaced", 0, from_layer=from_layer)
    session = session_of(model)
    selected = select_heads(session, layers, heads)
    pairs = [(layer, head) for layer, picked in selected.items() for head in picked if layer >= from_layer]
    if not pairs:
        raise InputError(
            f"from_layer {from_layer} leaves no layer: this model has layers 0 to {session.model.cfg.n_layers - 1}, "
            f"and {', '.join(map(str, selected))} were chosen"
        )
    return pairs


def stand_in(
    capture: LayerCapture,
    by: ScoresOf,
    gamma: int | float = 1.0,
    residual: int | float = 0.0,
    threshold: ThresholdOf | str = "head",
) -> Float[Tensor, "head query key"]:
    """Return the scores that `substitute` puts in the place of a layer's scores."""
    if gamma == 1 and residual == 0:
        return by(capture)
    exact = capture.scores()
    scores = add_residual(by(capture), exact, residual)
    if gamma == 1:
        return scores
    visible = capture.geometry.visible(exact.shape[1], exact.device)
    return torch.where(below_quantile(exact, visible, gamma, threshold), scores, exact)


def by_split(
    distances: DistanceDistribution | Callable[[LayerCapture], DistanceDistribution],
    part: _Part | str = "both",
    mean_key: _MeanKey | str = "prompt",
    query: _Query | str = "own",
) -> ScoresOf:
    """S_ij = f(q_i, i - j) + g(q_i, k_j), f = scale <R_i q_i, R_j kbar>, g = scale <E_p[R_d] q_i, k_j - kbar>.

    A soft cap is applied to the sum; an ALiBi bias counts as position.

    Args:
        distances: p(d) of the content part, its weights one row for all heads or a row per head; or a function of a
            layer's capture. `point_mass(d0)` is the mean-key estimator at dummy distance d0.
        part: "both", or one alone.
        mean_key: kbar over the keys of the "prompt", or over those "seen" by each query. With "seen", a given
            distribution and query="own" it works with a KV cache too.
        query: "own", or "mean": every query is the prompt's mean query, so that S is a(i - j) + c(j).

    Raises:
        InputError: an unknown part, mean_key or query; in the forward pass, a distribution with rows for another number
            of heads, or a function that gives none.

    Source: `k_q_simplify` in the public code of the first author of Han & Ji 2025 for mean query and key with p uniform
    over all positions (`all_positions`); any other p is ours.
    """
    check_choice("part", part, get_args(_Part))
    check_choice("mean_key", mean_key, get_args(_MeanKey))
    check_choice("query", query, get_args(_Query))
    if not callable(distances) and not isinstance(distances, DistanceDistribution):
        raise InputError(f"by_split: {distances!r:.60} is no distribution of distances; give one, such as triangle(8)")

    def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        geometry = capture.geometry
        seen = mean_key == "seen"
        kbar = running_mean_key(capture.k, geometry.window)[:, capture.query_positions] if seen else None
        p = distances(capture) if callable(distances) else distances
        if not isinstance(p, DistanceDistribution):
            raise InputError(f"by_split: the function gave a {type(p).__name__}; let it give a DistanceDistribution")
        if not callable(distances) and p.weights.ndim > 1:  # the rows of the captured heads
            if len(p.weights) != geometry.n_heads:
                raise InputError(
                    f"layer {capture.layer}: the distance distribution has {len(p.weights)} rows for "
                    f"{geometry.n_heads} heads"
                )
            p = DistanceDistribution(p.distances, p.weights[list(capture.heads)])
        q = capture.q if query == "own" else capture.q.mean(1, keepdim=True).expand_as(capture.q)
        split = split_scores(q, capture.k, geometry.rope, geometry.scale, p, kbar)
        if part == "content":
            return finished(split.content, capture, 0)  # every pair at distance 0: no ALiBi
        return finished(split.scores if part == "both" else split.position, capture)

    alone = mean_key == "seen" and query == "own" and not callable(distances)
    return RowByRow(scores_of) if alone else scores_of


def attention_sinks(
    model: Model | Session, tokens: Int[Tensor, " pos"], share: int | float = 0.1
) -> Bool[Tensor, "layer key"]:
    """share_j > share: the keys of one prompt that take more than this share of a layer's attention from afar.

    share_j is the attention that key j gets, mean over the layer's heads and over the queries 16 or more tokens later
    that see it (`attention_from_afar`). In most models it is the first token, in some also one in mid-text.

    Args:
        tokens: token ids of one prompt.
        share: 0 to 1; 1 for no sinks.

    Raises:
        InputError: tokens that are no row of ids, a share outside [0, 1].
        UnsupportedModelError: see `replace_scores`.

    Source: sinks: Xiao et al. 2024 (arXiv 2309.17453); the rule is ours.

    Example:
        >>> from tl_posgen import load_model
        >>> attention_sinks(load_model("mini"), torch.arange(40) + 300).shape
        torch.Size([4, 40])
    """
    check_share("share", share)
    if not isinstance(tokens, Tensor) or tokens.ndim != 1 or tokens.is_floating_point() or not len(tokens):
        raise InputError(f"attention_sinks: {tokens!r:.60} is no prompt; give a tensor [pos] of token ids")
    session = session_of(model)
    check_ids(session, tokens.tolist())
    sinks = torch.zeros(session.model.cfg.n_layers, len(tokens), dtype=torch.bool)

    def find(capture: LayerCapture) -> None:
        visible = capture.geometry.visible(len(tokens), capture.device)
        sinks[capture.layer] = attention_from_afar(capture.pattern_rows(0, len(tokens)), visible) > share

    run_capture(session, tokens[None], find, needs={"pattern"})
    return sinks


def true_at(by: ScoresOf, keys: Keys) -> ScoresOf:
    """S_ij = W_ij for these keys j, the model's own scores; by(capture)_ij for all others.

    Args:
        by: the stand-in for the others, as in `substitute`.
        keys: positions of keys, such as [0], or which they are in every layer of one prompt: `attention_sinks(...)`.

    Raises:
        InputError: keys that are neither.

    Source: ours.

    Example:
        >>> from tl_posgen import load_model
        >>> model, tokens = load_model("mini"), torch.arange(12)[None]
        >>> hooks = substitute(model, true_at(by_constant, range(12)))  # all of them
        >>> torch.allclose(model.run_with_hooks(tokens, fwd_hooks=hooks), model(tokens), atol=1e-4)
        True
    """

    _check_keys(keys)

    def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        chosen = _chosen(keys, capture.layer, capture.length, capture.device)
        return torch.where(chosen, capture.scores(), by(capture)) if chosen.any() else by(capture)

    return RowByRow(scores_of) if isinstance(by, RowByRow) else scores_of


@printing_call
def no_values_at(model: Model | Session, keys: Keys) -> HookList:
    """v_j <- 0 for these keys j: they keep their attention, and add nothing to what a head writes.

    Args:
        keys: as in `true_at`; prompts begin at the first position.

    Raises:
        InputError: keys that are neither positions nor a mask; later, in the forward pass: a single token, as in steps
            with a KV cache.

    Source: ours.

    Example:
        >>> from tl_posgen import load_model
        >>> model, tokens = load_model("mini"), torch.arange(12)[None]
        >>> _, cache = model.run_with_cache(tokens)
        >>> with model.hooks(fwd_hooks=no_values_at(model, [0])):
        ...     _, changed = model.run_with_cache(tokens)
        >>> lost = cache["blocks.0.attn.hook_z"] - changed["blocks.0.attn.hook_z"]
        >>> a, v = (cache[f"blocks.0.attn.hook_{part}"][0] for part in ("pattern", "v"))
        >>> torch.allclose(lost[0, :, 3], a[3, :, :1] * v[0, 1], atol=1e-5)  # head 3 reads the second of two values
        True
    """
    _check_keys(keys)
    session = session_of(model)

    def zero(v: Float[Tensor, "batch pos *value"], hook: object, layer: int) -> Float[Tensor, "batch pos *value"]:
        require_places(layer, v.shape[1])
        gone = _chosen(keys, layer, v.shape[1], v.device)
        return v.masked_fill(gone.view(1, -1, *[1] * (v.ndim - 2)), 0)

    return [
        (session.layer(layer).names["v"], partial(zero, layer=layer)) for layer in select_heads(session, None, None)
    ]


def _chosen(keys: Keys, layer: int, n: int, device: torch.device) -> Bool[Tensor, " n"]:
    """Return which of the first n keys are chosen in this layer."""
    if isinstance(keys, Tensor) and layer >= len(keys):
        raise InputError(f"keys: a mask of {len(keys)} layers has no layer {layer}; give one of this model")
    at = keys[layer].nonzero()[:, 0] if isinstance(keys, Tensor) else torch.tensor(list(keys))
    return torch.isin(torch.arange(n, device=device), at.to(device))


def _check_keys(keys: Any) -> None:
    """Refuse what is neither positions nor a mask of layers and keys."""
    is_mask = isinstance(keys, Tensor) and keys.ndim == 2 and keys.dtype == torch.bool
    is_row = not isinstance(keys, Tensor | str) and isinstance(keys, Sequence)
    if not is_mask and not (is_row and keys and all(type(key) is int and key >= 0 for key in keys)):
        raise InputError(f"keys {keys!r}: give positions such as [0], or a mask [layer, key] of attention_sinks(..)")


def own_profile(capture: LayerCapture) -> DistanceDistribution:
    """p_h(d) = share of head h's attention on the same prompt that goes d tokens back: for `by_split`."""
    return attention_profile(capture.attention(capture.scores()))


def query_profile(capture: LayerCapture) -> DistanceDistribution:
    """p(d | q_i) = softmax_d f(q_i, d), from each query's own position part: for `by_split`."""
    return positional_profile(capture.q, capture.k, capture.geometry.rope, capture.geometry.scale)


def all_positions(capture: LayerCapture) -> DistanceDistribution:
    """p(d) = 1 / n on the n distances of a prompt of n tokens: for `by_split`."""
    return uniform(capture.length)


def near(width: int | float, floor: float = 0.05) -> tuple[float, ...]:
    """w_d = max(width - d, floor): a triangle with a floor, as weights by distance for `by_three_axis`.

    Example:
        >>> near(3)
        (3.0, 2.0, 1.0, 0.05)
    """
    require("width", width, NonNegative)
    require("floor", floor, NonNegative)
    return (*(float(max(width - d, floor)) for d in range(math.ceil(width))), floor)


def by_three_axis(capture: LayerCapture, weights: Weights | None = None) -> Float[Tensor, "head query key"]:
    """S_ij = a_{i-j} + b_i + c_j, the least-squares fit to this prompt's scores, without interaction of query and key.

    Args:
        weights: weights of the pairs in the fit, as in `ThreeAxis`: by distance, such as `near(8)`, or "attention".
    """
    exact, window = capture.scores(), capture.geometry.window
    if isinstance(weights, str):
        fit = fit_pair_weights(exact, capture.attention(double(exact)), CausalPairs(capture.length, window))
    else:
        distance_weights = (1.0,) if weights is None else weights
        fit = fit_three_axis(pair_moments_from_scores(exact, window=window, distance_weights=distance_weights))
    return fit.fitted(capture.positions, capture.positions).nan_to_num().to(exact.dtype)


def by_constant(
    capture: LayerCapture, gamma: int | float = 1.0, threshold: ThresholdOf | str = "head"
) -> Float[Tensor, "head query key"]:
    """S_ij = mean of the head's scores up to its gamma quantile; gamma 1: uniform attention. The control, ours.

    With threshold "layer" it is the mean of head 0's last row, as in the public code of the first author of Han & Ji
    2025.
    """
    exact = capture.scores()
    visible = capture.geometry.visible(exact.shape[1], exact.device)
    if threshold == "layer":
        return exact[0, -1, visible[-1]].mean().expand_as(exact)
    replaced = below_quantile(exact, visible, gamma)
    total = double(exact).masked_fill(~replaced, 0).sum((1, 2), keepdim=True)
    return (total / replaced.sum((1, 2), keepdim=True).clamp(min=1)).to(exact.dtype).expand_as(exact)
