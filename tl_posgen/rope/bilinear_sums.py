"""Sums of <q_i, k_j> over a causal band, by distance, by query and by key, without the [query, key] matrix."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from tl_posgen.arithmetic import COMPLEX_DOUBLE, DOUBLE, double, elements_at_once

SHORT = 160  # up to SHORT + 3 d_head tokens (measured) the scores themselves cost less than FFTs and second moments
CHUNK = 64  # tokens whose scores are formed among themselves
SLAB = 16  # chunks whose second moments are paired one by one
WORKING_SET = 2**17  # elements transformed at once: fits the cache

Sums = tuple[
    Float[Tensor, "head distance"], Float[Tensor, "head query"], Float[Tensor, "head key"], Float[Tensor, " head"]
]

Form = tuple[Float[Tensor, "*#batch pos d_head"], Float[Tensor, "*#batch pos d_head"]]


def sums_over_band(q: Float[Tensor, "head pos d_head"], k: Float[Tensor, "head pos d_head"], width: int) -> Sums:
    r"""Return sums of w_ij = <q_i, k_j> over 0 <= i - j < width: by distance, by query, by key, and of w_ij^2.

    Products are formed in the dtype of q and k, and chunks of tokens are added up in float64. Give float64 inputs if
    width < pos: the band is then the difference of two triangles, which cancels digits. Sums by distance are 0 at
    distances >= width.

    Example:
        >>> q = k = torch.ones(1, 3, 1)
        >>> [x.tolist() for x in sums_over_band(q, k, width=3)]
        [[[3.0, 2.0, 1.0]], [[1.0, 2.0, 3.0]], [[3.0, 2.0, 1.0]], [6.0]]
    """
    heads, n, _ = q.shape
    if n <= SHORT + 3 * q.shape[2]:
        scores = (q @ k.mT).tril_().triu_(1 - width)
        distance, query, key = sums_along_diagonals(scores), scores.sum(-1), scores.sum(-2)
        return double(distance), double(query), double(key), double(scores.square_().sum((-2, -1)))

    query, key, squares = _sums_over_triangle(q, k)
    if width < n:
        query_beyond, key_beyond, squares_beyond = _sums_over_triangle(q[:, width:], k[:, : n - width])
        query[:, width:] -= query_beyond
        key[:, : n - width] -= key_beyond
        squares = squares - squares_beyond
    length = fft_length(n + width - 1)
    spectrum = torch.zeros(heads, length // 2 + 1, dtype=COMPLEX_DOUBLE, device=q.device)
    group = max(1, elements_at_once(q.device, WORKING_SET) // (heads * length))
    for q_part, k_part in zip(q.mT.split(group, 1), k.mT.split(group, 1), strict=True):  # a few coordinates at a time
        spectrum += torch.linalg.vecdot(torch.fft.rfft(k_part, length), torch.fft.rfft(q_part, length), dim=1)
    distance = torch.fft.irfft(spectrum)[:, :n]
    if width < n:
        distance[:, width:] = 0
    return distance, query, key, squares


def weighted_sums_over_band(
    q: Float[Tensor, "head pos d_head"], k: Float[Tensor, "head pos d_head"], weights: Sequence[float], width: int
) -> Sums:
    r"""Return sums of v_{i-j} w_ij and of v_{i-j} w_ij^2, as `sums_over_band` does, with weights v by distance.

    v_d = weights[d]; the last weight holds for every larger distance. Scores are formed, in blocks of rows, only for
    the distances that have a weight of their own; the rest is one weight times the sums over the band.
    """
    *near, far = weights
    sums = sums_over_band(q, k, width)
    if not near and far == 1:
        return sums
    distance, query, key, squares = (far * x for x in sums)
    (heads, n, _), reach = q.shape, min(len(near), q.shape[1])
    excess, index = torch.tensor(near, dtype=DOUBLE, device=q.device) - far, torch.arange(n, device=q.device)
    step = max(CHUNK, min(reach, elements_at_once(q.device, WORKING_SET) // (heads * max(reach, 1))))
    for start in range(0, n, step) if near else ():
        rows = slice(start, min(start + step, n))
        keys = slice(max(0, start - reach + 1), rows.stop)
        apart = index[rows, None] - index[keys]
        counted = torch.where((apart >= 0) & (apart < reach), excess[apart.clamp(0, reach - 1)], 0)
        scores = double(q[:, rows] @ k[:, keys].mT)
        weighted = counted * scores
        along = sums_along_diagonals(weighted)[:, :reach]
        distance[:, : along.shape[1]] += along
        query[:, rows] += weighted.sum(-1)
        key[:, keys] += weighted.sum(-2)
        squares += weighted.mul_(scores).sum((-2, -1))
    return distance, query, key, squares


def products_over_band(
    forms: Sequence[Form], index_pairs: Sequence[tuple[int, int]], width: int
) -> list[Float[Tensor, "..."]]:
    r"""sum w_ij w'_ij over 0 <= i - j < width for pairs of scores w_ij = <q_i, k_j>; leading axes broadcast.

    `forms` are (q, k) of each w, `index_pairs` pairs of indices into these. Scores and second moments are computed once
    per tensor object, so reuse the same tensors across forms. Give float64 inputs if width < pos, as in
    `sums_over_band`.
    """
    queries, keys = ({id(tensor): tensor for tensor in side} for side in zip(*forms, strict=True))
    named = [(id(q), id(k)) for q, k in forms]
    n, d_head = forms[0][0].shape[-2:]
    chunk = n if n <= SHORT + 3 * d_head else CHUNK
    products = _products_over_triangle(queries, keys, named, index_pairs, chunk)
    if width < n:
        late = {name: x[..., width:, :] for name, x in queries.items()}
        early = {name: x[..., : n - width, :] for name, x in keys.items()}
        beyond = _products_over_triangle(late, early, named, index_pairs, chunk)
        products = [total - outside for total, outside in zip(products, beyond, strict=True)]
    return products


def _sums_over_triangle(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums by query, by key and of squares over j <= i: from the scores inside a chunk of tokens, from sums and
    second moments between chunks."""
    heads, n, _ = q.shape
    q, k = _in_chunks(q, CHUNK), _in_chunks(k, CHUNK)
    inside = (q @ k.mT).tril_()
    sums = torch.stack([k.sum(2), q.sum(2).flip(1)])  # of the chunks before, and behind
    keys_before, queries_after = pad(sums[:, :, :-1].cumsum(2, dtype=DOUBLE), (0, 0, 1, 0)).to(k.dtype)
    query = inside.sum(-1) + (q @ keys_before[..., None]).squeeze(-1)
    key = inside.sum(-2) + (k @ queries_after.flip(1)[..., None]).squeeze(-1)
    squares = inside.square_().sum((-2, -1)).sum(-1, dtype=DOUBLE)
    squares += _products_between_chunks({0: q}, {0: k}, [(0, 0)], [(0, 0)])[0]
    return double(query.reshape(heads, -1)[:, :n]), double(key.reshape(heads, -1)[:, :n]), squares


