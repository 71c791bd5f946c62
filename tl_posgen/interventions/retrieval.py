"""Retrieval of key blocks, in InfLLM's manner: what the two windows hide comes back where it seems to matter."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_posgen.errors import InputError
from tl_posgen.interventions.dummy_distance import check_distance, seen_at
from tl_posgen.interventions.lm_infinite import lambda_shape
from tl_posgen.interventions.scores import HookList, replace_scores
from tl_posgen.maths.dummy_distance import scores_at
from tl_posgen.models.backend import Model
from tl_posgen.models.capture import LayerCapture


def retrieve_blocks(
    model: Model,
    n_local: int,
    n_global: int = 10,
    *,
    block: int = 16,
    n_blocks: int = 4,
    limit: int | float | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> HookList:
    """`lm_infinite`, and each query also attends the n_blocks hidden blocks of keys that score highest for it.

    A block is `block` consecutive tokens that lie wholly before the query's local window; its score is
    max_j scale <R_limit q_i, k_j> over its keys, everything at one fixed distance. Keys of retrieved blocks are seen
    at that distance too.

    Args:
        n_local, n_global, limit: as in `lm_infinite`.
        block: tokens per block. n_blocks: how many are retrieved by each query of each head.

    Raises:
        InputError: block or n_blocks below 1, and as `lm_infinite`.

    Source: after Xiao et al. 2024, "InfLLM" (arXiv 2402.04617), which keeps a few representative tokens a block and
    retrieves for a chunk of queries at a time; the maximum over all keys, per query, is ours.
    """
    if n_local < 1 or n_global < 0 or block < 1 or n_blocks < 1:
        raise InputError(
            f"retrieve_blocks: n_local {n_local}, block {block} and n_blocks {n_blocks} must be at least 1, "
            f"n_global {n_global} at least 0"
        )
    limit = n_local if limit is None else limit
    check_distance(model, "limit", limit)

    def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        attended = lambda_shape(capture, n_local, n_global) | retrieved(capture, n_local, block, n_blocks, limit)
        return seen_at(capture, None, limit).masked_fill(~attended, -torch.inf)

    return replace_scores(model, scores_of, layers, heads, needs_positions=True)


def retrieved(
    capture: LayerCapture, n_local: int, block: int, n_blocks: int, limit: int | float
) -> Bool[Tensor, "head query key"]:
    """Which keys each query gets back."""
    n, geometry = capture.q.shape[1], capture.geometry
    n_whole = n // block
    scores = scores_at(capture.q, capture.k, geometry.rope, geometry.scale, limit)[..., : n_whole * block]
    best = scores.unflatten(-1, (n_whole, block)).amax(-1)
    last_key = block * torch.arange(1, n_whole + 1, device=best.device) - 1
    hidden = capture.positions[:, None] - last_key >= n_local
    top = best.masked_fill(~hidden, -torch.inf).topk(min(n_blocks, n_whole), dim=-1)
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter(-1, top.indices, top.values != -torch.inf)
    of_key = chosen.repeat_interleave(block, dim=-1)
    return torch.nn.functional.pad(of_key, (0, n - n_whole * block))
