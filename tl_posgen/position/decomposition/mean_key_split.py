"""How well the mean key's split into position and content, f(q, i - j) + g(q, k), follows a head's scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.errors import InputError
from tl_posgen.position.decomposition.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.pair_moments import QUERIES_AT_ONCE, PairMoments, pair_moments
from tl_posgen.rope.bilinear_sums import Form, products_over_band
from tl_posgen.rope.planes import turning_factors
from tl_posgen.rope.rotation import Rope, complex_planes, real_coordinates, rotate


@dataclass(frozen=True)
class MeanKeyCorrelation:
    """Mean-key correlation: Pearson's r between the scores W and the split f + g; NaN where W is constant.

    Attributes:
        r: over all pairs that count.
        r_within_rows: within rows, which is all that softmax sees.
    """

    r: Float[Tensor, "distance head"]
    r_within_rows: Float[Tensor, "distance head"]


def mean_key_r(
    q: Float[Tensor, "head pos d_head"],
    k: Float[Tensor, "head pos d_head"],
    rope: Rope,
    scale: float,
    distances: Sequence[int | float],
    *,
    window: int | None = None,
    first_token: bool = True,
    rotated: tuple[Float[Tensor, "head pos d_head"], Float[Tensor, "head pos d_head"]] | None = None,
    scores: PairMoments | None = None,
) -> MeanKeyCorrelation:
    r"""f_ij = scale <R_i q_i, R_j kbar>, g_ij = scale <Rbar q_i, k_j - kbar>, Rbar = R_d0; corr(W, f + g).

    W, f and g are bilinear, so their variances and covariances come from sums of products of two of them, without a
    [query, key] matrix:

        cov(W, f + g) = cov(W, f) + cov(W, g),   var(f + g) = var f + 2 cov(f, g) + var g.

    Args:
        q, k: before RoPE.
        distances: dummy distances d0, a row of the result each. kbar is the mean of the keys that count.
        window: a query sees the `window` last keys, itself included.
        first_token: whether token 0 counts, as query, as key and in kbar.
        rotated: q and k after RoPE, where they are known.
        scores: the moments of W over these pairs, where they are known.

    Raises:
        InputError: where no token is left; a distance below 0.

    Source: the estimator with d0 = 1000 is in the public code of the first author of Han & Ji 2025
    (arXiv 2503.13305); this way to compute r is ours.

    Example:
        >>> rope = Rope(torch.zeros(1, dtype=torch.float64))  # a plane that never turns splits exactly
        >>> q, k = torch.randn(2, 1, 9, 2, generator=torch.Generator().manual_seed(0))
        >>> mean_key_r(q, k, rope, 1.0, [0, 1000]).r.round(decimals=5).tolist()
        [[1.0], [1.0]]
    """
    counted = slice(0 if first_token else 1, None)
    positions = torch.arange(q.shape[1], device=q.device)[counted]
    q, k = q[:, counted], k[:, counted]
    if wrong := [distance for distance in distances if not distance >= 0]:
        raise InputError(f"dummy distance {wrong[0]}: distances must be 0 or more")
    if not q.shape[1]:
        raise InputError("no token is left for the mean-key split; give a longer text")
    pairs = CausalPairs(q.shape[1], window)
    dtype = torch.float64 if pairs.width < pairs.size else torch.promote_types(q.dtype, torch.float32)
    q, k = q.to(dtype), k.to(dtype)
    turned_q, turned_k = (
        (x[:, counted].to(dtype) for x in rotated) if rotated else (rotate(x, positions, rope) for x in (q, k))
    )
    kbar = k.mean(1, keepdim=True, dtype=torch.float64).to(dtype)
    turns = turning_factors(torch.tensor(distances, dtype=torch.float64), rope, q.shape[-1])
    turned_mean = rotate(kbar.expand_as(k), positions, rope)
    content, groups = real_coordinates(complex_planes(k - kbar, rope)), max(1, QUERIES_AT_ONCE // q[0].numel())
    parts = zip(
        *(x.split(groups) for x in (complex_planes(q, rope), content, turned_q, turned_k, turned_mean)), strict=True
    )
    with_w, squares = torch.cat([_products(heads, turns, pairs) for heads in parts], -1) * scale**2
    scores = scores or pair_moments(turned_q, turned_k, scale, window=window)
    r, r_within_rows = (
        (cov / (w * square).sqrt()).nan_to_num(0, 0, 0).clamp(-1, 1).masked_fill(scores.is_constant(w), torch.nan)
        for w, cov, square in zip((scores.tss, scores.within_rows), with_w, squares, strict=True)
    )
    return MeanKeyCorrelation(r, r_within_rows)


def _products(
    heads: tuple[Tensor, ...], turns: Tensor, pairs: CausalPairs
) -> Float[Tensor, "with=2 rows=2 distance head"]:
    """Centred sums of products of f + g with W and with itself: over all pairs, and within rows; without the scale."""
    planes, content, turned_q, turned_k, turned_mean = heads
    g = [(real_coordinates(planes * turn), content) for turn in turns.to(planes)]
    which = [(0, 1), (1, 1), *((form, 2 + at) for at in range(len(g)) for form in (0, 1, 2 + at))]
    wf, ff, *rest = centred_products([(turned_q, turned_k), (turned_q, turned_mean), *g], which, pairs)
    wg, fg, gg = (torch.stack(rest[form::3], 1) for form in range(3))
    return torch.stack([wf[:, None] + wg, ff[:, None] + 2 * fg + gg])


def centred_products(
    forms: Sequence[Form], which: Sequence[tuple[int, int]], pairs: CausalPairs
) -> list[Float[Tensor, "rows=2 ..."]]:
    """sum (w_ij - mean) (w'_ij - mean'), over all pairs and within rows, of pairs of scores w_ij = <q_i, k_j>.

    The mean key of all tokens but the first is taken out and put back as what rows add.
    """
    counts = pairs.counts(forms[0][0].device)[1, 0].flip(0)
    keys = {id(k): _Keys.of(k, pairs) for _, k in forms}
    centred = [(q, keys[id(k)].centred) for q, k in forms]
    means, deviations = [], []
    for q, k in forms:
        of = keys[id(k)]
        means.append(torch.einsum("...id,...id->...i", q, of.seen).double() / counts)
        row_means = means[-1] + (q @ of.mean.mT)[..., 0].double()
        deviations.append(row_means - (counts * row_means).sum(-1, keepdim=True) / counts.sum())
    found = []
    for (one, other), products in zip(which, products_over_band(centred, which, pairs.width), strict=True):
        within = products - (counts * means[one] * means[other]).sum(-1)
        found.append(torch.stack([within + (counts * deviations[one] * deviations[other]).sum(-1), within]))
    return found


class _Keys(NamedTuple):
    """Keys about their mean, of all tokens but the first."""

    mean: Float[Tensor, "*#batch 1 d_head"]
    centred: Float[Tensor, "*#batch pos d_head"]
    seen: Float[Tensor, "*#batch pos d_head"]  # the sum of those that a query sees

    @classmethod
    def of(cls, k: Tensor, pairs: CausalPairs) -> "_Keys":
        mean = k[..., min(1, pairs.size - 1) :, :].mean(-2, keepdim=True)
        centred = k - mean
        seen = centred.cumsum(-2)
        seen[..., pairs.width :, :] -= seen[..., : -pairs.width, :].clone()
        return cls(mean, centred, seen)