def _in_chunks(x: Float[Tensor, "... pos d_head"], chunk: int) -> Float[Tensor, "... n_chunks chunk d_head"]:
    """Split the tokens into chunks; the last chunk is filled up with zeros."""
    return pad(x, (0, 0, 0, -x.shape[-2] % chunk)).unflatten(-2, (-1, chunk))


def _products_over_triangle(
    queries: Mapping[int, Tensor],
    keys: Mapping[int, Tensor],
    forms: Sequence[tuple[int, int]],
    index_pairs: Sequence[tuple[int, int]],
    chunk: int,
) -> list[Tensor]:
    """sum w_ij w'_ij over j <= i: inside a chunk from the scores, between chunks from second moments."""
    queries, keys = ({name: _in_chunks(x, chunk) for name, x in side.items()} for side in (queries, keys))
    products = _products_between_chunks(queries, keys, forms, index_pairs)
    scores = [(queries[q] @ keys[k].mT).tril_() for q, k in forms]
    for number, (first, second) in enumerate(index_pairs):
        inside = torch.einsum("...ij,...ij->...", scores[first], scores[second])
        products[number] = products[number] + inside.sum(-1, dtype=DOUBLE)
    return products


def _products_between_chunks(
    queries: Mapping[int, Tensor],
    keys: Mapping[int, Tensor],
    forms: Sequence[tuple[int, int]],
    index_pairs: Sequence[tuple[int, int]],
) -> list[Tensor]:
    """sum of <moment q q'^T of a chunk, moment k k'^T of an earlier one> over all such pairs of chunks.

    Chunks are grouped into slabs. Inside a slab the moments are multiplied pair by pair; all earlier slabs enter as one
    running moment. That moves fewer bytes than a running moment per chunk.
    """
    pairs = [(forms[first], forms[second]) for first, second in index_pairs]
    q_pairs, k_pairs = ([(first[side], second[side]) for first, second in pairs] for side in (0, 1))
    products = [torch.zeros((), dtype=DOUBLE, device=next(iter(queries.values())).device)] * len(index_pairs)
    before: dict[tuple[int, int], Tensor | float] = dict.fromkeys(k_pairs, 0.0)
    q_slabs, k_slabs = (
        [dict(zip(side, part, strict=True)) for part in zip(*(x.split(SLAB, -3) for x in side.values()), strict=True)]
        for side in (queries, keys)
    )
    for q_slab, k_slab in zip(q_slabs, k_slabs, strict=True):
        q_moments, k_moments = (
            {(a, b): (slab[a].mT @ slab[b]).flatten(-2) for a, b in dict.fromkeys(name_pairs)}
            for slab, name_pairs in ((q_slab, q_pairs), (k_slab, k_pairs))
        )
        for number, (q_pair, k_pair) in enumerate(zip(q_pairs, k_pairs, strict=True)):
            q_moment, k_moment = q_moments[q_pair], k_moments[k_pair]
            inside = (k_moment @ q_moment.mT).triu_(1).sum((-2, -1), dtype=DOUBLE)
            products[number] = products[number] + inside + (before[k_pair] * q_moment.sum(-2)).sum(-1)
        before = {pair: before[pair] + double(moment.sum(-2)) for pair, moment in k_moments.items()}
    return products


