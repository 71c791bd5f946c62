"""RoPE as geometry: the planes of a head and the angle by which each rotates per token."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Complex, Float, Real
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double
from tl_posgen.errors import InputError

Pairing = Literal["half", "adjacent"]


@dataclass(frozen=True)
class Rope:
    r"""z_m -> scaling * z_m * exp(i theta_m p): plane m of a query or key at position p is rotated by theta_m p.

    Attributes:
        inv_freq: theta_m in radians per token, after any rope scaling (Llama-3, YaRN, linear, NTK). float64.
        pairing: the two coordinates of plane m. "half": (m, m + rotary_dim / 2), as in Llama, GPT-NeoX and Qwen.
            "adjacent": (2m, 2m + 1), as in GPT-J.
        scaling: factor on the rotated q and on the rotated k (transformers' `attention_scaling`; YaRN uses it).

    Coordinates from rotary_dim on are not rotated (partial rotary). `Rope()` has no plane: a head without RoPE.

    Raises:
        InputError: inv_freq that is no tensor.

    Source: Su et al. 2021, "RoFormer", section 3.2; the pairing is that of the implementations named.

    Example:
        >>> rope = Rope(inverse_frequencies(rotary_dim=4, base=100.0))
        >>> rope.inv_freq.tolist(), rope.rotary_dim
        ([1.0, 0.1], 4)
    """

    inv_freq: Float[Tensor, " plane"] = field(default_factory=lambda: torch.zeros(0, dtype=DOUBLE, device="cpu"))
    pairing: Pairing = "half"
    scaling: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.inv_freq, Tensor):
            raise InputError(f"Rope: inv_freq = {self.inv_freq!r}: give a tensor of angles in radians per token")

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.inv_freq)


def inverse_frequencies(rotary_dim: int, base: float = 10_000.0) -> Float[Tensor, " plane"]:
    r"""theta_m = base^(-2m / rotary_dim), m = 0 .. rotary_dim / 2 - 1, in radians per token."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=DOUBLE, device="cpu") / rotary_dim
    return base**-exponents


def to_planes(x: Float[Tensor, "*batch d_head"], rope: Rope) -> Complex[Tensor, "*batch plane"]:
    """Return the rotary coordinates of x as one complex number per plane, without the unrotated remainder."""
    x = at_least_float32(x[..., : rope.rotary_dim])
    if rope.pairing == "half":
        real, imag = x.chunk(2, dim=-1)
    else:
        real, imag = x[..., 0::2], x[..., 1::2]
    return torch.complex(real.contiguous(), imag.contiguous())


def from_planes(
    z: Complex[Tensor, "*batch plane"], remainder: Float[Tensor, "*#batch rest"], rope: Rope
) -> Float[Tensor, "*batch d_head"]:
    """Invert `to_planes` and append the unrotated remainder."""
    real = [z.real, z.imag] if rope.pairing == "half" else [torch.view_as_real(z).flatten(-2)]
    return torch.cat([*real, remainder.expand(*z.shape[:-1], -1)], dim=-1)


def complex_planes(x: Float[Tensor, "*batch d_head"], rope: Rope) -> Complex[Tensor, "*batch plane_and_rest"]:
    """Return all of x as complex numbers: the rotary planes, then the unrotated remainder paired up as further planes.

    <x, y> = Re sum_m z^x_m conj(z^y_m) over all planes (an odd last coordinate is padded with zero), so every formula
    for planes also holds for partial rotary heads.
    """
    remainder = at_least_float32(x[..., rope.rotary_dim :])
    if remainder.shape[-1] % 2:
        remainder = torch.nn.functional.pad(remainder, (0, 1))
    real, imag = remainder.chunk(2, dim=-1)
    return torch.cat([to_planes(x, rope), torch.complex(real.contiguous(), imag.contiguous())], dim=-1)


def from_complex_planes(
    z: Complex[Tensor, "*batch plane_and_rest"], rope: Rope, d_head: int
) -> Float[Tensor, "*batch d_head"]:
    """Invert `complex_planes`.

    Example:
        >>> x, rope = torch.arange(10.0).reshape(2, 5), Rope(torch.ones(1, dtype=torch.float64))
        >>> torch.equal(from_complex_planes(complex_planes(x, rope), rope, 5), x)
        True
    """
    n = len(rope.inv_freq)
    remainder = torch.cat([z[..., n:].real, z[..., n:].imag], -1)[..., : d_head - rope.rotary_dim]
    return from_planes(z[..., :n], remainder, rope)


def real_coordinates(z: Complex[Tensor, "*batch plane"]) -> Float[Tensor, "*batch two_planes"]:
    """Return complex planes as real numbers: <real_coordinates(a), real_coordinates(b)> = Re sum_m a_m conj(b_m)."""
    return torch.view_as_real(z.resolve_conj()).flatten(-2)


def complex_frequencies(rope: Rope, d_head: int) -> Float[Tensor, " plane_and_rest"]:
    """Return theta of every plane of `complex_planes`: the rotary frequencies, then zeros for the remainder."""
    zeros = torch.zeros((d_head - rope.rotary_dim + 1) // 2, device=rope.inv_freq.device)
    return torch.cat([double(rope.inv_freq), zeros])


def rotate(
    x: Float[Tensor, "*batch #pos d_head"], positions: Real[Tensor, " pos"], rope: Rope
) -> Float[Tensor, "*batch pos d_head"]:
    """R_p x: every plane rotated by theta_m p and scaled.

    Args:
        x: one vector per position, or one vector that is rotated to every position.
        positions: may be fractional; angles are computed in float64.

    Example:
        >>> rope = Rope(torch.tensor([torch.pi / 2], dtype=torch.float64))
        >>> rotate(torch.tensor([[1.0, 0.0]]), torch.tensor([1.0]), rope).round(decimals=6).tolist()
        [[0.0, 1.0]]
    """
    return rotate_by(x, turns_at(positions, rope), rope)


def turns_at(positions: Real[Tensor, " pos"], rope: Rope) -> Complex[Tensor, "pos plane"]:
    """Return scaling exp(i theta_m p), by which plane m at position p is rotated; angles are computed in float64."""
    angles = double(positions)[:, None]
    angles = angles * double(rope.inv_freq).to(angles.device)
    return torch.polar(torch.full_like(angles, rope.scaling), angles)


def rotate_by(
    x: Float[Tensor, "*batch #pos d_head"], turns: Complex[Tensor, "pos plane"], rope: Rope
) -> Float[Tensor, "*batch pos d_head"]:
    """Return x rotated as `rotate` does, by what `turns_at` gives for the positions."""
    if not rope.rotary_dim:
        return at_least_float32(x).expand(*x.shape[:-2], len(turns), -1)
    z = to_planes(x, rope)
    return from_planes(z * turns.to(z.dtype).to(z.device), x[..., rope.rotary_dim :], rope)


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
