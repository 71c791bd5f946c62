"""Perturbed positions: of queries and keys, of keys alone, of single pairs, and of the position part alone."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int, Real
from torch import Tensor

from tl_posgen.errors import InputError
from tl_posgen.interventions.scores import HookList, at_positions, finished, replace_scores
from tl_posgen.maths.dummy_distance import scores_at, scores_at_positions
from tl_posgen.maths.rope import rotate
from tl_posgen.models.backend import Model
from tl_posgen.models.capture import LayerCapture, scores_from


def positions_permuted(
    model: Model,
    positions: Real[Tensor, " pos"],
    *,
    keys_only: bool = False,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> HookList:
    """Arm P: score_ij <- scale <R_{p_i} q_i, R_{p_j} k_j>, the tokens, the causal mask and the targets as they were.

    Args:
        positions: p, one a token: usually a permutation of 0 .. n - 1, see `maths.swaps.swap_tokens`.
        keys_only: queries keep their own positions.

    Only prompts of exactly as many tokens can be run. Ours: the paper's definition of the perturbation is not known.

    Raises:
        InputError: in the forward pass, for prompts of another length.
        UnsupportedModelError: see `replace_scores`; also learned absolute positions, which are not in the scores.

    Example:
        >>> import torch
        >>> from tl_posgen import load_model
        >>> model, tokens = load_model("mini"), torch.arange(12)[None]
        >>> shifted = positions_permuted(model, torch.arange(12) + 100)  # only distances count
        >>> torch.allclose(model.run_with_hooks(tokens, fwd_hooks=shifted), model(tokens), atol=1e-4)
        True
    """

    def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        require_length(capture, positions)
        return at_positions(capture, capture.positions if keys_only else positions, positions)

    return replace_scores(model, scores_of, layers, heads, needs_positions=True)


def keys_turned(
    model: Model,
    positions: Real[Tensor, " pos"],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> HookList:
    """Arm F: the rotated key of token j is turned on by R_{p_j - j}, as if its feature came from position p_j.

    On rotary models this is `positions_permuted(..., keys_only=True)` reached from the other side. ALiBi, which is no
    feature of a key, stays with the true distances.
    """

    def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        require_length(capture, positions)
        rope = capture.geometry.rope
        further = positions.to(capture.k.device) - capture.positions
        turned = rotate(capture.rotated_k, further, rope)
        if rope.rotary_dim and rope.scaling != 1:
            # YaRN's factor on rotated keys was in there already
            turned = torch.cat([turned[..., : rope.rotary_dim] / rope.scaling, turned[..., rope.rotary_dim :]], -1)
        return scores_from(capture.rotated_q, turned, capture.geometry, capture.heads)

    return replace_scores(model, scores_of, layers, heads, needs_positions=True)


def distances_jittered(
    model: Model,
    distances: Int[Tensor, "query key"],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> HookList:
    """Arm F, per pair: score_ij <- the score at distances_ij = i - j + u_ij, see `maths.swaps.jittered_distances`."""

    def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        require_length(capture, distances)
        matrix = distances.to(capture.q.device)
        geometry = capture.geometry
        return finished(scores_at(capture.q, capture.k, geometry.rope, geometry.scale, matrix), capture, matrix)

    return replace_scores(model, scores_of, layers, heads, needs_positions=True)


def position_part_permuted(
    model: Model,
    positions: Real[Tensor, " pos"],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> HookList:
    """Arm F': W_ij <- W_ij + f(q_i, i - p_j) - f(q_i, i - j), with f(q_i, d) = scale <R_d q_i, R_0 kbar>.

    The position part alone sees key j at p_j; the meaning part and the residual are untouched. kbar is the mean key of
    the prompt, so no distance law enters. Soft caps and ALiBi are applied afterwards, at the true distances.
    """

    def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        require_length(capture, positions)
        q, k, geometry, here = capture.q, capture.k, capture.geometry, capture.positions
        mean = k.mean(1, keepdim=True).expand_as(k)
        there = positions.to(q.device)
        # <q_i, k_j> at the true distance, and kbar moved from j to p_j
        moved = scores_at_positions(q, mean, geometry.rope, geometry.scale, here, there)
        stayed = scores_at_positions(q, k - mean, geometry.rope, geometry.scale, here, here)
        return finished(moved + stayed, capture)

    return replace_scores(model, scores_of, layers, heads, needs_positions=True)


def require_length(capture: LayerCapture, given: Tensor) -> None:
    """The perturbation was made for prompts of one length."""
    n = capture.q.shape[1]
    if any(size != n for size in given.shape):
        raise InputError(f"positions or distances {list(given.shape)} were given, and this prompt has {n} tokens")
