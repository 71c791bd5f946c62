"""Pair moments of a head's scores, which determine its three-axis fit: sums by distance, query and key, and squares."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NoReturn

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from tl_posgen.arithmetic import DOUBLE, double, elements_at_once, query_ranges
from tl_posgen.errors import InputError
from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs
from tl_posgen.rope.bilinear_sums import along_diagonals, sums_along_diagonals, weighted_sums_over_band

QUERIES_AT_ONCE = 2**18  # elements of q in a group of heads: fits the cache
_ROUNDING = 1e-14  # variance below this share of the mean square is float32 rounding: no correlation is defined


@dataclass(frozen=True)
class PairMoments:
    r"""Pair moments of W: its sums over the pairs of each axis, and its sum of squares within rows; float64.

    If the pairs have weights by distance, every sum and mean here is weighted.

    Attributes:
        pairs: the pairs that count, and their weights.
        sums: sums of W over the pairs of each distance, query and key, in the corner coordinates of `CausalPairs`.
        within_rows: sum_ij w_{i-j} (W_ij - mean of row i)^2. Squares are about the row mean because it does not affect
            softmax, and to avoid cancellation where scores are large and nearly constant.
        without_first_token: the moments of the same scores with token 0 left out as query and as key; None if no pair
            would be left, or if token 0 is left out already.
    """

    pairs: CausalPairs
    sums: Float[Tensor, "axis=3 head size"]
    within_rows: Float[Tensor, " head"]
    without_first_token: "PairMoments | None" = None

    @classmethod
    def joined(cls, moments: Sequence["PairMoments"]) -> "PairMoments":
        """Return the moments of all heads of several layers, over the same pairs."""
        if len(moments) == 1:
            return moments[0]
        without_first = [m.without_first_token for m in moments if m.without_first_token is not None]
        sums, within = torch.cat([m.sums for m in moments], 1), torch.cat([m.within_rows for m in moments])
        return cls(moments[0].pairs, sums, within, cls.joined(without_first) if without_first else None)

    @property
    def n_heads(self) -> int:
        return len(self.within_rows)

    @cached_property
    def mean(self) -> Float[Tensor, " head"]:
        return self.sums[2].sum(-1) / self.pairs.total

    @cached_property
    def squares(self) -> Float[Tensor, "rows=2 head"]:
        """sum_ij w_{i-j} (W_ij - mean)^2 about the mean of all pairs, and about that of each row."""
        counts = self.pairs.counts(self.sums.device)[1]
        between = counts * (self.sums[1] / counts - self.mean[:, None]).square()
        return torch.stack([self.within_rows + between.sum(-1), self.within_rows])

    @property
    def tss(self) -> Float[Tensor, " head"]:
        """sum_ij w_{i-j} (W_ij - mean)^2."""
        return self.squares[0]

    @cached_property
    def is_constant(self) -> Bool[Tensor, "rows=2 head"]:
        """Whether `squares` are only rounding error."""
        return self.squares <= rounding_of(self.tss, self.pairs.total, self.mean)


def rounding_of(tss: Tensor, total: float | Tensor, mean: Tensor) -> Tensor:
    """Return the sum of squares about the mean that float32 rounding makes, or numbers below its smallest, of scores
    with these moments and total weight."""
    return _ROUNDING * (tss + total * mean.square()) + total * torch.finfo(torch.float32).tiny ** 2


def pair_moments(
    q: Float[Tensor, "head pos d_head"],
    k: Float[Tensor, "head pos d_head"],
    scale: float = 1.0,
    *,
    window: int | None = None,
    distance_weights: Sequence[int | float] = (1.0,),
    finite: bool = False,
) -> PairMoments:
    r"""Return the moments of W_ij = scale <q_i, k_j> from ROTATED q and k; no [query, key] matrix is formed.

        row_i  = <q_i, sum_{j <= i} k_j>                          cumulative sum
        col_j  = <k_j, sum_{i >= j} q_i>                          cumulative sum
        diag_d = sum_i <q_i, k_{i-d}>                             cross-correlation by FFT
        sum W^2 = sum_i q_i' (sum_{j <= i} k_j k_j') q_i          running second moment, in chunks

    O(L d_head^2 + L d_head log L) operations and O(L d_head) memory. The mean query and the mean key are subtracted
    first and added back as parts of each row and column, so that large constant parts cost no digits.

    With `distance_weights` that are constant from distance p on, scores at distances below p are formed too, in blocks
    of rows in float64: O(L p d_head) further operations.

    Args:
        q, k: queries and keys after RoPE.
        window, distance_weights: as in `CausalPairs`.
        finite: whether every score is known to be a finite number, so that none is looked at.

    Raises:
        InputError: a score is not finite, no pair is left, or a weight is not above 0.

    Source: ours. The four moments suffice because the design matrix of the fit depends on the mask alone.

    Example:
        >>> moments = pair_moments(torch.ones(1, 3, 2), torch.ones(1, 3, 2))
        >>> distance, query, key = moments.pairs.spread(moments.sums)
        >>> query.tolist(), moments.tss.tolist()
        ([[2.0, 4.0, 6.0]], [0.0])
    """
    pairs = CausalPairs(q.shape[1], window, distance_weights=tuple(map(float, distance_weights)))
    at_once = max(1, elements_at_once(q.device, QUERIES_AT_ONCE) // q[0].numel())
    groups = [_of_heads(*qk, scale, pairs) for qk in zip(q.split(at_once), k.split(at_once), strict=True)]
    first_key, *other_keys = (torch.cat(x, -2) for x in zip(*groups, strict=True)) if len(groups) > 1 else groups[0]
    moments = _with_first_key(other_keys, first_key, pairs)
    if not finite and not moments.sums.isfinite().all():
        bad = ~(q.isfinite() & k.isfinite()).all(-1)
        remedy = "look for NaN in the model's weights, or for an overflow; leave this head out"
        _refuse(bad if bad.any() else _not_finite(moments), "q or k", remedy)
    return moments


def pair_moments_from_scores(scores: Float[Tensor, "head query key"], **pairs: Any) -> PairMoments:
    """Return the pair moments of given scores, with the options of `pair_moments_from_rows`."""
    return pair_moments_from_rows(lambda start, stop: scores[:, start:stop, :stop], scores.shape[1], **pairs)


def pair_moments_from_rows(
    rows: Callable[[int, int], Float[Tensor, "head row key"]],
    n_tokens: int,
    *,
    window: int | None = None,
    distance_weights: Sequence[int | float] = (1.0,),
) -> PairMoments:
    """Return the pair moments of scores that need not be bilinear in q and k (soft cap, ALiBi, edited by a hook).

    Args:
        rows: (start, stop) -> the scores of queries start .. stop - 1 and keys before `stop`, asked for once each.
            Entries outside the mask (j > i, or i - j >= window) are not read.

    Raises:
        InputError: a visible score is not finite.
    """
    pairs = CausalPairs(n_tokens, window, distance_weights=tuple(map(float, distance_weights)))
    first_row = rows(0, 1)
    n_heads, n, device = len(first_row), pairs.size, first_row.device
    first_key = torch.zeros(n_heads, n, dtype=DOUBLE, device=device)
    sums, within = first_key.new_zeros(3, n_heads, n - 1), first_key.new_zeros(n_heads, 1)
    width, by_distance = min(pairs.width, max(n - 1, 1)), pairs.weights(device)
    for start, stop in query_ranges(n_heads, n, device):
        block = rows(start, stop)
        first_key[:, start:stop] = block[..., 0]
        if stop == 1:
            continue
        # the rows of the other keys, of which key 1 is the first; those that a window leaves out are not read
        block, start, stop = block[:, 1 if start == 0 else 0 :, 1:], max(start - 1, 0), stop - 1
        keys = slice(max(0, start - width + 1), stop)
        block = causal_rows(double(block[..., keys]), width)
        weights = causal_rows(along_diagonals(by_distance[None, : stop - keys.start], block.shape[1]), width)
        weighted = block if pairs.unweighted else weights * block
        row_sums = weighted.sum(-1)
        sums[0, :, : stop - keys.start] += sums_along_diagonals(weighted)
        sums[1, :, n - 1 - stop : n - 1 - start] = row_sums.flip(-1)
        sums[2, :, keys] += weighted.sum(-2)
        about_mean = block - (row_sums / weights.sum(-1))[..., None]
        within += about_mean.square_().mul_(weights).sum((-2, -1))[:, None]
    moments = _with_first_key([sums, within] if n > 1 else [], first_key, pairs)
    if not moments.sums.isfinite().all():
        _refuse(_not_finite(moments), "a visible score", "give the layer's window, or mend the scores")
    return moments


def causal_rows(block: Float[Tensor, "head row key"], width: int) -> Float[Tensor, "head row key"]:
    """Return a block whose last row and last key are one token, with 0 where j > i or i - j >= width."""
    start = block.shape[2] - block.shape[1]
    seen = block.tril(start)
    return seen if width > start + block.shape[1] else seen.triu_(start - width + 1)


def _of_heads(q: Tensor, k: Tensor, scale: float, pairs: CausalPairs) -> list[Tensor]:
    """Return scores of key 0 [head, query]; and of the other keys the sums, and the squares within rows [head, 1].

    W_ij = <q_i - mean q, k_j - mean k> + <mean q, k_j - mean k> + <q_i, mean k>: scores, key part, query part.
    """
    parted = pairs.width < pairs.size or not pairs.unweighted  # sums of parts lose digits
    dtype = DOUBLE if parted else torch.promote_types(torch.promote_types(q.dtype, k.dtype), torch.float32)
    q, k = q.to(dtype), k.to(dtype)
    after_first = slice(min(1, pairs.size - 1), None)  # token 0 is often far from the mean of the others
    mean_q, mean_k = scale * q[:, after_first].mean(1, keepdim=True), k[:, after_first].mean(1, keepdim=True)
    q, k = torch.add(-mean_q, q, alpha=scale), k - mean_k
    query_part, first_key = double(q @ torch.cat([mean_k, k[:, :1]], 1).mT).unbind(-1)
    query_part = query_part + double((mean_q @ mean_k.mT)[..., 0])
    key_part = double((k @ mean_q.mT)[..., 0])
    first_key = first_key + query_part + key_part[:, :1]
    if pairs.size == 1:
        return [first_key]
    later_pairs = replace(pairs, first_token=False)
    q, k, query_part, key_part = (x[:, 1:] for x in (q, k, query_part, key_part))
    counts = later_pairs.counts(q.device)
    distance, query, key, squares = weighted_sums_over_band(q, k, later_pairs.own_weights, later_pairs.width)
    squares = squares + (key_part * torch.add(counts[2] * key_part, key, alpha=2)).sum(-1)
    by_row = (query + later_pairs.over_band(key_part)).flip(-1)  # a query part adds nothing within rows
    within = (squares - (by_row.square() / counts[1]).sum(-1)).clamp(min=0)
    parts = torch.stack([torch.zeros_like(key_part), query_part.flip(-1), key_part])
    sums = torch.stack([distance, query.flip(-1), key]) + later_pairs.normal(parts, counts)
    return [first_key, sums, within[:, None]]


def _with_first_key(other_keys: Sequence[Tensor], first_key: Tensor, pairs: CausalPairs) -> PairMoments:
    """Return the moments of all keys, of the scores of key 0 [head, query], and the sums and squares of the others."""
    n, seen, weights = pairs.size, min(pairs.width, pairs.size), pairs.weights(first_key.device)
    if seen < n:
        first_key = first_key.masked_fill(torch.arange(n, device=first_key.device) >= seen, 0)
    weighted = first_key if pairs.unweighted else weights * first_key
    sums = torch.stack([weighted, weighted.flip(-1), pad(weighted.sum(-1, keepdim=True), (0, n - 1))])
    if not other_keys:
        return PairMoments(pairs, sums, sums.new_zeros(len(first_key)))
    without = PairMoments(replace(pairs, first_token=False), other_keys[0], other_keys[1][:, 0])
    sums[:2, :, :-1] += without.sums[:2]
    sums[2, :, 1:] += without.sums[2]
    at_rows, gained = _first_key_tables(pairs, first_key.device)
    others_mean = without.sums[1].flip(-1)[:, : seen - 1] / at_rows
    within = without.within_rows + ((first_key[:, 1:seen] - others_mean).square() * gained).sum(-1)
    return PairMoments(pairs, sums, within, without_first_token=without)


@lru_cache(maxsize=32)
@torch.inference_mode(False)
def _first_key_tables(pairs: CausalPairs, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return, of the rows that see token 0 and others, N the weight of the others; and what the square of score 0 less
    their mean adds to the squares within the row, w N / (w + N)."""
    seen = min(pairs.width, pairs.size)
    at_rows = replace(pairs, first_token=False).counts()[1].flip(-1)[:, : seen - 1]
    w = pairs.weights("cpu")[1:seen]
    return at_rows.to(device), (w * at_rows / (at_rows + w)).to(device)


def _not_finite(moments: PairMoments) -> Bool[Tensor, "head query"]:
    return ~moments.pairs.spread(moments.sums, fill=0)[1].isfinite()


def _refuse(bad: Bool[Tensor, "head pos"], what: str, remedy: str) -> NoReturn:
    head, pos = bad.nonzero()[0].tolist()
    raise InputError(f"{what} of head {head} is not finite at token {pos}; {remedy}")
