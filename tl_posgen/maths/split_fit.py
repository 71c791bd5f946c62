"""How far a head's scores are the split f(q, i - j) + g(q, k) built on its mean key, without forming them."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.maths.rope import Rope, complex_planes, rotate
from tl_posgen.maths.splits import DistanceLaw
from tl_posgen.maths.triangle_moments import TriangleMoments, triangle_moments


@dataclass(frozen=True)
class SplitFit:
    """Pearson's correlation of W with f + g over the visible pairs, and within rows; NaN where either is constant."""

    r: Float[Tensor, " head"]
    r_visible: Float[Tensor, " head"]
    r_no_first: Float[Tensor, " head"]
    r_visible_no_first: Float[Tensor, " head"]


def split_fit(
    q: Float[Tensor, "head pos d_head"],
    k: Float[Tensor, "head pos d_head"],
    rope: Rope,
    law: DistanceLaw,
    *,
    window: int | None = None,
) -> SplitFit:
    r"""corr(W, f + g) with f_ij = <R_i q_i, R_j kbar>, g_ij = <Rbar q_i, k_j - kbar>, Rbar = E_p[R_d], kbar the mean key.

    f + g and the residual W - f - g are bilinear in vectors of twice the length,

        f + g     = <(R_i q_i, Rbar q_i), (R_j kbar,          k_j - kbar)>,
        W - f - g = <(R_i q_i, Rbar q_i), (R_j (k_j - kbar), -(k_j - kbar))>,

    so the variances of W, of the split and of the residual come from `triangle_moments`, and the covariance of the
    first two from them: O(L d_head^2), no [query, key] matrix. The scale cancels.

    Args:
        q, k: before RoPE.
        law: p(d); `point_mass(d0)` is the mean-key estimator at dummy distance d0.
        window: a query sees the `window` last keys, itself included.

    Source: the split is reconstructed from the public code of the first author of Han & Ji 2025; the law and the way
    of computing are ours.

    Example:
        >>> from tl_posgen.maths.splits import point_mass
        >>> rope = Rope(torch.tensor([0.3], dtype=torch.float64))
        >>> q, k = torch.randn(2, 1, 6, 2, generator=torch.Generator().manual_seed(0))
        >>> split_fit(q, k[:, :1].expand(1, 6, 2), rope, point_mass(0)).r.round(decimals=6).tolist()  # one key: f is all
        [1.0]
    """
    q, k = q.double(), k.double()
    positions = torch.arange(q.shape[1], device=q.device)
    mean_key = k.mean(1, keepdim=True)
    spread = k - mean_key
    rotated_q, rotated_k = rotate(q, positions, rope), rotate(k, positions, rope)
    turned = _turned(q, law, rope)
    queries = torch.cat([rotated_q, turned], -1)
    still = _flat(complex_planes(spread, rope))
    split_keys = torch.cat([rotate(mean_key.expand_as(k), positions, rope), still], -1)
    residual_keys = torch.cat([rotate(spread, positions, rope), -still], -1)
    exact = triangle_moments(rotated_q, rotated_k, window=window)
    split = triangle_moments(queries, split_keys, window=window)
    residual = triangle_moments(queries, residual_keys, window=window)
    r, r_visible = _correlations(exact, split, residual)
    if exact.without_first_token is None or split.without_first_token is None or residual.without_first_token is None:
        unknown = torch.full_like(r, torch.nan)
        return SplitFit(r, r_visible, unknown, unknown)
    rest = _correlations(exact.without_first_token, split.without_first_token, residual.without_first_token)
    return SplitFit(r, r_visible, *rest)


def _turned(q: Tensor, law: DistanceLaw, rope: Rope) -> Float[Tensor, "head pos two_planes"]:
    """Rbar q, as real coordinates that multiply those of `_flat(complex_planes(k))`."""
    turn = law.mean_turn(rope, q.shape[-1]).to(q.device)
    return _flat(complex_planes(q, rope) * (turn if turn.ndim == 1 else turn[:, None]))


def _flat(z: Tensor) -> Tensor:
    return torch.view_as_real(z).flatten(-2)


def _correlations(
    exact: TriangleMoments, split: TriangleMoments, residual: TriangleMoments
) -> tuple[Float[Tensor, " head"], Float[Tensor, " head"]]:
    """cov(W, F) = (var W + var F - var(W - F)) / 2, over all pairs and within rows."""
    over_all = _correlation(exact.tss, split.tss, residual.tss)
    return over_all, _correlation(exact.within_rows, split.within_rows, residual.within_rows)


def _correlation(x: Tensor, y: Tensor, difference: Tensor) -> Tensor:
    r = (x + y - difference) / (2 * (x * y).sqrt())
    return torch.where((x > 0) & (y > 0), r.clamp(-1, 1), torch.nan)
