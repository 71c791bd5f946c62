"""How well the mean key's split into position and content, f(q, i - j) + g(q, k), follows a head's scores."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.errors import InputError
from tl_posgen.position.decomposition.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.pair_moments import QUERIES_AT_ONCE, PairMoments, pair_moments
from tl_posgen.rope.bilinear_sums import products_over_band
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
    if not first_token:
        q, k = q[:, 1:], k[:, 1:]
    if wrong := [distance for distance in distances if not distance >= 0]:
        raise InputError(f"dummy distance {wrong[0]}: distances must be 0 or more")
    if not q.shape[1]:
        raise InputError("no token is left for the mean-key split; give a longer text")
    pairs = CausalPairs(q.shape[1], window)
    dtype = torch.float64 if pairs.width < pairs.size else torch.promote_types(q.dtype, torch.float32)
    q, k, positions = q.to(dtype), k.to(dtype), torch.arange(q.shape[1], device=q.device)
    kbar = k.mean(1, keepdim=True, dtype=torch.float64).to(dtype)
    turns = turning_factors(torch.tensor(distances, dtype=torch.float64), rope, q.shape[-1])
    turned_q, turned_k, turned_mean = (rotate(x, positions, rope) for x in (q, k, kbar.expand_as(k)))
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
    g = _Bilinear.of(torch.stack([real_coordinates(planes * turn) for turn in turns.to(planes)]), content, pairs)
    w_and_f = _Bilinear.of(turned_q, torch.stack([turned_k, turned_mean])[:, None], pairs)
    f = _Bilinear.of(turned_q, turned_mean, pairs)
    (with_f, with_g), g_with_g = (w_and_f.products(one).transpose(0, 1) for one in (f, g)), g.products(g)
    return torch.stack([with_f[0] + with_g[0], with_f[1] + 2 * with_g[1] + g_with_g])


@dataclass(frozen=True)
class _Bilinear:
    """Scores <q_i, k_j> + something that is constant in each row, whose row means are known, over pairs."""

    q: Float[Tensor, "*#batch pos d_head"]
    k: Float[Tensor, "*#batch pos d_head"]
    means: Float[Tensor, "*#batch pos"]  # of <q_i, k_j>
    row_means: Float[Tensor, "*#batch pos"]  # of the scores
    pairs: CausalPairs

    @classmethod
    def of(cls, q: Tensor, k: Tensor, pairs: CausalPairs) -> "_Bilinear":
        """<q_i, k_j>, with the mean key, of all tokens but the first, taken out and put back as what rows add."""
        mean = k[..., min(1, pairs.size - 1) :, :].mean(-2, keepdim=True)
        k = k - mean
        seen = k.cumsum(-2)
        seen[..., pairs.width :, :] -= seen[..., : -pairs.width, :].clone()
        means = (q * seen).sum(-1).double() / pairs.counts(q.device)[1, 0].flip(0)
        return cls(q, k, means, means + (q @ mean.mT)[..., 0].double(), pairs)

    def products(self, other: "_Bilinear") -> Float[Tensor, "rows=2 ..."]:
        """sum (w_ij - mean) (w'_ij - mean'), over all pairs and within rows."""
        counts = self.pairs.counts(self.q.device)[1, 0].flip(0)
        within = products_over_band(self.q, self.k, other.q, other.k, self.pairs.width)
        within = within - (counts * self.means * other.means).sum(-1)
        own, others = (
            one.row_means - (counts * one.row_means).sum(-1, keepdim=True) / counts.sum() for one in (self, other)
        )
        return torch.stack([within + (counts * own * others).sum(-1), within])
