"""Magnitude and phase of queries and keys in RoPE's planes, and what each plane of a head is used for."""

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
    """Sums over tokens: those of two prompts add, field by field."""

    def __add__(self: S, other: S) -> S:
        return type(self)(*(one + more for one, more in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class PlaneSums(Sums):
    """Sums over tokens of one side (queries or keys) of every head; x is (Re z, Im z), planes as in `complex_planes`.

    Attributes:
        x, outer: sum of x and of x x': everything linear and quadratic.
        magnitude: sum of |z|. unit: sum of z / |z|.
        spread: sum of |z - mean of z over the same prompt|.
    """

    x: Float[Tensor, "head two_planes"]
    outer: Float[Tensor, "head two_planes two_planes"]
    magnitude: Float[Tensor, "head plane"]
    unit: Complex[Tensor, "head plane"]
    spread: Float[Tensor, "head plane"]

    @classmethod
    def of(cls, z: Complex[Tensor, "head pos plane"]) -> "PlaneSums":
        x = torch.cat([z.real, z.imag], dim=-1)
        spread = (z - z.mean(dim=1, keepdim=True)).abs()
        return cls(x.sum(1), x.mT @ x, z.abs().sum(1), z.sgn().sum(1), spread.sum(1))


@dataclass(frozen=True)
class PlaneMoments(Sums):
    """All that the measures here need of q and k before RoPE. `of` one prompt, then add prompts: `a + b`.

    Attributes:
        n: number of tokens. q, k: their sums. pair: sum over pairs j <= i of z^q_i conj(z^k_j). n_pairs: how many.
    """

    n: int
    q: PlaneSums
    k: PlaneSums
    pair: Complex[Tensor, "head plane"]
    n_pairs: int

    @classmethod
    def of(cls, q: Float[Tensor, "head pos d_head"], k: Float[Tensor, "head pos d_head"], rope: Rope) -> "PlaneMoments":
        zq, zk = complex_planes(q.double(), rope), complex_planes(k.double(), rope)
        n = q.shape[1]
        pair = (zq * zk.cumsum(dim=1).conj()).sum(1)
        return cls(n, PlaneSums.of(zq), PlaneSums.of(zk), pair, n * (n + 1) // 2)


def side_pattern(sums: PlaneSums, n: int, tolerance: float = 1e-6) -> dict[str, Real[Tensor, "head *plane"]]:
    """One side (queries or keys) of every head, plane by plane: `side_pattern(moments.q, moments.n)`. Measures ours.

    mean |E z|; magnitude E|z|; concentration their ratio, 1 if z never changes, 0 if its mean vanishes; phase arg E z
    and phase_std sqrt(-2 ln |E z/|z||), its circular standard deviation, in radians; energy the share of E|z|^2 over
    planes. Of the head: participation (sum l)^2 / sum l^2 over the eigenvalues l of E xx', rank how many of them exceed
    `tolerance` times the largest; centred_participation and centred_rank the same of the covariance.

    Example:
        >>> k = torch.tensor([[[0.0, 2.0], [0.0, 4.0]]])  # one plane, always at a right angle
        >>> moments = PlaneMoments.of(k, k, Rope(torch.tensor([1.0], dtype=torch.float64)))
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
    """arg E[z^q_i conj(z^k_j)] over pairs j <= i: the plane's score is largest at theta_m d = - this."""
    return moments.pair.angle()


def plane_parts(
    moments: PlaneMoments, rope: Rope, scale: float, d_head: int, distances: Real[Tensor, " distance"]
) -> dict[str, Float[Tensor, "head plane"]]:
    r"""Variance of the logit's position, content and interaction, plane by plane; negative: works against the others.

    w = f + g + e with u = u(d) the plane factors and d uniform over `distances`, independent of query and key:
    f_m = scale Re z^q_m u_m conj(kbar_m), g_m = scale Re z^q_m ubar_m conj(k_m - kbar_m), e_m with both centred.
    position_m = E_q Cov_d(f_m, f),  content_m = E_q Cov_k(g_m, g),  interaction_m = E_q Cov_{d,k}(e_m, e),
    where f = sum_m f_m and so on: covariances with the whole, so that planes add up to Var f, Var g, Var e. Ours.
    kbar is the mean over all prompts of the moments.
    """
    turn = turning_factors(distances.to(moments.pair.device), rope, d_head)
    mean_turn, turn_spread = SecondMoments.of_mean_and_spread(turn)
    query = _second_moments(moments.q, moments.n)
    mean_key = SecondMoments.of(_as_planes(moments.k.x / moments.n)[:, None])
    every_key = _second_moments(moments.k, moments.n)
    key_spread = SecondMoments(every_key.plain - mean_key.plain, every_key.conjugate - mean_key.conjugate)
    pairs = ((turn_spread, mean_key), (mean_turn, key_spread), (turn_spread, key_spread))
    return {part: scale**2 * _with_the_whole(query, a.times(b)) for part, (a, b) in zip(PARTS, pairs, strict=True)}


def plane_scores(
    moments: PlaneMoments, rope: Rope, scale: float, d_head: int, n_distances: int, reference: int | float = 0
) -> Float[Tensor, "head plane"]:
    """s_m = scale E|q^m| E|k^m - kbar^m| max_{d < n_distances} 2|sin(theta_m (d - d0) / 2)|, d0 = `reference`.

    The plane's bound on the mean-key estimator's residual, with means in place of pairs; a YaRN factor counts twice.
    sum_m s_m / std(W) small is sufficient for a small residual, not necessary. kbar is each prompt's own mean. Ours.
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
    """Which planes meet each condition of the sufficient criterion: a head all of whose planes meet one is additive.

    position: the key is nearly constant, E|k - kbar| <= eps E|k|. quiet: the plane can hardly matter,
    4 scale E|q| E|k| <= eps std(W). slow: it hardly turns, max_d 2|sin(theta (d - d0) / 2)| <= eps.
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
    """YaRN's factor on a plane's score, and max_d |e^{i theta d} - e^{i theta d0}| over d = 0 .. n_distances - 1."""
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
