"""The few numbers per head on which a three-axis fit depends: sums along distances, queries, keys, and of squares."""

from dataclasses import dataclass
from typing import NoReturn

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from tl_posgen.errors import InputError
from tl_posgen.maths.band import Band

SHORT = 160  # up to SHORT + 3 d_head tokens (measured) the scores themselves cost less than FFTs and second moments
CHUNK = 64  # tokens whose scores are formed at once, next to a running second moment of everything before them
SLAB = 16  # chunks paired directly with one another
WORKING_SET = 2**18  # elements handled at once: bounds the memory, and keeps the work in the cache
SCORES_AT_ONCE = 2**18  # entries of a block of rows
ROUNDING = 1e-14  # variance below this share of the mean square is float32 rounding: no correlation is defined


@dataclass(frozen=True)
class TriangleMoments:
    r"""Sums of W_ij along each axis of a band, and its sum of squares within rows; float64.

    Attributes:
        band: the pairs that count.
        sums: sums of W over the pairs of each distance, query and key, in the corner coordinates of `Band`.
        within_rows: sum_ij (W_ij - mean of row i)^2. Squares are taken about the row mean because softmax does not see
            that mean, and because nothing then cancels when the scores are large and nearly constant.
        without_first_token: the moments of the same scores with token 0 left out as query and as key; None where
            nothing would be left, or where it is left out already.
    """

    band: Band
    sums: Float[Tensor, "axis=3 head size"]
    within_rows: Float[Tensor, " head"]
    without_first_token: "TriangleMoments | None" = None

    @property
    def mean(self) -> Float[Tensor, " head"]:
        return self.sums[2].sum(-1) / self.band.n_pairs

    @property
    def tss(self) -> Float[Tensor, " head"]:
        """sum_ij (W_ij - mean)^2."""
        counts = self.band.counts(self.sums.device)[1]
        between = counts * (self.sums[1] / counts - self.mean[:, None]).square()
        return self.within_rows + between.sum(-1)

    def is_constant(self, squares: Float[Tensor, " head"]) -> Bool[Tensor, " head"]:
        """Whether a sum of squares of these scores, `tss` or `within_rows`, is no more than rounding leaves."""
        return squares <= ROUNDING * (self.tss + self.band.n_pairs * self.mean.square())


