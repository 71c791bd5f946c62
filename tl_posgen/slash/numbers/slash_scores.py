"""Slash scores: the mean attention of each head at every distance."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double, elements_at_once, row_ranges
from tl_posgen.errors import InputError
from tl_posgen.rope.rotation import at_least_float32

SHORT_DISTANCES = range(5)
SHORT_KAPPA = 0.1
LONG = 50
LONG_KAPPA = 0.01
ROWS = 64  # rows of one block: small, as an R x R corner of it is copied
BLOCK = 2**20  # entries of one block over all its heads: keeps temporaries at a few MiB


def long_distances(n: int) -> range:
    """D = 50 .. n / 2: the long distances of a prompt of n tokens, for `LONG_KAPPA` [ours]."""
    return range(LONG, n // 2 + 1)


@dataclass(frozen=True)
class SlashStatistics:
    """SlashScore(D) = 1/(N-D) sum_{i=D}^{N-1} S_{i,i-D} of a causal pattern S, and further statistics of the same pass.

    Along `tokens`: all, and without the first token. Then its column is removed and each row renormalised [ours]; a
    query with no key left attends nowhere, and the prompt is one token shorter, without the first one's row: NaN at its
    last distance.

    Attributes:
        score: SlashScore at every distance, in [0, 1]. The paper's positions begin at 1, its sum at i = D+1.
        uniform: SlashScore of uniform attention over the visible keys.
        attention_distance: mean over queries of sum_j S_ij (i-j), in tokens.
        entropy: mean over queries of -sum_j S_ij log S_ij, in nats.
        first_token: mean over all queries, the first itself too, of the attention paid to the first token.

    Source: the slash score is Cheng et al. 2026 (arXiv 2601.08297); the rest is ours.
    """

    score: Float[Tensor, "tokens=2 head distance"]
    uniform: Float[Tensor, "tokens=2 distance"]
    attention_distance: Float[Tensor, "tokens=2 head"]
    entropy: Float[Tensor, "tokens=2 head"]
    first_token: Float[Tensor, " head"]


def slash_statistics(
    pattern: Float[Tensor, "head query key"], *, window: int | None = None, entropy: bool = True
) -> SlashStatistics:
    r"""SlashScore(D) = 1/(N-D) sum_{i>=D} S_{i,i-D} for all D at once, from a post-softmax causal pattern.

    Args:
        window: number of keys that a query sees, itself included, in a sliding-window layer (for `uniform` only).
        entropy: False leaves the entropies NaN and saves their logarithms, which take most of the time.

    Example:
        >>> previous_token = torch.eye(4).roll(-1, dims=1)
        >>> previous_token[0] = torch.tensor([1.0, 0, 0, 0])
        >>> slash_statistics(previous_token[None]).score[0].tolist()
        [[0.25, 1.0, 0.0, 0.0]]
    """
    n = pattern.shape[-1]
    if pattern.shape[-2] != n:
        raise InputError(f"pattern of {pattern.shape[-2]} queries by {n} keys: slash scores need all queries and keys")
    if pattern[:, 0, 1:].any():
        raise InputError("the first query attends to later keys: slash scores are defined for causal attention only")

    def rows_of(heads: slice, start: int, stop: int) -> Tensor:
        return at_least_float32(pattern[heads, start:stop, :stop])

    return slash_statistics_of_rows(rows_of, len(pattern), n, window, entropy, pattern.device)


def slash_statistics_of_rows(
    rows_of: Callable[[slice, int, int], Tensor],
    n_heads: int,
    n: int,
    window: int | None,
    entropy: bool,
    device: torch.device,
) -> SlashStatistics:
    """Return `slash_statistics` of S given by its rows: rows_of(heads, start, stop) = S[heads, start:stop, :stop].

    Each block of rows is read once, through a strided view in which a diagonal is a column; no second N x N is made.
    Sums are taken in the dtype of the rows within a block and in float64 over the blocks.
    """
    sums = torch.zeros(2, n_heads, n, dtype=DOUBLE, device=device)
    entropies = torch.full((2, n_heads, n), torch.nan, dtype=DOUBLE, device=device)
    first = torch.zeros(n_heads, dtype=DOUBLE, device=device)
    groups = row_ranges(n_heads, ROWS * n, elements_at_once(device, BLOCK))
    for group, (start, stop) in product(groups, list(row_ranges(n, 1, ROWS))):
        heads = slice(*group)
        rows = rows_of(heads, start, stop)  # see only keys below `stop`
        rest, tiny = rows[..., 1:].sum(-1), torch.finfo(rows.dtype).tiny
        weights = torch.stack([torch.ones_like(rest), torch.where(rest > tiny, 1 / rest, 0.0)])
        sums[:, heads, :stop] += double(_sums_by_distance(rows, weights))
        first[heads] += double(rows[..., 0]).sum(-1)
        if entropy:
            # of p / rest over j >= 1: (H + p_0 log p_0) / rest + log rest
            terms = rows.clamp_min(tiny).log_().mul_(rows)
            without_first = torch.where(rest > tiny, -terms[..., 1:].sum(-1) / rest + rest.clamp_min(tiny).log(), 0.0)
            entropies[:, heads, start:stop] = double(torch.stack([-terms.sum(-1), without_first]))
    distance = torch.arange(n, dtype=DOUBLE, device=device)
    n_queries = torch.stack([n - distance, n - 1 - distance])  # of each distance, the last one without the first: none
    uniform = torch.full((2, n), torch.nan, dtype=DOUBLE)
    for left_out in range(2):
        uniform[left_out, : n - left_out] = uniform_scores(n - left_out, window)
    return SlashStatistics(
        score=sums / n_queries[:, None],
        uniform=uniform.to(device),
        attention_distance=sums @ distance / n_queries[:, :1],
        entropy=torch.stack([entropies[left_out, :, left_out:].mean(-1) for left_out in range(2)]),
        first_token=first / n,
    )


def _sums_by_distance(
    rows: Float[Tensor, "head row key"], weights: Float[Tensor, "variant head row"]
) -> Float[Tensor, "variant head key"]:
    """sum_t weights_t rows[t, i - D] with i = K - R + t: the last R rows of a K x K pattern, summed by distance D.

    The first variant's weights apply to all keys, the second's to all but the first token. With a row stride larger by
    one, the block's diagonals become columns; this needs no copy for D < K - R. Only the R x R corner of the first keys
    is copied, because there a row of the view would begin before its row of the block.
    """
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    n_heads, n_rows, n_keys = rows.shape
    start = n_keys - n_rows
    near = rows.as_strided(
        (n_heads, n_rows, start), (rows.stride(0), rows.stride(1) + 1, 1), rows.storage_offset() + (start > 0)
    )
    corner = torch.nn.functional.pad(rows[..., 1:n_rows].tril(-1), (n_rows + 1, 0))
    far = corner.as_strided((n_heads, n_rows, n_rows), (corner.stride(0), corner.stride(1) + 1, 1), 1)
    by_head = weights.transpose(0, 1)
    sums = torch.cat([(by_head @ near).flip(-1), (by_head @ far).flip(-1)], dim=-1).transpose(0, 1)
    sums[0, :, start:] += weights[0] * rows[..., 0]
    return sums


def uniform_scores(n: int, window: int | None = None) -> Float[Tensor, " distance"]:
    r"""1/(N-D) sum_{i>=D} 1/(i+1) = (H_N - H_D) / (N-D): the slash scores of uniform causal attention.

    In a sliding window 1 / min(i+1, window) in the place of 1/(i+1), and 0 at D >= window.

    Example:
        >>> uniform_scores(2).tolist()
        [0.75, 0.5]
    """
    attention = 1 / torch.arange(1, n + 1, dtype=DOUBLE).clamp(max=n if window is None else window)
    distance = torch.arange(n)
    mean = attention.flip(0).cumsum(0).flip(0) / (n - distance)
    return mean if window is None else mean.where(distance < window, 0.0)
