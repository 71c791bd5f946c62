"""How well the mean key's split into position and content, f(q, i - j) + g(q, k), follows a head's scores."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.errors import InputError
from tl_posgen.position.decomposition.pair_moments import PairMoments, pair_moments
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

    W, f + g and the residual W - f - g are bilinear in vectors of twice the width,

        f + g = scale <(R_i q_i, Rbar q_i), (R_j kbar, k_j - kbar)>,
        W - f - g = scale <(R_i q_i, Rbar q_i), (R_j (k_j - kbar), kbar - k_j)>,

    so their variances come from `pair_moments` without a [query, key] matrix, and the covariance of W and f + g
    from the three variances.

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
    kbar = k.double().mean(1, keepdim=True).to(k.dtype)
    positions = torch.arange(q.shape[1], device=q.device)
    turned_q, turned_k = rotate(q, positions, rope), rotate(k, positions, rope)
    turned_mean = rotate(kbar.expand_as(k), positions, rope)
    scores = scores or pair_moments(turned_q, turned_k, scale, window=window)
    z_q, content = complex_planes(q, rope), real_coordinates(complex_planes(k - kbar, rope))
    rows = []
    for turn in turning_factors(torch.tensor(distances, dtype=torch.float64), rope, q.shape[-1]).to(z_q):
        left = torch.cat([turned_q, real_coordinates(z_q * turn)], -1)
        split = pair_moments(left, torch.cat([turned_mean, content], -1), scale, window=window)
        rest = pair_moments(left, torch.cat([turned_k - turned_mean, -content], -1), scale, window=window)
        within = _correlation(scores.within_rows, split.within_rows, rest.within_rows, scores)
        rows.append((_correlation(scores.tss, split.tss, rest.tss, scores), within))
    r, r_within_rows = (torch.stack(values) for values in zip(*rows, strict=True))
    return MeanKeyCorrelation(r, r_within_rows)


def _correlation(w: Tensor, split: Tensor, rest: Tensor, scores: PairMoments) -> Float[Tensor, " head"]:
    """From the sums of squares of W, of f + g and of their difference."""
    r = ((w + split - rest) / (2 * (w * split).sqrt())).nan_to_num(0).clamp(-1, 1)
    return r.masked_fill(scores.is_constant(w), torch.nan)
