"""How nearly additive the table of a head's scores for every distance and key is: M_dj = scale <R_d q, R_0 k_j>."""

import torch
from jaxtyping import Float, Real
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double
from tl_posgen.rope.planes import SecondMoments, turning_factors
from tl_posgen.rope.rotation import Rope, complex_planes, rotate
from tl_posgen.rope.scores_at import unturned

QUERIES_AT_ONCE = 64


def table_energies(
    q: Float[Tensor, "head query d_head"],
    k: Float[Tensor, "head key d_head"],
    rope: Rope,
    scale: float,
    distances: Real[Tensor, " distance"],
) -> Float[Tensor, "part=3 head query"]:
    r"""distance = Q(cov u, kbar kbar'), key = Q(ubar ubar', cov k), neither = Q(cov u, cov k), for every query.

    These are the variances of the row means, of the column means and of the rest of the table
    M_dj = scale Re sum_m z^q_m u_m(d) conj(z^k_jm), where

        Q(A, B) = scale^2 / 2 Re sum_lm (z_l z_m A_lm conj(B_lm) + z_l conj(z_m) A*_lm conj(B*_lm)),

    A, A* are the plain and the conjugate second moments, and cov is over distances or over keys. M is bilinear in u(d)
    and k_j, so centring an axis of M centres that factor. The cost is (query + key + distance) x plane^2 instead of
    query x key x distance x plane. Ours.
    """
    turn = turning_factors(distances.to(q.device), rope, q.shape[-1])
    z, key = complex_planes(double(q), rope), complex_planes(double(k), rope)
    mean_turn, turn_spread = SecondMoments.from_mean_and_spread(turn)
    mean_key, key_spread = SecondMoments.from_mean_and_spread(key)
    factors = ((turn_spread, mean_key), (mean_turn, key_spread), (turn_spread, key_spread))
    return torch.stack([scale**2 * a.times(b).mean_square(z) for a, b in factors])


def key_agreement(
    q: Float[Tensor, "head query d_head"],
    k: Float[Tensor, "head key d_head"],
    rope: Rope,
    distances: Real[Tensor, " distance"],
) -> Float[Tensor, "head distance distance"]:
    """E_i corr_j(M_dj, M_d'j), mean over queries i, for every pair of distances d, d': 1 if the key part is constant.

    From the keys' covariance C: corr = x'Cy / sqrt(x'Cx y'Cy) with x = R_d q_i, y = R_d' q_i, in blocks of queries.
    Its mean weighted by variance over all pairs of distances of a table, d = d' included, has a closed form by
    `table_energies`: the mean of cov_j(M_d, M_d') over the mean of var_j(M_d) is key / (key + neither). Ours.
    """
    spread = unturned(double(k), rope)
    spread = spread - spread.mean(dim=1, keepdim=True)
    cov = (spread.mT @ spread / spread.shape[1])[:, None]
    total = torch.zeros(len(q), len(distances), len(distances), dtype=DOUBLE, device=q.device)
    for block in double(q).split(QUERIES_AT_ONCE, dim=1):
        turned = rotate(block[:, :, None].expand(-1, -1, len(distances), -1), distances.to(q.device), rope)
        shared = turned @ cov @ turned.mT
        size = shared.diagonal(dim1=-2, dim2=-1).sqrt()
        total += (shared / (size[..., None] * size[..., None, :])).sum(1)
    return total / q.shape[1]
