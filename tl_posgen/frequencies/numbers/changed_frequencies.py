"""Frequencies after a change: p-RoPE, and random changes of the same total angle."""

from zlib import crc32

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.errors import InputError
from tl_posgen.rope.rotation import Rope, inverse_frequencies

USUAL_BASE = 10_000.0


def base_of(rope: Rope) -> float:
    """Return the base of the frequencies theta_0 base^(-m / n_planes), a whole number where it is one to rounding.

    Of frequencies that no base has (scaled already) it is that of the two fastest planes, and 10,000 where fewer than
    two planes turn.

    Example:
        >>> base_of(Rope(torch.tensor([1.0, 0.1])))
        100.0
    """
    theta, n = double(rope.inv_freq), len(rope.inv_freq)
    if n < 2 or not (theta[:2] > 0).all():
        return USUAL_BASE
    for last in (n - 1, 1):  # the slowest plane says it to the most digits
        base = float((theta[0] / theta[last]) ** (n / last))
        if last == 1 or torch.allclose(theta[0] * inverse_frequencies(2 * n, base).to(theta), theta, rtol=1e-5, atol=0):
            break
    return float(round(base)) if abs(base - round(base)) < 1e-6 * base else base


def fastest_alone(theta: Float[Tensor, " plane"], share: float) -> Float[Tensor, " plane"]:
    """p-RoPE: the share of planes that turn fastest keep their frequencies, the others turn no more.

    Source: Barbero et al. 2024 (arXiv 2410.06205); planes are counted as transformers' rule "proportional" counts them:
    int(share * planes) in float arithmetic, which keeps none of 49 planes at a share of 1 / 49.

    Example:
        >>> fastest_alone(torch.tensor([1.0, 0.1, 0.01, 0.001]), 0.5).tolist()
        [1.0, 0.10000000149011612, 0.0, 0.0]
    """
    kept = int(share * len(theta))
    turning = torch.zeros_like(theta, dtype=torch.bool)
    turning[theta.argsort(descending=True, stable=True)[:kept]] = True
    return torch.where(turning, theta, 0)


def change_elsewhere(
    theta: Float[Tensor, " plane"], changed: Float[Tensor, " plane"], seed: int
) -> Float[Tensor, " plane"]:
    """theta_m + (theta' - theta)_{pi(m)}: the same changes, signs and total angle sum_m |theta' - theta|, elsewhere.

    pi is a drawn ring through all planes, each of which takes the change of the one before it: none keeps its own. A
    frequency may become negative: such a plane turns backwards.

    Raises:
        InputError: one plane alone, which has no other to take its change.

    Source: ours.

    Example:
        >>> theta = torch.tensor([1.0, 0.5, 0.25])
        >>> float((change_elsewhere(theta, theta / 2, seed=1) - theta).abs().sum())
        0.875
    """
    if len(theta) == 1:
        raise InputError("one RoPE plane alone: no other plane can take its change, so there is no random change")
    ring = torch.randperm(len(theta), generator=torch.Generator().manual_seed(seed)).to(theta.device)
    found = theta.clone()
    found[ring] += (changed - theta)[ring.roll(1)]
    return found


def seed_of(seed: int, label: str) -> int:
    """Return the seed of what is drawn for a label: another for each, whatever other labels there are.

    Example:
        >>> seed_of(0, "ntk 2") == seed_of(0, "ntk 2"), seed_of(0, "ntk 2") == seed_of(0, "ntk 4")
        (True, False)
    """
    return crc32(f"{seed} {label}".encode())  # torch's generator of the CPU takes 32 bits


def one_a_plane(values: Float[Tensor, " plane"], rope: Rope, name: str) -> Float[Tensor, " plane"]:
    """Return values of which there is one a plane, on the device of the frequencies.

    Raises:
        InputError: another number of them, or one that is not finite.
    """
    if values.ndim != 1 or len(values) != len(rope.inv_freq) or not values.isfinite().all():
        raise InputError(
            f"{name}: {list(values.shape)} values for {len(rope.inv_freq)} RoPE planes; give one finite number a plane"
        )
    return values.to(rope.inv_freq)
