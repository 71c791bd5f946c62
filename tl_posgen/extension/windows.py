"""Hooks for prompts beyond the training length: distances, windows and blocks limited to those of training.

Each query is edited by itself, so a model can generate under these hooks with a KV cache.
"""

from numbers import Real
from typing import cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.editing.printed_hooks import HookList, printing_call
from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.editing.score_functions import FrozenBeyond, RowByRow, at_positions
from tl_posgen.errors import InputError, check_whole, is_non_negative
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Heads, Layers
from tl_posgen.models.session import Session, session_of
from tl_posgen.rope.scores_at import scores_at

MOST = 10**9  # tokens; wider than its prompt a window changes nothing, and torch counts to 2^63


@printing_call
def interpolate_positions(
    model: Model | Session, factor: int | float, *, layers: Layers = None, heads: Heads = None
) -> HookList:
    """score_ij <- the score with token p at position factor * p; factor = training length / length of the prompt.

    Raises:
        InputError: a factor outside (0, 1].
        UnsupportedModelError: see `replace_scores`; also learned absolute positions.

    Source: Chen et al. 2023 (arXiv 2306.15595), who also fine-tune afterwards; this hook does not.

    Example:
        >>> import torch
        >>> from tl_posgen import load_model
        >>> model, tokens = load_model("mini"), torch.arange(12)[None]
        >>> same = model.run_with_hooks(tokens, fwd_hooks=interpolate_positions(model, 1.0))
        >>> torch.allclose(same, model(tokens), atol=1e-4)
        True
    """
    if not is_non_negative(factor) or not 0 < factor <= 1:
        raise InputError(f"interpolation factor {factor!r} is outside (0, 1]; it is training length / prompt length")

    def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        at = (factor * double(positions) for positions in (capture.query_positions, capture.positions))
        return at_positions(capture, *at)

    return replace_scores(model, RowByRow(scores_of), layers, heads, needs_positions=True)


@printing_call
def lm_infinite(
    model: Model | Session,
    n_local: int,
    n_global: int = 10,
    *,
    limit: int | float | None = None,
    layers: Layers = None,
    heads: Heads = None,
) -> HookList:
    """score_ij <- score at distance min(i - j, limit) if j < n_global or i - j < n_local, else -inf.

    Beyond the limit the query is rotated to position `limit` and the key to 0. Prompts of up to n_local tokens (and
    limit >= n_local - 1) do not change.

    Args:
        n_local: number of last keys that a query sees, usually the training length; of shorter prompts, all.
        n_global: number of first tokens that every query sees.
        limit: largest distance; n_local if left out.

    Raises:
        InputError: n_local below 1, a negative n_global or limit, widths over 10^9.
        UnsupportedModelError: see `replace_scores`; also learned absolute positions.

    Source: Han et al. 2023, "LM-Infinite" (arXiv 2308.16137).

    Example:
        >>> import torch
        >>> from tl_posgen import load_model
        >>> model, tokens = load_model("mini"), torch.arange(12)[None]
        >>> same = model.run_with_hooks(tokens, fwd_hooks=lm_infinite(model, n_local=12))
        >>> torch.allclose(same, model(tokens), atol=1e-4)
        True
    """
    return _windowed("lm_infinite", model, n_local, n_global, limit, layers, heads)


@printing_call
def retrieve_blocks(
    model: Model | Session,
    n_local: int,
    n_global: int = 10,
    *,
    block: int = 16,
    n_blocks: int = 4,
    limit: int | float | None = None,
    layers: Layers = None,
    heads: Heads = None,
) -> HookList:
    """Return `lm_infinite`'s hooks where each query also attends the n_blocks hidden blocks with its highest scores.

    A block is `block` consecutive tokens that lie wholly before the query's local window; its score is
    max_j scale <R_limit q_i, k_j> over its keys, all at one fixed distance. Keys of retrieved blocks are scored at that
    distance too.

    Args:
        n_local, n_global, limit: as in `lm_infinite`.
        block: tokens per block.
        n_blocks: number of blocks that each query of each head retrieves.

    Raises:
        InputError: block or n_blocks below 1, and as `lm_infinite`.

    Source: after Xiao et al. 2024, "InfLLM" (arXiv 2402.04617), which keeps a few representative tokens per block and
    retrieves for a chunk of queries at a time; the maximum over all keys, per query, is ours.
    """
    check_whole("retrieve_blocks", 1, block=block, n_blocks=n_blocks)
    return _windowed("retrieve_blocks", model, n_local, n_global, limit, layers, heads, block, n_blocks)


