"""How well the mean key's split into position and meaning, f(q, i - j) + g(q, k), follows a head's scores."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.errors import InputError
from tl_posgen.maths.rope import Rope, complex_planes, rotate
from tl_posgen.maths.splits import DistanceLaw, point_mass
from tl_posgen.maths.triangle_moments import TriangleMoments, triangle_moments


@dataclass(frozen=True)
class MeanKeyCorrelation:
    """Pearson's r between the scores W and the split f + g over the pairs that count; NaN where W is constant.

    Attributes:
        r: over all pairs.
        r_visible: within rows, which is all that softmax sees.
    """

    r: Float[Tensor, "law head"]
    r_visible: Float[Tensor, "law head"]


def mean_key_r(
    q: Float[Tensor, "head pos d_head"],
    k: Float[Tensor, "head pos d_head"],
    rope: Rope,
    scale: float,
    laws: Sequence[DistanceLaw | int | float],
    *,
    mean_key: Float[Tensor, "head d_head"] | None = None,
    window: int | None = None,
    first_token: bool = True,
) -> MeanKeyCorrelation:
    r"""f_ij = scale <R_i q_i, R_j kbar>, g_ij = scale <Rbar q_i, k_j - kbar>, Rbar = E_p[R_d]; corr(W, f + g).

    W, f + g and the residual W - f - g are bilinear in vectors of twice the width,

        f + g = scale <(R_i q_i, Rbar q_i), (R_j kbar, k_j - kbar)>,
        W - f - g = scale <(R_i q_i, Rbar q_i), (R_j (k_j - kbar), kbar - k_j)>,

    so their variances come from `triangle_moments` without a [query, key] matrix, and the covariance of W and f + g
    from the three variances.

    Args:
        q, k: before RoPE.
        laws: each p(d), or a dummy distance d0 that stands for the point mass there. One row of the result each.
        mean_key: kbar; the mean of the keys that count unless given.
        window: a query sees the `window` last keys, itself included.
        first_token: whether token 0 counts, as query, as key and in kbar.

    Raises:
        InputError: where no token is left.

    Source: the estimator with d0 = 1000 is in the public code of the first author of Han & Ji 2025
    (arXiv 2503.13305); p as the general case, and this way to compute r, are ours.

    Example:
        >>> rope = Rope(torch.zeros(1, dtype=torch.float64))  # a plane that never turns splits exactly
        >>> q, k = torch.randn(2, 1, 9, 2, generator=torch.Generator().manual_seed(0))
        >>> mean_key_r(q, k, rope, 1.0, [0, 1000]).r.round(decimals=5).tolist()
        [[1.0], [1.0]]
    """
    if not first_token:
        q, k = q[:, 1:], k[:, 1:]
    if not q.shape[1]:
        raise InputError("no token is left for the mean-key split; give a longer text")
    kbar = (k.double().mean(1).to(k.dtype) if mean_key is None else mean_key.to(k))[:, None]
    positions = torch.arange(q.shape[1], device=q.device)
    turned_q, turned_k = rotate(q, positions, rope), rotate(k, positions, rope)
    turned_mean = rotate(kbar.expand_as(k), positions, rope)
    scores = triangle_moments(turned_q, turned_k, scale, window=window)
    z_q, meaning = complex_planes(q, rope), _flat(complex_planes(k - kbar, rope))
    rows = []
    for law in laws:
        law = law if isinstance(law, DistanceLaw) else point_mass(law)
        mean_turn = law.mean_turn(rope, q.shape[-1]).to(z_q)
        left = torch.cat([turned_q, _flat(z_q * (mean_turn if mean_turn.ndim == 1 else mean_turn[:, None]))], -1)
        split = triangle_moments(left, torch.cat([turned_mean, meaning], -1), scale, window=window)
        rest = triangle_moments(left, torch.cat([turned_k - turned_mean, -meaning], -1), scale, window=window)
        rows.append(_correlations(scores, split, rest))
    r, r_visible = (torch.stack(values) for values in zip(*rows, strict=True))
    return MeanKeyCorrelation(r, r_visible)


def tv_bound(delta: Float[Tensor, "*row"]) -> Float[Tensor, "*row"]:
    r"""tanh(delta / 2): how far a softmax row can move, in total variation, if no logit moves by more than delta.

    A constant added to the whole row counts nothing, so take delta after the best constant is removed, half the range
    of the change. The output vector then moves by at most diam(V) tanh(delta / 2). Reached by two keys of equal and
    opposite change about equal weights.

    Example:
        >>> tv_bound(torch.tensor([0.0, 100.0])).tolist()
        [0.0, 1.0]
    """
    return torch.tanh(delta / 2)


def _correlations(scores: TriangleMoments, split: TriangleMoments, rest: TriangleMoments) -> tuple[Tensor, Tensor]:
    everywhere = _correlation(scores.tss, split.tss, rest.tss, scores)
    return everywhere, _correlation(scores.within_rows, split.within_rows, rest.within_rows, scores)


def _correlation(w: Tensor, split: Tensor, rest: Tensor, scores: TriangleMoments) -> Float[Tensor, " head"]:
    """From the sums of squares of W, of f + g and of their difference."""
    r = ((w + split - rest) / (2 * (w * split).sqrt())).nan_to_num(0).clamp(-1, 1)
    return r.masked_fill(scores.is_constant(w), torch.nan)


def _flat(z: Tensor) -> Tensor:
    return torch.view_as_real(z.resolve_conj()).flatten(-2)
