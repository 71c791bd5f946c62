"""Contributions of RoPE planes to a slash, and the slash profile that rank-one queries and keys predict."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double
from tl_posgen.rope.planes import mean_curves
from tl_posgen.rope.rotation import Rope, complex_planes, rotate_by, turns_at
from tl_posgen.rope.spectra import top_direction

_ROUNDING = 1e-7  # slash scores are at most 1, and averages of float32


def plane_contributions(
    q: Float[Tensor, "head pos d_head"],
    k: Float[Tensor, "head pos d_head"],
    rope: Rope,
    scale: float = 1.0,
    window: int | None = None,
) -> Float[Tensor, "head plane_and_rest distance"]:
    r"""C_l(D) = E_i[InnerProd(i, i-D, l)] - E_{j<=i}[InnerProd(i, j, l)]: contribution of plane l to the logit at D.

    InnerProd(i, j, l) = |z^q_il| |z^k_jl| cos(theta_l (i-j) + arg z^q_il - arg z^k_jl) is the part of plane l in the
    logit, so the sum over planes is the mean logit on diagonal D less the mean over the triangle. The definition of C
    is ours. All D are computed at once by cross-correlations with the FFT, in float64. Rotary planes come first, then
    the unrotated remainder, paired up as planes that do not rotate. In a sliding window the second mean is over the
    visible pairs. q and k are those before RoPE.
    """
    n, sums = q.shape[1], []
    turns = turns_at(torch.arange(n, device=q.device), rope)
    for qk in zip(q, k, strict=True):  # one at a time, as the transforms take several times the room of the result
        z_q, z_k = (complex_planes(rotate_by(double(x), turns, rope), rope).mT for x in qk)
        # Re sum_i z^q_i conj(z^k_{i-D}) for every D >= 0; padded to 2n, so that the FFT does not wrap round
        product = torch.fft.fft(z_q, 2 * n) * torch.fft.fft(z_k, 2 * n).conj()
        sums.append(scale * torch.fft.ifft(product).real[..., :n])
    by_distance, counts = torch.stack(sums), torch.arange(n, 0, -1, dtype=DOUBLE, device=q.device)
    visible = slice(window)
    return by_distance / counts - by_distance[..., visible].sum(-1, keepdim=True) / counts[visible].sum()


def rank_one_logit(
    q: Float[Tensor, "head pos d_head"],
    k: Float[Tensor, "head pos d_head"],
    rope: Rope,
    scale: float,
    tops: Sequence[Float[Tensor, "head d_head"]] | None = None,
) -> Float[Tensor, "head distance"]:
    r"""g(D) = scale <R_D alpha v^q, R_0 beta v^k> = sum_l A_l cos(theta_l D + phi_l): the logit of rank-one Q and K.

    v^q and v^k are the top right-singular vectors of Q and K before RoPE, alpha and beta the means over positions of
    Q v^q and K v^k. The form of g under exact rank one follows from RoPE; the means in place of alpha_i and beta_j are
    ours.

    Args:
        tops: v^q and v^k, where they are known.
    """
    v_q, v_k = (top_direction(q), top_direction(k)) if tops is None else tops
    constant_q, constant_k = ((double(x).mean(1) * v).sum(-1, keepdim=True) * v for x, v in ((q, v_q), (k, v_k)))
    return constant_logit(constant_q, constant_k, rope, scale, q.shape[1])


def constant_logit(
    q: Float[Tensor, "head d_head"], k: Float[Tensor, "head d_head"], rope: Rope, scale: float, n_distances: int
) -> Float[Tensor, "head distance"]:
    r"""g(D) = scale <R_D q, R_0 k> = scale Re sum_m z^q_m conj(z^k_m) e^{i theta_m D}: the logit of one query, one key.

    Example:
        >>> q = torch.ones(1, 2)
        >>> constant_logit(q, q, Rope(torch.tensor([torch.pi]).double()), 0.5, 3).round(decimals=6).tolist()
        [[1.0, -1.0, 1.0]]
    """
    products = complex_planes(double(q), rope) * complex_planes(double(k), rope).conj()
    return scale * mean_curves(products, rope, n_distances, q.shape[-1])


def score_of_profile(
    logit: Float[Tensor, "head distance"], window: int | None = None, sinks: Float[Tensor, " head"] | None = None
) -> Float[Tensor, "head distance"]:
    r"""1/(N-D) sum_{i>=D} e^{g(D)} / sum_{d<=i} e^{g(d)}: slash scores of a logit g(distance), all d in the window.

    Args:
        sinks: logits that join each row's softmax, a summand more of the denominator; None for scores of attention that
            is shared among the keys alone.

    Example:
        >>> score_of_profile(torch.zeros(1, 2)).tolist()
        [[0.75, 0.5]]
    """
    g = double(logit)
    if window is not None:
        g = g.masked_fill(torch.arange(g.shape[-1], device=g.device) >= window, -torch.inf)
    log_normaliser = g.logcumsumexp(-1)
    if sinks is not None:
        log_normaliser = log_normaliser.logaddexp(sinks.to(g)[:, None])
    over_queries = (-log_normaliser).flip(-1).logcumsumexp(-1).flip(-1)
    return (g + over_queries).exp() / torch.arange(g.shape[-1], 0, -1, device=g.device)


def match_profiles(
    measured: Float[Tensor, "head distance"],
    predicted: Float[Tensor, "head distance"],
    uniform: Float[Tensor, "head distance"],
) -> tuple[Float[Tensor, " head"], Float[Tensor, " head"]]:
    """Return Pearson's r over D < N/2 of each head's predicted with its own measured slash scores, and the mean with
    those of all other heads (NaN for a single head) [ours].

    Larger D average few queries. The scores of uniform attention are subtracted: their decay with distance would
    correlate any two heads.
    """
    reach = max(1, measured.shape[-1] // 2)
    measured, predicted, uniform = (x[:, :reach] for x in (measured, predicted, uniform))

    def unit_rows(x: Tensor) -> Tensor:  # rows less their mean, of length one: their products are Pearson's r
        centred = double(x - x.mean(-1, keepdim=True))
        size = centred.norm(dim=-1, keepdim=True)
        return (centred / size).masked_fill(size <= _ROUNDING, torch.nan)

    between = unit_rows(predicted - uniform) @ unit_rows(measured - uniform).mT
    itself = torch.eye(len(between), dtype=torch.bool, device=between.device)
    return between.diagonal(), between.masked_fill(itself, torch.nan).nanmean(-1)
