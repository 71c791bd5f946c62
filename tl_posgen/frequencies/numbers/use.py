"""Which planes of RoPE a head uses, which of them makes half a turn within the context, and the phase in it."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, row_ranges

_AT_ONCE = 2**18  # cosines


def plane_use(magnitude: Float[Tensor, "side=2 *head plane"]) -> Float[Tensor, "*head plane"]:
    """C_m = E|z^q_m| E|z^k_m| / sum_m E|z^q_m| E|z^k_m|: the share of each plane in the bound on a head's scores.

    Source: the product of mean norms is what Barbero et al. 2024 (arXiv 2410.06205) and others read; its share over
    planes: ours.

    Example:
        >>> plane_use(torch.tensor([[1.0, 2.0], [1.0, 1.5]])).tolist()
        [0.25, 0.75]
    """
    product = magnitude[0] * magnitude[1]
    return product / product.sum(-1, keepdim=True)


def half_turn_plane(theta: Float[Tensor, " plane"], reach: int | float) -> int | None:
    """Return the number of the fastest plane with 0 < theta_m reach <= pi; None where every plane that turns makes more
    than half a turn within so many tokens.

    Source: ours.

    Example:
        >>> half_turn_plane(torch.tensor([1.0, 0.1, 0.01]), 100), half_turn_plane(torch.tensor([1.0]), 100)
        (2, None)
    """
    slow = theta.masked_fill((theta <= 0) | (theta * reach > torch.pi), -1)
    return int(slow.argmax()) if len(slow) and slow.max() > 0 else None


@lru_cache(maxsize=64)
def first_negative_distance(theta: tuple[float, ...], reach: int) -> int:
    """min {d >= 1: sum_m cos(theta_m d) < 0}, at most `reach`: from there on a query may prefer a random key to one
    like itself, so that the base of RoPE bounds the context.

    Args:
        theta: of the planes that turn, in radians per token.

    Source: Men et al. 2024 (arXiv 2405.14591), as we read it.

    Example:
        >>> first_negative_distance((1.0,), 100), first_negative_distance((0.001,), 100)
        (2, 100)
    """
    planes = torch.tensor(theta, dtype=DOUBLE, device="cpu")
    for start, stop in row_ranges(reach, len(theta), _AT_ONCE):
        distances = torch.arange(start + 1, stop + 1, dtype=DOUBLE, device="cpu")
        below = ((distances[:, None] * planes).cos().sum(-1) < 0).nonzero()
        if len(below):
            return start + 1 + int(below[0])
    return reach


def step_of(n_planes: int) -> int:
    """max(1, P // 32): how many planes of P count as one step.

    Example:
        >>> step_of(16), step_of(128)
        (1, 4)
    """
    return max(1, n_planes // 32)


@dataclass(frozen=True)
class LongestPlane:
    """The plane that a head uses most, and what its mean query and mean key make of it.

    Attributes:
        plane: its number.
        phase: phi = arg E z^q - arg E z^k in (-pi, pi], so that this plane adds A cos(theta D + phi) to the score at
            distance D: -A sin(theta D) where phi is a quarter turn.
        alignment: |E z^q| |E z^k| / (E|z^q| E|z^k|), 1 where all queries and all keys stand in one phase each.
        amplitude: A = |E z^q| |E z^k|, in the units of the score without its scale.
    """

    plane: Int[Tensor, " head"]
    phase: Float[Tensor, " head"]
    alignment: Float[Tensor, " head"]
    amplitude: Float[Tensor, " head"]


def longest_plane(
    magnitude: Float[Tensor, "side=2 head plane"],
    mean: Complex[Tensor, "side=2 head plane"],
    turns: Bool[Tensor, " plane"],
) -> LongestPlane:
    """argmax_m E|z^q_m| E|z^k_m| over the planes that turn, with phase, alignment and amplitude there.

    Source: phase and half a turn: ours; that the longest plane stands at an angle of its own is a claim of Jonasson
    2025 (arXiv 2503.01832).
    """
    product = magnitude[0] * magnitude[1]
    plane = product.masked_fill(~turns, -1).argmax(-1, keepdim=True)
    size = product.gather(-1, plane)[..., 0]
    z = (mean[0] * mean[1].conj()).gather(-1, plane)[..., 0]
    return LongestPlane(plane[..., 0], z.angle(), z.abs() / size, z.abs())
