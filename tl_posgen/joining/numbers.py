"""Numbers of the head profiles: tensors in, tensors out; no model, no labels."""

import math

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from tl_posgen.arithmetic import COMPLEX_DOUBLE, double, summable

# Repeated random tokens: where a head attends when the only structure is that a block of tokens stands twice


def repeated_scores(
    pattern: Float[Tensor, "head query key"], start: int, period: int
) -> dict[str, Float[Tensor, " head"]]:
    r"""Means of S_{i, i-1} over i > start, and of S_{i, i-T} and S_{i, i-T+1} over i = start + T .. start + 2T - 1.

    S is the pattern of one of `copied_rows`, with `start` tokens before the first block, and T the period, 2 or
    more: attention to the previous token, to the earlier occurrence of the same token, and to the token after it.

    Source: the induction score is Olsson et al. 2022 (arXiv 2209.11895); all three as TransformerLens' head detector
    has them, on these diagonals.
    """
    first = {"previous_token": (1, 1), "duplicate_token": (period, period), "induction": (period - 1, period)}
    return {  # by distance, of queries so many tokens behind the first of the prompt's blocks
        name: pattern.diagonal(-distance, dim1=1, dim2=2)[:, start + behind - distance :].mean(-1)
        for name, (distance, behind) in first.items()
    }


# Head metrics that other papers define on queries, keys and attention


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
    z = _precise(z)
    return z.mean(1).abs().sum(-1) / z.abs().mean(1).sum(-1)


def frequency_entropy(
    q: Complex[Tensor, "head token plane"], k: Complex[Tensor, "head token plane"]
) -> Float[Tensor, " head"]:
    """- sum_m p_m ln p_m / ln M, p_m proportional to E|q_m| E|k_m|: 1 where all M planes weigh alike."""
    weights = _precise(q).abs().mean(1) * _precise(k).abs().mean(1)
    p = weights / weights.sum(-1, keepdim=True)
    return torch.special.entr(p).sum(-1) / math.log(p.shape[-1]) if p.shape[-1] > 1 else torch.nan * p[..., 0]


def slow_mean_energy(
    z: Complex[Tensor, "head token plane"], theta: Float[Tensor, " plane"], length: int
) -> Float[Tensor, " head"]:
    """sum_m |E z_m|^2 / sum_m E|z_m|^2, the numerator over planes that turn less than once in `length` tokens."""
    z = _precise(z)
    slow = double(theta).to(z.device) * length < 2 * math.pi
    return z.mean(1).abs().square()[:, slow].sum(-1) / z.abs().square().mean(1).sum(-1)


def _precise(z: Complex[Tensor, "head token plane"]) -> Complex[Tensor, "head token plane"]:
    """Return z in complex128, on the host where its device has no float64."""
    return summable(z).to(COMPLEX_DOUBLE)
