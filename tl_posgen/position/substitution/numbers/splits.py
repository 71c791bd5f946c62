"""Distributions of distances for splits of scores, mean keys per query, and what a split leaves or replaces."""

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float, Real
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double
from tl_posgen.errors import InputError
from tl_posgen.position.decomposition.numbers.option_checks import check_share, check_whole, is_number
from tl_posgen.rope.planes import turning_factors
from tl_posgen.rope.rotation import Rope, complex_planes, real_coordinates
from tl_posgen.rope.splits import DistanceDistribution

Threshold = Literal["head", "layer"]


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
