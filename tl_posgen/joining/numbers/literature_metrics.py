"""Head metrics that other papers define on queries, keys and attention."""

import math

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from tl_posgen.arithmetic import COMPLEX_DOUBLE, double, summable


def massive_values(x: Float[Tensor, "head token d_head"]) -> Float[Tensor, " head"]:
    """max_d M_d / mean_d M_d, M_d = |x_{:,d}|_2 over tokens: 1 where all dimensions are alike.

    Example:
        >>> massive_values(torch.tensor([[[3.0, 0.0, 0.0], [3.0, 0.0, 0.0]]])).tolist()
        [3.0]
    """
    norms = double(x).norm(dim=1)
    return norms.amax(-1) / norms.mean(-1)


def concentration(z: Complex[Tensor, "head token plane"]) -> Float[Tensor, " head"]:
    """sum_m |E z_m| / sum_m E|z_m| over tokens: 1 where every plane holds one direction, 0 where directions cancel."""
    z = precise(z)
    return z.mean(1).abs().sum(-1) / z.abs().mean(1).sum(-1)


def frequency_entropy(
    q: Complex[Tensor, "head token plane"], k: Complex[Tensor, "head token plane"]
) -> Float[Tensor, " head"]:
    """- sum_m p_m ln p_m / ln M, p_m proportional to E|q_m| E|k_m|: 1 where all M planes weigh alike."""
    weights = precise(q).abs().mean(1) * precise(k).abs().mean(1)
    p = weights / weights.sum(-1, keepdim=True)
    return torch.special.entr(p).sum(-1) / math.log(p.shape[-1]) if p.shape[-1] > 1 else torch.nan * p[..., 0]


def slow_mean_energy(
    z: Complex[Tensor, "head token plane"], theta: Float[Tensor, " plane"], length: int
) -> Float[Tensor, " head"]:
    """sum_m |E z_m|^2 / sum_m E|z_m|^2, the numerator over planes that turn less than once in `length` tokens."""
    z = precise(z)
    slow = double(theta).to(z.device) * length < 2 * math.pi
    return z.mean(1).abs().square()[:, slow].sum(-1) / z.abs().square().mean(1).sum(-1)


def overlap(p: Float[Tensor, "head key"], other: Float[Tensor, "head key"]) -> Float[Tensor, " head"]:
    """sum_j min(p_j, p'_j) of two distributions: 1 where they are equal, 0 where they share no key."""
    return torch.minimum(p, other).sum(-1)


def precise(z: Complex[Tensor, "head token plane"]) -> Complex[Tensor, "head token plane"]:
    """Return z in complex128, on the host where its device has no float64."""
    return summable(z).to(COMPLEX_DOUBLE)
