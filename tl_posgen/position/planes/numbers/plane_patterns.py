"""Magnitude and phase of queries and keys in RoPE's planes, and the part of each plane in a head's logits."""

from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Bool, Complex, Float, Real
from torch import Tensor

from tl_posgen.rope.planes import SecondMoments, turning_factors
from tl_posgen.rope.rotation import Rope, complex_planes

PARTS = ("position", "content", "interaction")
S = TypeVar("S", bound="Sums")


class Sums:
    """Sums over tokens; the sums of two prompts add up field by field."""

    def __add__(self: S, other: S) -> S:
        return type(self)(*(one + more for one, more in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class PlaneSums(Sums):
    """Sums over tokens of one side (queries or keys) of every head; x is (Re z, Im z), planes as in `complex_planes`.

    Attributes:
        x, outer: sum of x and of x x'.
        magnitude: sum of |z|. unit: sum of z / |z|.
        spread: sum of |z - mean of z over the same prompt|.
    """

    x: Float[Tensor, "head two_planes"]
    outer: Float[Tensor, "head two_planes two_planes"]
    magnitude: Float[Tensor, "head plane"]
    unit: Complex[Tensor, "head plane"]
    spread: Float[Tensor, "head plane"]

    @classmethod
    def from_planes(cls, z: Complex[Tensor, "head pos plane"]) -> "PlaneSums":
        x = torch.cat([z.real, z.imag], dim=-1)
        spread = (z - z.mean(dim=1, keepdim=True)).abs()
        return cls(x.sum(1), x.mT @ x, z.abs().sum(1), z.sgn().sum(1), spread.sum(1))


@dataclass(frozen=True)
class PlaneMoments(Sums):
    """Moments of q and k before RoPE from which the measures of planes follow. Moments of prompts add up: `a + b`.

    Attributes:
        n: number of tokens.
        q, k: sums of queries and of keys.
        pair: sum over pairs j <= i of z^q_i conj(z^k_j).
        n_pairs: number of these pairs.
    """

    n: int
    q: PlaneSums
    k: PlaneSums
    pair: Complex[Tensor, "head plane"]
    n_pairs: int

    @classmethod
    def from_qk(
        cls, q: Float[Tensor, "head pos d_head"], k: Float[Tensor, "head pos d_head"], rope: Rope
    ) -> "PlaneMoments":
        zq, zk = complex_planes(q.double(), rope), complex_planes(k.double(), rope)
        n = q.shape[1]
        pair = (zq * zk.cumsum(dim=1).conj()).sum(1)
        return cls(n, PlaneSums.from_planes(zq), PlaneSums.from_planes(zk), pair, n * (n + 1) // 2)


def side_pattern(sums: PlaneSums, n: int, tolerance: float = 1e-6) -> dict[str, Real[Tensor, "head *plane"]]:
    """Return magnitudes, phases, energies and ranks of one side (queries or keys) of every head, plane by plane.

    Call it as `side_pattern(moments.q, moments.n)`. These measures are ours.

    By plane: mean |E z|; magnitude E|z|; concentration |E z| / E|z|, 1 for constant z, 0 if its mean vanishes; phase
    arg E z and its circular standard deviation phase_std sqrt(-2 ln |E z/|z||), in radians; energy, the share of E|z|^2
    over planes. By head: participation (sum l)^2 / sum l^2 over the eigenvalues l of E xx', rank, the number of
    eigenvalues above `tolerance` times the largest; centred_participation and centred_rank, from the covariance.

    Example:
        >>> k = torch.tensor([[[0.0, 2.0], [0.0, 4.0]]])  # one plane, always at a right angle
        >>> moments = PlaneMoments.from_qk(k, k, Rope(torch.tensor([1.0], dtype=torch.float64)))
        >>> pattern = side_pattern(moments.k, moments.n)
        >>> pattern["magnitude"].item(), pattern["concentration"].item(), round(pattern["phase"].item(), 4)
        (3.0, 1.0, 1.5708)
    """
    mean, outer = sums.x / n, sums.outer / n
    z, magnitude, resultant = _as_planes(mean), sums.magnitude / n, (sums.unit / n).abs()
    real, imag = outer.diagonal(dim1=-2, dim2=-1).chunk(2, dim=-1)
    centred = outer - mean[..., :, None] * mean[..., None, :]
    (spread, rank), (centred_spread, centred_rank) = (_spread_of_spectrum(x, tolerance) for x in (outer, centred))
    return {
        **{"mean": z.abs(), "magnitude": magnitude, "concentration": z.abs() / magnitude, "phase": z.angle()},
        "phase_std": (-2 * resultant.clamp(max=1).log()).sqrt(),
        "energy": (real + imag) / (real + imag).sum(-1, keepdim=True),
        **{"participation": spread, "rank": rank},
        **{"centred_participation": centred_spread, "centred_rank": centred_rank},
    }


def relative_phase(moments: PlaneMoments) -> Float[Tensor, "head plane"]:
    """arg E[z^q_i conj(z^k_j)] over pairs j <= i; the plane's score is largest where theta_m d = -arg."""
    return moments.pair.angle()


def plane_parts(
    moments: PlaneMoments, rope: Rope, scale: float, d_head: int, distances: Real[Tensor, " distance"]
) -> dict[str, Float[Tensor, "head plane"]]:
    r"""position_m = E_q Cov_d(f_m, f), content_m = E_q Cov_k(g_m, g), interaction_m = E_q Cov_{d,k}(e_m, e), by plane.

    The logit is w = f + g + e with u = u(d) the plane factors and d uniform over `distances`, independent of query and
    key: f_m = scale Re z^q_m u_m conj(kbar_m), g_m = scale Re z^q_m ubar_m conj(k_m - kbar_m), e_m with both centred,
    and f = sum_m f_m, likewise g and e. These are covariances with the whole, so planes add up to Var f, Var g and Var
    e; a negative one means that the plane opposes the others. kbar is the mean over all prompts of the moments. Ours.
    """
    turn = turning_factors(distances.to(moments.pair.device), rope, d_head)
    mean_turn, turn_spread = SecondMoments.from_mean_and_spread(turn)
    query = _second_moments(moments.q, moments.n)
    mean_key = SecondMoments.from_samples(_as_planes(moments.k.x / moments.n)[:, None])
    every_key = _second_moments(moments.k, moments.n)
    key_spread = SecondMoments(every_key.plain - mean_key.plain, every_key.conjugate - mean_key.conjugate)
    pairs = ((turn_spread, mean_key), (mean_turn, key_spread), (turn_spread, key_spread))
    return {part: scale**2 * _with_the_whole(query, a.times(b)) for part, (a, b) in zip(PARTS, pairs, strict=True)}


def plane_scores(
    moments: PlaneMoments, rope: Rope, scale: float, d_head: int, n_distances: int, reference: int | float = 0
) -> Float[Tensor, "head plane"]:
    """s_m = scale E|q^m| E|k^m - kbar^m| max_{d < n_distances} 2|sin(theta_m (d - d0) / 2)|, d0 = `reference`.

    It bounds the plane's part in the residual of the mean-key estimator, with means in place of pairs; a YaRN factor
    enters squared. A small sum_m s_m / std(W) is sufficient for a small residual, not necessary. kbar is the mean of
    each prompt. Ours.
    """
    gain, reach = _gain_and_reach(moments, rope, d_head, n_distances, reference)
    return scale * gain * (moments.q.magnitude / moments.n) * (moments.k.spread / moments.n) * reach


def sufficiency(
    moments: PlaneMoments,
    rope: Rope,
    scale: float,
    d_head: int,
    n_distances: int,
    std: Float[Tensor, " head"],
    eps: float = 0.1,
    reference: int | float = 0,
) -> dict[str, Bool[Tensor, "head plane"]]:
    """Return the planes that meet each condition of the sufficient criterion for an additive head.

    A head is additive if each of its planes meets one condition.

    position: the key is nearly constant, E|k - kbar| <= eps E|k|. quiet: the plane has little effect,
    4 scale E|q| E|k| <= eps std(W). slow: it hardly rotates, max_d 2|sin(theta (d - d0) / 2)| <= eps.
    The plane scores then add up to at most eps (std(W) for each quiet plane + 2 scale E|q^m| E|k^m| for each other).
    Ours.
    """
    q, k = moments.q.magnitude / moments.n, moments.k.magnitude / moments.n
    gain, reach = _gain_and_reach(moments, rope, d_head, n_distances, reference)
    return {
        "position": moments.k.spread / moments.n <= eps * k,
        "quiet": 4 * scale * gain * q * k <= eps * std[:, None].to(q),
        "slow": (reach <= eps).expand_as(q),
    }


def _gain_and_reach(
    moments: PlaneMoments, rope: Rope, d_head: int, n_distances: int, reference: int | float
) -> Float[Tensor, "gain_and_reach=2 plane"]:
    """Return YaRN's factor on a plane's score, and max_d |e^{i theta d} - e^{i theta d0}| over d < n_distances."""
    away = torch.arange(n_distances, dtype=torch.float64) - reference
    reach = (2 * (turning_factors(away, rope, d_head).angle() / 2).sin().abs()).amax(0)
    return torch.stack([turning_factors(torch.zeros(1), rope, d_head)[0].real.to(reach), reach]).to(moments.pair.device)


def _as_planes(x: Float[Tensor, "head two_planes"]) -> Complex[Tensor, "head plane"]:
    return torch.complex(*(part.contiguous() for part in x.chunk(2, dim=-1)))


def _second_moments(sums: PlaneSums, n: int) -> SecondMoments:
    """E[z_l z_m] and E[z_l conj(z_m)] from E[x x']."""
    half = sums.outer.shape[-1] // 2
    outer = sums.outer / n
    real, cross, imag = outer[:, :half, :half], outer[:, half:, :half], outer[:, half:, half:]
    plain = torch.complex(real - imag, cross + cross.mT)
    return SecondMoments(plain, torch.complex(real + imag, cross - cross.mT))


def _with_the_whole(query: SecondMoments, pair: SecondMoments) -> Float[Tensor, "head plane"]:
    """E[Re(z_m x_m) sum_l Re(z_l x_l)] for independent z and x."""
    return ((query.plain * pair.plain + query.conjugate * pair.conjugate).sum(-2)).real / 2


def _spread_of_spectrum(matrix: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    values = torch.linalg.eigvalsh(matrix).clamp(min=0)
    rank = (values > tolerance * values[..., -1:]).sum(-1)
    return values.sum(-1).square() / values.square().sum(-1), rank