def sums_along_diagonals(block: Float[Tensor, "head row key"]) -> Float[Tensor, "head distance"]:
    """Return the sum of a block of scores over the pairs at each distance d = 0 .. n_keys - 1.

    The block's last row and last key belong to the same token. Reading the padded block with a stride of one row and
    one entry shifts each row by one against the row before, so that equal distances fall into one column.

    Example:
        >>> sums_along_diagonals(torch.tensor([[[1.0, 0.0], [2.0, 4.0]]])).tolist()
        [[5.0, 2.0]]
    """
    heads, rows, keys = block.shape
    wide = pad(block, (rows - 1, 0))
    return wide.as_strided((heads, rows, keys), (wide.stride(0), wide.stride(1) + 1, 1)).sum(1).flip(-1)


def along_diagonals(values: Float[Tensor, "head distance"], rows: int) -> Float[Tensor, "head row key"]:
    """Return the last rows of the Toeplitz matrix with values_d at distance d; entries with j > i are meaningless.

    Example:
        >>> along_diagonals(torch.tensor([[5.0, 2.0, 1.0]]), rows=2).tril(1).tolist()
        [[[2.0, 5.0, 0.0], [1.0, 2.0, 5.0]]]
    """
    return pad(values.flip(-1), (0, rows - 1)).unfold(-1, values.shape[-1], 1).flip(1)


def fft_length(at_least: int) -> int:
    """Return the least even 2^a, 3 * 2^a or 5 * 2^a that is large enough: the FFT is fast at such lengths."""
    return min(odd << max(1, (-(-at_least // odd) - 1).bit_length()) for odd in (1, 3, 5))
