"""Splits of scores into position and content, f(q_i, i - j) + g(q_i, k_j), by a distribution of distances."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float, Real
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double
from tl_posgen.errors import InputError, check_whole, is_non_negative
from tl_posgen.rope.bilinear_sums import sums_along_diagonals
from tl_posgen.rope.planes import turning_factors
from tl_posgen.rope.rotation import Rope, complex_planes, real_coordinates

WIDEST = 2**24  # tokens: no prompt is longer


@dataclass(frozen=True)
class DistanceDistribution:
    """Distribution p(d) of distances over which the content part is averaged.

    Attributes:
        distances: in tokens, whole or fractional.
        weights: not negative, adding up to 1; one row for all heads, a row per head, or per head and query.
    """

    distances: Real[Tensor, " distance"]
    weights: Float[Tensor, "*rows distance"]

    def __repr__(self) -> str:
        p = [*zip(self.distances.tolist(), self.weights.tolist(), strict=True)] if self.weights.ndim == 1 else []
        ends = f"{float(self.distances.min()):g} to {float(self.distances.max()):g}" if len(self.distances) else "none"
        return f"p(d={p[0][0]:g}) = 1" if len(p) == 1 else f"p(d) of d = {ends}"

    def mean_turn(self, rope: Rope, d_head: int) -> Complex[Tensor, "*rows plane_and_rest"]:
        """Rbar = E_p[R_d], one complex factor per plane: near 0 for fast planes, near 1 for slow ones."""
        turn = turning_factors(self.distances, rope, d_head)
        return self.weights.to(turn) @ turn


@dataclass(frozen=True)
class Split:
    """Position and content part of `split_scores`, without a mask."""

    position: Float[Tensor, "head query key"]
    content: Float[Tensor, "head query key"]

    @property
    def scores(self) -> Float[Tensor, "head query key"]:
        return self.position + self.content


def point_mass(distance: int | float) -> DistanceDistribution:
    """p(d0) = 1 at one dummy distance d0: the mean-key estimator."""
    if not is_non_negative(distance):
        raise InputError(f"dummy distance {distance!r}: distances must be 0 or more")
    return DistanceDistribution(torch.tensor([float(distance)]), torch.ones(1, dtype=DOUBLE))


def triangle(width: int | float | Real[Tensor, " head"]) -> DistanceDistribution:
    """p(d) proportional to max(width - d, 0) on whole distances; width 1 is the point mass at 0.

    Args:
        width: one for all heads, or one per head.

    Example:
        >>> triangle(2).weights.mul(3).round().tolist()
        [2.0, 1.0]
    """
    is_real_tensor = isinstance(width, Tensor) and width.numel() and not width.is_complex()
    widths = torch.as_tensor(width if is_real_tensor else float(width) if is_non_negative(width) else 0, dtype=DOUBLE)
    if not bool(((widths > 0) & (widths <= WIDEST)).all()):
        raise InputError(f"triangle width {width!r}: widths must be numbers above 0, of tokens, {WIDEST:,} at most")
    distances = torch.arange(math.ceil(widths.max()), device=widths.device)
    weights = (widths[..., None] - distances).clamp(min=0)
    return DistanceDistribution(distances, weights / weights.sum(-1, keepdim=True))


def uniform(n: int) -> DistanceDistribution:
    """p(d) = 1 / n on the distances 0 .. n - 1."""
    check_whole("uniform distribution of distances", 1, n=n)
    return DistanceDistribution(torch.arange(n), torch.full((n,), 1 / n, dtype=DOUBLE))


def attention_profile(pattern: Float[Tensor, "head query key"]) -> DistanceDistribution:
    """p_h(d) = share of head h's attention that goes d tokens back, over all queries: a row per head."""
    profile = sums_along_diagonals(double(pattern))
    return DistanceDistribution(
        torch.arange(pattern.shape[-1], device=pattern.device), profile / profile.sum(-1, keepdim=True)
    )


def split_scores(
    q: Float[Tensor, "head query d_head"],
    k: Float[Tensor, "head key d_head"],
    rope: Rope,
    scale: float,
    distribution: DistanceDistribution | Complex[Tensor, "head plane_and_rest"],
    mean_key: Float[Tensor, "head d_head"] | Float[Tensor, "head query d_head"] | None = None,
) -> Split:
    """f_ij = scale <R_i q_i, R_j kbar>, g_ij = scale <Rbar q_i, k_j - kbar>, Rbar = E_p[R_d]: the least-squares fit
    f(q, d) + g(q, k) over queries, keys and independent distances from p.

    Args:
        q, k: before RoPE; fewer queries than keys are the last ones.
        distribution: p, or Rbar itself, as p enters only by Rbar. `point_mass(d0)` is the mean-key estimator.
        mean_key: kbar per head, or per head and query (`running_mean_key`); None for the mean of the given keys.

    Source: the public code of the first author of Han & Ji 2025 for the mean-key estimator with d0 = 1000; the optimal
    split for a distribution of distances, and the running mean, are ours.

    Example:
        >>> rope, q, k = Rope(torch.tensor([0.0], dtype=torch.float64)), torch.ones(1, 3, 2), torch.rand(1, 3, 2)
        >>> split = split_scores(q, k, rope, 1.0, torch.ones(1, 1) + 0j)  # a plane that never turns splits exactly
        >>> torch.allclose(split.scores, q @ k.mT)
        True
    """
    mean_key = k.mean(dim=1) if mean_key is None else mean_key
    mean_key = mean_key[:, None] if mean_key.ndim == 2 else mean_key
    zq, zk, zm = complex_planes(q, rope), complex_planes(k, rope), complex_planes(mean_key.to(k), rope)
    turn = turning_factors(torch.arange(k.shape[1], device=k.device), rope, q.shape[-1])
    # u(i - j) = u(i) conj(unit turn by j): the factor of scaling enters once
    position = real_coordinates(zq * zm.conj() * turn[-q.shape[1] :].to(zq)) @ real_coordinates(turn.sgn().to(zq)).mT
    rbar = distribution if isinstance(distribution, Tensor) else distribution.mean_turn(rope, q.shape[-1])
    turned = real_coordinates(zq * (rbar[:, None] if rbar.ndim == 2 else rbar).to(zq))
    content = turned @ real_coordinates(zk).mT - (turned * real_coordinates(zm)).sum(-1, keepdim=True)
    return Split(scale * position, scale * content)
