"""Magnitude and phase of queries and keys in RoPE's planes, and the part of each plane in a head's logits."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double
from tl_posgen.position.decomposition.numbers.variance_shares import TripleMoments, turning, weighted_spread
from tl_posgen.rope.planes import SecondMoments, turning_factors
from tl_posgen.rope.rotation import Rope, complex_planes

PARTS = ("position", "content", "interaction")


@dataclass(frozen=True)
class PlaneMoments:
    """Moments of q and k before RoPE, in the planes of `complex_planes`. Moments of prompts add up: `a + b`.

    Attributes:
        triples: means and second moments.
        magnitude: sums of |z| over tokens, of queries and of keys.
        spread: sum of |z - mean of z over the same prompt| over keys.
    """

    triples: TripleMoments
    magnitude: Float[Tensor, "side=2 head plane"]
    spread: Float[Tensor, "head plane"]

    @classmethod
    def from_qk(
        cls,
        q: Float[Tensor, "head pos d_head"],
        k: Float[Tensor, "head pos d_head"],
        rope: Rope,
        *,
        first_token: bool = True,
    ) -> "PlaneMoments":
        """Return the moments of one prompt. `first_token=False` leaves token 0 out, as query and as key."""
        triples = TripleMoments.from_qk(q, k, rope, first_token=first_token)
        z = torch.stack([complex_planes(double(x[:, int(not first_token) :]), rope) for x in (q, k)])
        spread = (z[1] - z[1].mean(1, keepdim=True)).abs().sum(1)
        return cls(triples, z.abs().sum(2), spread)

    def __add__(self, other: "PlaneMoments") -> "PlaneMoments":
        return PlaneMoments(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def n(self) -> int:
        """Number of tokens."""
        return self.triples.q.n


def side_patterns(moments: PlaneMoments) -> dict[str, Float[Tensor, "side=2 head plane"]]:
    """Return magnitude, concentration, phase and energy of queries and of keys, plane by plane. Ours.

    magnitude E|z|; concentration |E z| / E|z|, 1 for constant z, 0 if its mean vanishes; phase arg E z, in radians;
    energy, the share of E|z|^2 over planes.
    """
    sides = (moments.triples.q, moments.triples.k)
    mean, magnitude = torch.stack([side.mean for side in sides]), moments.magnitude / moments.n
    energy = torch.stack([side.energy for side in sides]) + mean.abs().square()
    return {
        "magnitude": magnitude,
        "concentration": mean.abs() / magnitude,
        "phase": mean.angle(),
        "energy": energy / energy.sum(-1, keepdim=True),
    }


def plane_parts(
    moments: TripleMoments, rope: Rope, scale: float, n_distances: int
) -> dict[str, Float[Tensor, "head plane"]]:
    r"""position_m = E_q Cov_d(f_m, f), content_m = E_q Cov_k(g_m, g), interaction_m = E_q Cov_{d,k}(e_m, e), by plane.

    The logit is w = f + g + e with u = u(d) the plane factors and d uniform over 0 .. n_distances - 1, independent of
    query and key: f_m = scale Re z^q_m u_m conj(kbar_m), g_m = scale Re z^q_m ubar_m conj(k_m - kbar_m), e_m with both
    centred, and f = sum_m f_m, likewise g and e. These are covariances with the whole, so planes add up to Var f, Var g
    and Var e; a negative one means that the plane opposes the others. kbar is the mean over all prompts. Ours.
    """
    turn, key = weighted_spread(*turning(moments, rope, n_distances, "uniform")), moments.k
    mean_key, mean_turn = (SecondMoments.from_samples(spread.mean[:, None]) for spread in (key, turn))
    pairs = ((mean_key, turn.about_mean), (key.about_mean, mean_turn), (key.about_mean, turn.about_mean))
    query, covariances = moments.q.second_moments, {}
    for part, (of_key, of_turn) in zip(PARTS, pairs, strict=True):
        # E w_m w_n = scale^2 / 2 Re(P^q conj(P^k) P^u + H^q conj(H^k) H^u)_mn, P = E[x_m x_n], H = E[x_m x_n*]
        qk = query.times(of_key)
        covariances[part] = scale**2 * (qk.plain * of_turn.plain + qk.conjugate * of_turn.conjugate).real.sum(-1) / 2
    return covariances


def plane_scores(moments: PlaneMoments, rope: Rope, scale: float, n_distances: int) -> Float[Tensor, "head plane"]:
    """s_m = scale E|q^m| E|k^m - kbar^m| max_{d < n_distances} 2|sin(theta_m d / 2)|.

    It bounds the plane's part in the residual of the mean-key estimator at distance 0, with means in place of pairs; a
    YaRN factor enters squared. A small sum_m s_m / std(W) is sufficient for a small residual, not necessary. kbar is
    the mean of each prompt. Ours.
    """
    gain, reach = _gain_and_reach(moments, rope, n_distances)
    return scale * gain * (moments.magnitude[0] / moments.n) * (moments.spread / moments.n) * reach


def sufficiency(
    moments: PlaneMoments,
    rope: Rope,
    scale: float,
    n_distances: int,
    std: Float[Tensor, " head"],
    eps: float = 0.1,
) -> dict[str, Bool[Tensor, "head plane"]]:
    """Return the planes that meet each condition; a head is additive if each of its planes meets one.

    position: the key is nearly constant, E|k - kbar| <= eps E|k|. quiet: the plane has little effect,
    4 scale E|q| E|k| <= eps std(W). slow: it hardly rotates, max_d 2|sin(theta d / 2)| <= eps.
    The plane scores then add up to at most eps (std(W) for each quiet plane + 2 scale E|q^m| E|k^m| for each other).
    Ours.
    """
    q, k = moments.magnitude / moments.n
    gain, reach = _gain_and_reach(moments, rope, n_distances)
    return {
        "position": moments.spread / moments.n <= eps * k,
        "quiet": 4 * scale * gain * q * k <= eps * std[:, None].to(q),
        "slow": (reach <= eps).expand_as(q),
    }


def _gain_and_reach(
    moments: PlaneMoments, rope: Rope, n_distances: int
) -> tuple[Float[Tensor, " plane"], Float[Tensor, " plane"]]:
    """Return YaRN's factor on a plane's score, and max_d |e^{i theta d} - 1| over d < n_distances."""
    distances = torch.arange(n_distances, dtype=DOUBLE, device=moments.spread.device)
    turn = turning_factors(distances, rope, 2 * moments.spread.shape[-1])
    return turn[0].abs(), (2 * (turn.angle() / 2).sin().abs()).amax(0)