def triangle_moments(
    q: Float[Tensor, "head pos d_head"],
    k: Float[Tensor, "head pos d_head"],
    scale: float = 1.0,
    *,
    window: int | None = None,
    diagonal: bool = True,
) -> TriangleMoments:
    r"""The moments of W_ij = scale <q_i, k_j> from ROTATED q and k; no [query, key] matrix is formed.

        row_i  = <q_i, sum_{j <= i} k_j>                          cumulative sum
        col_j  = <k_j, sum_{i >= j} q_i>                          cumulative sum
        diag_d = sum_i <q_i, k_{i-d}>                             cross-correlation by FFT
        sum W^2 = sum_i q_i' (sum_{j <= i} k_j k_j') q_i          running second moment, in chunks

    O(L d_head^2 + L d_head log L) operations and O(L d_head) memory. Products are formed in the dtype of q and k and
    summed in float64 from chunk to chunk. The mean query and the mean key are taken out first and put back as the
    row and column they add, so that large constant parts cost no digits.

    Args:
        q, k: queries and keys after RoPE.
        scale: the attention scale.
        window: a query sees the `window` last keys, itself included.
        diagonal: whether a query paired with its own key counts.

    Raises:
        InputError: where a score would not be finite, or no pair is left.

    Source: the four moments suffice because the design matrix of the fit depends on the mask alone [ours].

    Example:
        >>> q, k = torch.ones(1, 3, 2), torch.ones(1, 3, 2)
        >>> moments = triangle_moments(q, k)
        >>> distance, query, key = moments.band.spread(moments.sums)
        >>> query.tolist(), moments.tss.tolist()
        ([[2.0, 4.0, 6.0]], [0.0])
    """
    band = Band(q.shape[1], window, diagonal=diagonal)
    groups = max(1, WORKING_SET // q[0].numel())
    parts = [
        _moments_of_heads(q_group, k_group, scale, band)
        for q_group, k_group in zip(q.split(groups), k.split(groups), strict=True)
    ]
    moments = parts[0] if len(parts) == 1 else _join_heads(parts)
    if not moments.sums.isfinite().all():
        _refuse(~torch.stack([q, k]).isfinite().all(-1).all(0), "q or k", "mend the model, or leave this head out")
    return moments


def triangle_moments_from_scores(
    scores: Float[Tensor, "head query key"], *, window: int | None = None, diagonal: bool = True
) -> TriangleMoments:
    r"""The same moments from the scores themselves, in one pass over blocks of rows: for scores that are not bilinear
    in q and k (soft cap, ALiBi, edited by a hook), and for short texts.

    Entries that the mask hides (j > i, or i - j >= window) are not read, whatever they hold.

    Raises:
        InputError: where an entry that the mask shows is not finite.

    Example:
        >>> scores = torch.tensor([[[1.0, -torch.inf], [2.0, 4.0]]])
        >>> triangle_moments_from_scores(scores).within_rows.tolist()
        [2.0]
    """
    band = Band(scores.shape[1], window, diagonal=diagonal)
    if not diagonal:
        scores = scores[:, 1:, :-1]
    first_key = scores[:, :, 0].double()
    rest = _core_from_scores(scores[:, 1:, 1:], _without_first(band)) if band.size > 1 else None
    moments = _with_first_key(rest, first_key, band)
    if not moments.sums.isfinite().all():
        _refuse(~band.spread(moments.sums)[1].isfinite(), "a visible score", "give the layer's window, or mend the scores")
    return moments


def _moments_of_heads(q: Tensor, k: Tensor, scale: float, band: Band) -> TriangleMoments:
    """W_ij = <q_i - mean q, k_j - mean k> + <mean q, k_j - mean k> + <q_i, mean k>: scores, key part, query part."""
    windowed = band.width < band.size  # then the band is the difference of two triangles, and digits are lost
    dtype = torch.float64 if windowed else torch.promote_types(torch.promote_types(q.dtype, k.dtype), torch.float32)
    q, k = q.to(dtype), k.to(dtype)
    if not band.diagonal:
        q, k = q[:, 1:], k[:, :-1]
    others = slice(min(1, band.size - 1), None)  # the means of the others: token 0 is often far from them
    mean_q, mean_k = scale * q[:, others].mean(1, keepdim=True), k[:, others].mean(1, keepdim=True)
    q, k = (scale * q).sub_(mean_q), k - mean_k
    query_part = ((q @ mean_k.mT) + mean_q @ mean_k.mT).squeeze(-1).double()
    key_part = (k @ mean_q.mT).squeeze(-1).double()
    first_key = (q @ k[:, 0, :, None]).squeeze(-1) + query_part + key_part[:, :1]
    rest = None
    if band.size > 1:
        rest = _core(q[:, 1:], k[:, 1:], query_part[:, 1:], key_part[:, 1:], _without_first(band))
    return _with_first_key(rest, first_key, band)


def _without_first(band: Band) -> Band:
    return Band(band.n_tokens, band.window, first_token=False, diagonal=band.diagonal)


def _core(q: Tensor, k: Tensor, query_part: Tensor, key_part: Tensor, band: Band) -> TriangleMoments:
    """Moments of W_ij = <q_i, k_j> + query_part_i + key_part_j over the band."""
    counts = band.counts(q.device)
    short = band.size <= SHORT + 3 * q.shape[-1]
    distance, query, key, squares = (_short_sums if short else _long_sums)(q, k, band.width)
    sums = torch.stack([distance, query.flip(-1), key])
    none = torch.zeros_like(key_part)
    sums += band.normal(torch.stack([none, none, key_part]), counts)
    squares = squares + (key_part * (2 * key + counts[2] * key_part)).sum(-1)
    within_rows = (squares - (sums[1].square() / counts[1]).sum(-1)).clamp(min=0)
    return TriangleMoments(
        band, sums + band.normal(torch.stack([none, query_part.flip(-1), none]), counts), within_rows
    )


def _short_sums(q: Tensor, k: Tensor, width: int) -> tuple[Tensor, ...]:
    """Sums of <q_i, k_j> over the band by distance, query and key, and of its square, from all the scores."""
    scores = (q @ k.mT).tril_().triu_(1 - width)
    sums = _sums_along_diagonals(scores), scores.sum(-1), scores.sum(-2), scores.square_().sum((-2, -1))
    return tuple(x.double() for x in sums)


def _long_sums(q: Tensor, k: Tensor, width: int) -> tuple[Tensor, ...]:
    """The same without the scores: a window's band is the triangle, less the triangle beyond the window."""
    query, key, squares = _sums_over_triangle(q, k)
    n = q.shape[1]
    if width < n:
        query_beyond, key_beyond, squares_beyond = _sums_over_triangle(q[:, width:], k[:, : n - width])
        query[:, width:] -= query_beyond
        key[:, : n - width] -= key_beyond
        squares = squares - squares_beyond
    return _distance_sums(q, k, width), query, key, squares


def _sums_over_triangle(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inside a chunk of tokens from its scores; between chunks from sums and second moments of q and of k."""
    heads, n, _ = q.shape
    n_chunks = -(-n // CHUNK)
    q, k = (pad(x, (0, 0, 0, n_chunks * CHUNK - n)).unflatten(1, (n_chunks, CHUNK)) for x in (q, k))
    inside = (q @ k.mT).tril_()
    keys_before = _exclusive_cumsum(k.sum(2)).to(k.dtype)
    queries_after = _exclusive_cumsum(q.sum(2).flip(1)).flip(1).to(q.dtype)
    query = inside.sum(-1) + (q @ keys_before[..., None]).squeeze(-1)
    key = inside.sum(-2) + (k @ queries_after[..., None]).squeeze(-1)
    squares = inside.square_().sum((-2, -1)).sum(-1, dtype=torch.float64) + _squares_between_chunks(q, k)
    return query.reshape(heads, -1)[:, :n].double(), key.reshape(heads, -1)[:, :n].double(), squares


def _exclusive_cumsum(x: Float[Tensor, "head chunk d_head"]) -> Float[Tensor, "head chunk d_head"]:
    """The sum over earlier chunks, in float64."""
    return pad(x[:, :-1].cumsum(1, dtype=torch.float64), (0, 0, 1, 0))


def _squares_between_chunks(q: Tensor, k: Tensor) -> Float[Tensor, " head"]:
    """sum of <second moment of the queries of a chunk, that of the keys of an earlier one> over all such pairs.

    Inside a slab of chunks pair by pair, before it from one running second moment: fewer bytes than a running one per
    chunk.
    """
    squares = torch.zeros(len(q), dtype=torch.float64, device=q.device)
    before = torch.zeros(len(q), q.shape[-1] ** 2, dtype=torch.float64, device=q.device)
    for q_slab, k_slab in zip(q.split(SLAB, 1), k.split(SLAB, 1), strict=True):
        q_moments, k_moments = ((x.mT @ x).flatten(2) for x in (q_slab, k_slab))
        squares += (k_moments @ q_moments.mT).triu_(1).sum((1, 2), dtype=torch.float64)
        squares += (before * q_moments.sum(1)).sum(1)
        before += k_moments.sum(1)
    return squares


def _distance_sums(q: Tensor, k: Tensor, width: int) -> Tensor:
    """sum_i <q_i, k_{i-d}> for d < width; 0 from there on. A few coordinates at a time bound the memory."""
    heads, n, _ = q.shape
    length = _fft_length(n + width - 1)
    spectrum = torch.zeros(heads, length // 2 + 1, dtype=torch.complex128, device=q.device)
    group = max(1, WORKING_SET // (heads * length))
    for q_part, k_part in zip(q.mT.split(group, 1), k.mT.split(group, 1), strict=True):
        spectrum += torch.linalg.vecdot(torch.fft.rfft(k_part, length), torch.fft.rfft(q_part, length), dim=1)
    sums = torch.fft.irfft(spectrum, length)[:, :n]
    sums[:, width:] = 0
    return sums


def _fft_length(at_least: int) -> int:
    """The least even 2^a, 3 * 2^a or 5 * 2^a that is large enough: lengths the FFT is fast at."""
    return min(odd << max(1, (-(-at_least // odd) - 1).bit_length()) for odd in (1, 3, 5))


def _core_from_scores(scores: Tensor, band: Band) -> TriangleMoments:
    n, width = band.size, band.width
    sums = torch.zeros(3, len(scores), n, dtype=torch.float64, device=scores.device)
    within_rows = sums.new_zeros(len(scores))
    index = torch.arange(n, device=scores.device)
    step = max(1, SCORES_AT_ONCE // (len(scores) * n))
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        keys = slice(max(0, start - width + 1), rows.stop)
        distance = index[rows, None] - index[keys]
        hidden = (distance < 0) | (distance >= width)
        block = scores[:, rows, keys].double().masked_fill(hidden, 0)
        row_sums = block.sum(-1)
        sums[0, :, : rows.stop - keys.start] += _sums_along_diagonals(block)[:, : rows.stop - keys.start]
        sums[1, :, rows] = row_sums
        sums[2, :, keys] += block.sum(-2)
        means = row_sums / (~hidden).sum(-1)
        within_rows += (block - means[..., None]).masked_fill_(hidden, 0).square_().sum((-2, -1))
    sums[1] = sums[1].flip(-1)
    return TriangleMoments(band, sums, within_rows)


def _sums_along_diagonals(block: Tensor) -> Tensor:
    """Entry d sums the pairs at distance d, for a [head, row, key] block whose last row and last key are one token.

    Read with a stride of one row and one entry, the rows slide past each other until equal distances stand in columns.
    """
    heads, rows, keys = block.shape
    wide = pad(block, (rows - 1, 0))
    return wide.as_strided((heads, rows, keys), (wide.stride(0), wide.stride(1) + 1, 1)).sum(1).flip(-1)


def _with_first_key(rest: TriangleMoments | None, first_key: Tensor, band: Band) -> TriangleMoments:
    """Add the scores of key 0, [head, query], to the moments of all the other keys."""
    n, seen = band.size, min(band.width, band.size)
    first_key = first_key.masked_fill(torch.arange(n, device=first_key.device) >= seen, 0)
    key_sum = first_key.sum(-1, keepdim=True)
    if rest is None:
        return TriangleMoments(band, first_key.expand(3, -1, -1).clone(), torch.zeros_like(key_sum[:, 0]))
    others = rest.band.counts(first_key.device)[1].flip(-1)[:, : seen - 1]  # keys that rows 1 .. seen - 1 have besides
    others_mean = rest.sums[1].flip(-1)[:, : seen - 1] / others
    gained = others / (others + 1) * (first_key[:, 1:seen] - others_mean).square()
    sums = torch.stack(
        [
            pad(rest.sums[0], (0, 1)) + first_key,
            pad(rest.sums[1], (0, 1)) + first_key.flip(-1),
            torch.cat([key_sum, rest.sums[2]], -1),
        ]
    )
    return TriangleMoments(band, sums, rest.within_rows + gained.sum(-1), without_first_token=rest)


def _refuse(bad: Bool[Tensor, "head pos"], what: str, remedy: str) -> NoReturn:
    head, pos = bad.nonzero()[0].tolist() if bad.any() else ("?", "?")
    raise InputError(f"{what} of head {head} at token {pos} is not finite; {remedy}")


def _join_heads(parts: list[TriangleMoments]) -> TriangleMoments:
    rests = [part.without_first_token for part in parts if part.without_first_token is not None]
    return TriangleMoments(
        parts[0].band,
        torch.cat([part.sums for part in parts], 1),
        torch.cat([part.within_rows for part in parts]),
        _join_heads(rests) if rests else None,
    )
