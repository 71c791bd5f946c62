"""Interaction of keys and distance by RoPE plane: its covariance matrix, the diagonal, and bounds."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from tl_posgen.position.decomposition.numbers.variance_shares import (
    DistanceWeights,
    TripleMoments,
    turning,
    weighted_spread,
)
from tl_posgen.rope.planes import SecondMoments
from tl_posgen.rope.rotation import Rope


@dataclass(frozen=True)
class InteractionMatrix:
    r"""M_mn = Cov(I_m, I_n) of the planes' parts I_m of the interaction, in squared score units.

    I_m = scale Re z^q_m conj(e_m) v_m(d), with e = k - mean k and v = u - mean u over the distances that count. Over
    all triples (query, key, distance) E I_m = 0, and sum_m I_m is the part of the score that is neither f(q, d) nor
    g(q, k). So M is symmetric without negative eigenvalues, and its entries add up to the variance kd + qkd.

    Attributes:
        matrix: M.
        energy: scale^2 E|z^q_m|^2 E|e_m|^2 E|v_m|^2.
        loose_bound: scale^2 E|z^q|^2 sum_m E|v_m|^2 E|e_m|^2, E|z^q|^2 over all planes.

    For any model and any text, by (Re x)^2 <= |x|^2 and Cauchy-Schwarz twice:

        M_mm <= energy_m,    sum_mn M_mn <= (sum_m sqrt(M_mm))^2 <= (sum_m sqrt(energy_m))^2 <= loose_bound.

    That half the sum of `energy` approximates the interaction is not proved. It is exact where every plane's z^q, e
    and v have isotropic directions (such as E z^q_m z^q_m = 0) and planes are uncorrelated.
    """

    matrix: Float[Tensor, "head plane plane"]
    energy: Float[Tensor, "head plane"]
    loose_bound: Float[Tensor, " head"]

    @property
    def total(self) -> Float[Tensor, " head"]:
        """sum_mn M_mn = kd + qkd, a variance."""
        return self.matrix.sum((-2, -1)).clamp(min=0)

    @property
    def by_plane(self) -> Float[Tensor, "head plane"]:
        """sum_n M_mn: adds up to `total`; negative where a plane opposes the others."""
        return self.matrix.sum(-1)

    @property
    def diagonal(self) -> Float[Tensor, "head plane"]:
        """M_mm: the variance of each plane's part alone."""
        return self.matrix.diagonal(dim1=-2, dim2=-1).clamp(min=0)

    @property
    def estimate(self) -> Float[Tensor, " head"]:
        """sum_m energy_m / 2, from lengths alone, without any phase of queries or keys."""
        return self.energy.sum(-1) / 2

    @property
    def bound(self) -> Float[Tensor, " head"]:
        """(sum_m sqrt(energy_m))^2."""
        return self.energy.sqrt().sum(-1).square()


def interaction_matrix(
    moments: TripleMoments,
    rope: Rope,
    scale: float,
    n_distances: int,
    *,
    weights: DistanceWeights | Float[Tensor, " distance"] = "uniform",
) -> InteractionMatrix:
    r"""M_mn = Cov(I_m, I_n) by `plane_covariance`: queries about zero, keys and rotations about their means.

    O(d_head^2) per head. Planes that do not rotate, such as the unrotated rest of a partial rotary head, have rows of
    zeros. Arguments are those of `variance_shares`. Ours.
    """
    turn, query = weighted_spread(*turning(moments, rope, n_distances, weights)), moments.q.second_moments
    matrix = plane_covariance(query, moments.k.about_mean, turn.about_mean, scale)
    energy_q = query.conjugate.diagonal(dim1=-2, dim2=-1).real
    of_keys = scale**2 * moments.k.energy * turn.energy
    return InteractionMatrix(matrix, energy_q * of_keys, energy_q.sum(-1) * of_keys.sum(-1))


def plane_covariance(
    query: SecondMoments, key: SecondMoments, turn: SecondMoments, scale: float
) -> Float[Tensor, "head plane plane"]:
    r"""scale^2 / 2 Re(P^q_mn conj(P^k_mn) P^u_mn + H^q_mn conj(H^k_mn) H^u_mn), P = E[x_m x_n], H = E[x_m x_n*].

    The second moments E w_m w_n of w_m = scale Re q_m conj(k_m) u_m, for independent q, k and u.
    """
    pair = query.times(key)
    return scale**2 * (pair.plain * turn.plain + pair.conjugate * turn.conjugate).real / 2
