"""Splits of scores into position and content, f(q_i, i - j) + g(q_i, k_j), for distributions of distances."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Complex, Float, Real
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double
from tl_posgen.errors import InputError
from tl_posgen.position.decomposition.numbers.option_checks import check_share, check_whole, is_number
from tl_posgen.rope.planes import turning_factors
from tl_posgen.rope.rotation import Rope, complex_planes, real_coordinates

Threshold = Literal["head", "layer"]


@dataclass(frozen=True)
class DistanceDistribution:
    """Distribution p(d) of distances over which the content part is averaged.

    Attributes:
        distances: in tokens, whole or fractional.
        weights: not negative, adding up to 1; one row for all heads, a row per head, or per head and query.
    """

    distances: Real[Tensor, " distance"]
    weights: Float[Tensor, "*rows distance"]

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
    if not is_number(distance):
        raise InputError(f"dummy distance {distance!r}: distances must be 0 or more")
    return DistanceDistribution(torch.tensor([float(distance)]), torch.ones(1, dtype=DOUBLE))


WIDEST = 2**24  # tokens: no prompt is longer


def triangle(width: int | float | Real[Tensor, " head"]) -> DistanceDistribution:
    """p(d) proportional to max(width - d, 0) on whole distances; width 1 is the point mass at 0.

    Args:
        width: one for all heads, or one per head.

    Example:
        >>> triangle(2).weights.mul(3).round().tolist()
        [2.0, 1.0]
    """
    known = isinstance(width, Tensor) and width.numel() and not width.is_complex()
    widths = torch.as_tensor(width if known else float(width) if is_number(width) else 0, dtype=DOUBLE)
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
    n = pattern.shape[-1]
    query, key = torch.tril_indices(n, n, device=pattern.device)
    profile = pattern.new_zeros(len(pattern), n, dtype=DOUBLE)
    profile = profile.index_add(1, query - key, double(pattern[:, query, key]))
    return DistanceDistribution(torch.arange(n, device=pattern.device), profile / profile.sum(-1, keepdim=True))


def positional_profile(
    q: Float[Tensor, "head pos d_head"], k: Float[Tensor, "head pos d_head"], rope: Rope, scale: float
) -> DistanceDistribution:
    """p(d | q_i) = softmax_d f(q_i, d), d = 0 .. n - 1: attention of query i by position alone, a row per query. Ours.

    With p a function of the query, f + g still is one of (q, d) plus one of (q, k), and each query's least-squares fit.
    """
    n = q.shape[1]
    zq, zm = complex_planes(q, rope), complex_planes(k.mean(dim=1, keepdim=True), rope)
    turn = turning_factors(torch.arange(n, device=q.device), rope, q.shape[-1]).to(zq)
    f = scale * real_coordinates(zq * zm.conj()) @ real_coordinates(turn.conj()).mT
    return DistanceDistribution(torch.arange(n, device=q.device), f.softmax(-1))


def running_mean_key(
    k: Float[Tensor, "head pos d_head"], window: int | None = None
) -> Float[Tensor, "head pos d_head"]:
    """kbar_i = mean of the keys that query i sees: those up to i, or the last `window` of them."""
    total = double(k).cumsum(dim=1)
    seen = torch.arange(1, k.shape[1] + 1, device=k.device)
    if window is not None and window < k.shape[1]:
        total = torch.cat([total[:, :window], total[:, window:] - total[:, :-window]], dim=1)
        seen = seen.clamp(max=window)
    return (total / seen[:, None]).to(k.dtype)


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
        >>> split = split_scores(q, k, rope, 1.0, point_mass(1000))  # a plane that never turns splits exactly
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


def add_residual(
    approximate: Float[Tensor, "head query key"], exact: Float[Tensor, "head query key"], share: int | float
) -> Float[Tensor, "head query key"]:
    """approximate + share (exact - approximate): 0 drops the residual, 1 is exact; entries at -inf stay approximate."""
    return torch.where(exact.isfinite(), approximate + share * (exact - approximate), approximate)


def below_quantile(
    scores: Float[Tensor, "head query key"],
    visible: Bool[Tensor, "query key"],
    gamma: int | float = 0.97,
    threshold: Threshold | str = "head",
) -> Bool[Tensor, "head query key"]:
    """W_ij <= the floor(gamma n)-th smallest of n visible scores; gamma 1 selects all visible ones, 0 none.

    The n scores are all of a head ("head"), or the last row of the first given head, for the whole layer ("layer").

    Source: the public code of the first author of Han & Ji 2025 for "layer", with head 0 (gamma = .97, layers from 4
    on). "head", and the treatment of ties and of ranks between two scores, are ours.

    Example:
        >>> scores, visible = torch.tensor([[[0.0, 0.0], [1.0, 2.0]], [[3.0, 0.0], [0.0, 1.0]]]), torch.ones(2, 2) > 0
        >>> below_quantile(scores, visible.tril(), 0.5, "layer").int().tolist()  # 1 is the smaller of [1, 2]
        [[[1, 0], [1, 0]], [[0, 0], [1, 1]]]
    """
    check_share("gamma", gamma)
    if gamma == 1:
        return visible.expand_as(scores)
    seen = scores[:, visible] if threshold == "head" else scores[:1, -1, visible[-1]]
    rank = int(gamma * seen.shape[1] + 1e-9)
    if rank == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    return (scores <= seen.kthvalue(rank, dim=1).values[:, None, None]) & visible


def attention_kl(
    exact: Float[Tensor, "head query key"],
    approximate: Float[Tensor, "head query key"],
    visible: Bool[Tensor, "query key"],
) -> Float[Tensor, "head query"]:
    """KL(softmax(exact_i) || softmax(approximate_i)) in nats over the visible keys of each query, in float64."""
    log_p = double(exact).masked_fill(~visible, -torch.inf).log_softmax(-1)
    log_q = double(approximate).masked_fill(~visible, -torch.inf).log_softmax(-1)
    gap = torch.where(visible, log_p - log_q, 0.0)
    return (log_p.exp() * gap).sum(-1)