@printing_call
def self_extend(
    model: Model | Session, n_local: int, group: int, *, layers: Layers = None, heads: Heads = None
) -> HookList:
    """score_ij <- the score at distance floor(i / g) - floor(j / g) + n_local - floor(n_local / g) if i - j >= n_local.

    Far tokens share a position with their neighbours, and near ones keep theirs; a context of L tokens then reaches
    over (L - n_local) g + n_local. Prompts of up to n_local tokens do not change.

    Args:
        n_local: number of last keys that a query sees at their own distance.
        group: g, how many tokens share a position.

    Raises:
        InputError: n_local or group below 1.
        UnsupportedModelError: see `replace_scores`; also learned absolute positions.

    Source: Jin et al. 2024, "Self-Extend" (arXiv 2401.01325).

    Example:
        >>> import torch
        >>> from tl_posgen import load_model
        >>> model, tokens = load_model("mini"), torch.arange(12)[None]
        >>> same = model.run_with_hooks(tokens, fwd_hooks=self_extend(model, n_local=12, group=4))
        >>> torch.allclose(same, model(tokens), atol=1e-4)
        True
    """
    check_whole("self_extend", 1, n_local=n_local, group=group)

    def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        queries, keys = capture.query_positions, capture.positions
        grouped = at_positions(capture, queries // group + n_local - n_local // group, keys // group)
        return torch.where(queries[:, None] - keys < n_local, capture.scores(), grouped)

    return replace_scores(model, RowByRow(scores_of), layers, heads, needs_positions=True)


def _windowed(
    name: str,
    model: Model | Session,
    n_local: int,
    n_global: int,
    limit: int | float | None,
    layers: Layers,
    heads: Heads,
    block: int = 1,
    n_blocks: int = 0,
) -> HookList:
    """Return hooks with the two windows of `lm_infinite` and the retrieved blocks behind them."""
    check_whole(name, 1, n_local=n_local)
    check_whole(name, 0, n_global=n_global)
    furthest = n_local if limit is None else limit
    widths = {"n_local": n_local, "n_global": n_global, "limit": furthest, "block": block, "n_blocks": n_blocks}
    if wide := [option for option, width in widths.items() if isinstance(width, Real) and cast(float, width) > MOST]:
        raise InputError(f"{name}: {wide[0]}={widths[wide[0]]!r}: no prompt is so long; give {MOST:,} at most")
    session = session_of(model)
    session.require_distance("limit", furthest)

    def in_windows(query: Tensor, key: Tensor) -> Bool[Tensor, "query key"]:
        return (key < n_global) | (query - key < n_local)

    def with_blocks(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        key, query, geometry = capture.positions, capture.query_positions[:, None], capture.geometry
        n = capture.length // block  # the best of the blocks that lie wholly before the window
        scores = scores_at(capture.q, capture.k, geometry.rope, geometry.scale, furthest)[..., : n * block]
        best = scores.unflatten(-1, (n, block)).amax(-1)
        last_key = key[block - 1 :: block]
        top = best.masked_fill(query - last_key < n_local, -torch.inf).topk(min(n_blocks, n), dim=-1)
        chosen = torch.zeros_like(best, dtype=torch.bool).scatter(-1, top.indices, top.values != -torch.inf)
        retrieved = torch.nn.functional.pad(chosen.repeat_interleave(block, dim=-1), (0, capture.length - n * block))
        return FrozenBeyond(limit_of)(capture).masked_fill(~(in_windows(query, key) | retrieved), -torch.inf)

    def limit_of(_: LayerGeometry) -> int | float:
        return furthest

    scores_of = with_blocks if n_blocks else FrozenBeyond(limit_of, in_windows)
    return replace_scores(session, RowByRow(scores_of), layers, heads, needs_positions=True)
