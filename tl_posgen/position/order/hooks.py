"""Hooks that perturb positions: of queries and keys, of keys alone, of single pairs, and of the position part alone."""

from functools import partial

import torch
from jaxtyping import Float, Int, Real
from torch import Tensor

from tl_posgen.core.options import require
from tl_posgen.errors import InputError
from tl_posgen.hooks.replace_scores import HookList, ScoresOf, at_positions, finished, replace_scores
from tl_posgen.models.layers.capture import LayerCapture, scores_from
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Heads, Layers
from tl_posgen.position.decomposition.numbers.option_checks import is_real_tensor
from tl_posgen.position.distance.hooks import scores_at_distance
from tl_posgen.rope.rotation import rotate
from tl_posgen.rope.scores_at import scores_at_positions


def permute_positions(
    model: Model,
    positions: Real[Tensor, " pos"],
    *,
    keys_only: bool = False,
    layers: Layers = None,
    heads: Heads = None,
) -> HookList:
    """P: score_ij <- scale <R_{p_i} q_i, R_{p_j} k_j>; tokens, causal mask and targets are unchanged.

    Args:
        positions: p, one per token: usually a permutation of 0 .. n - 1, see `swap_tokens`.
        keys_only: queries keep their own positions.

    Only prompts of exactly this length can be run. Ours: the paper's definition of the perturbation is not known.

    Raises:
        InputError: in the forward pass, for prompts of another length.
        UnsupportedModelError: see `replace_scores`; also learned absolute positions, which are not in the scores.

    Example:
        >>> import torch
        >>> from tl_posgen import load_model
        >>> model, tokens = load_model("mini"), torch.arange(12)[None]
        >>> shifted = permute_positions(model, torch.arange(12) + 100)  # only distances count
        >>> torch.allclose(model.run_with_hooks(tokens, fwd_hooks=shifted), model(tokens), atol=1e-4)
        True
    """
    require("keys_only", keys_only, bool)

    def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        return at_positions(capture, capture.positions if keys_only else positions, positions)

    return _of_one_length(model, positions, scores_of, layers, heads)


def rotate_keys(
    model: Model, positions: Real[Tensor, " pos"], *, layers: Layers = None, heads: Heads = None
) -> HookList:
    """F: R_j k_j <- R_{p_j - j} R_j k_j, the rotated key of token j as if its feature came from position p_j.

    On rotary models this equals `permute_positions(..., keys_only=True)`. ALiBi, which is not a feature of a key, keeps
    the true distances.
    """

    def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        rope = capture.geometry.rope
        turned = rotate(capture.rotated_k, positions.to(capture.k.device) - capture.positions, rope)
        if rope.rotary_dim and rope.scaling != 1:
            # the rotated keys already have YaRN's factor
            turned = torch.cat([turned[..., : rope.rotary_dim] / rope.scaling, turned[..., rope.rotary_dim :]], -1)
        return scores_from(capture.rotated_q, turned, capture.geometry, capture.heads)

    return _of_one_length(model, positions, scores_of, layers, heads)


def jitter_distances(
    model: Model, distances: Int[Tensor, "query key"], *, layers: Layers = None, heads: Heads = None
) -> HookList:
    """F, per pair: score_ij <- the score at distances_ij = i - j + u_ij, see `jittered_distances`."""
    scores_of = partial(scores_at_distance, distance=distances, beyond=None)
    return _of_one_length(model, distances, scores_of, layers, heads, n_axes=2)


def permute_position_part(
    model: Model, positions: Real[Tensor, " pos"], *, layers: Layers = None, heads: Heads = None
) -> HookList:
    """F': W_ij <- W_ij + f(q_i, i - p_j) - f(q_i, i - j), with f(q_i, d) = scale <R_d q_i, R_0 kbar>.

    Only the position part has key j at p_j; the content part and the residual are unchanged. kbar is the mean key of
    the prompt, so no distance distribution enters. Soft caps and ALiBi are applied afterwards, at the true distances.
    """

    def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        q, k, geometry, here = capture.q, capture.k, capture.geometry, capture.positions
        mean, there = k.mean(1, keepdim=True).expand_as(k), positions.to(q.device)
        # <q_i, k_j> at the true distance, and kbar moved from j to p_j
        moved = scores_at_positions(q, mean, geometry.rope, geometry.scale, here, there)
        stayed = scores_at_positions(q, k - mean, geometry.rope, geometry.scale, here, here)
        return finished(moved + stayed, capture)

    return _of_one_length(model, positions, scores_of, layers, heads)


def _of_one_length(
    model: Model, given: Tensor, scores_of: ScoresOf, layers: Layers, heads: Heads, n_axes: int = 1
) -> HookList:
    """Return `replace_scores` for prompts of the length of the given positions or distances."""
    if not is_real_tensor(given, n_axes):
        what = (
            "positions: give a tensor of real numbers, one a token" if n_axes == 1 else "distances: give [query, key]"
        )
        raise InputError(f"{what}, not {list(given.shape) if isinstance(given, Tensor) else repr(given)}")

    def checked(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        n = capture.q.shape[1]
        if any(size != n for size in given.shape):
            raise InputError(f"positions or distances {list(given.shape)} were given, and this prompt has {n} tokens")
        return scores_of(capture)

    return replace_scores(model, checked, layers, heads, needs_positions=True)
