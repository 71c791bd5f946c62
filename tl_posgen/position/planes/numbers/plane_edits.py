"""Edits of magnitudes and phases of q or k in RoPE's planes: shuffled over tokens, replaced by means, or with noise."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double

Edit = Literal[
    "shuffle_magnitudes", "shuffle_phases", "shuffle_positions", "mean_magnitude", "mean_phase", "phase_noise"
]
EDITS: tuple[Edit, ...] = get_args(Edit)


@dataclass(frozen=True)
class Draw:
    """Random draw of one seed for the tokens of one prompt, shared by every edit, strength and choice of planes.

    Attributes:
        order: the tokens in random order; a share of them is shuffled, from the first on, so that the tokens of a lower
            strength are among those of a higher one.
        noise: standard normal. Heads that share a key have one row.
    """

    order: Int[Tensor, " token"]
    noise: Float[Tensor, "head token plane 2"]

    def cycle(self, share: float) -> Int[Tensor, " token"]:
        """Return source_t, the token from which token t receives its value.

        The first round(share * n) tokens of `order` form one cycle, so each of them receives from another; a cycle of
        one token moves nothing.
        """
        source = torch.arange(len(self.order), device=self.order.device)
        chosen = self.order[: round(share * len(self.order))]
        source[chosen] = chosen.roll(-1)
        return source


def edited(
    z: Complex[Tensor, "head token plane"],
    edit: Edit | str,
    strength: float,
    theta: Float[Tensor, " plane"],
    draw: Draw,
) -> Complex[Tensor, "head token plane"]:
    """Return z with all planes edited; E is the mean over tokens, s = `draw.cycle(strength)`.

    shuffle_magnitudes: |z_s(t)| e^{i arg z_t}. shuffle_phases: |z_t| e^{i arg z_s(t)}. All planes and heads of a token
    move together.
    shuffle_positions: z_t e^{i theta (s(t) - t)}, so that after RoPE token t has the position of token s(t). Magnitudes
    and phases before RoPE are those of t, so this changes position alone.
    mean_magnitude: |z'|^2 = (1 - strength) |z|^2 + strength E|z|^2: root mean square at 1; mean energy is kept.
    mean_phase: arg z' = arg E z + (1 - strength) arg(z conj E z): at 1 all have the phase of the mean vector. The
    position part depends on keys only by that vector; its phase weights tokens by their magnitude, unlike the circular
    mean of z / |z|.
    phase_noise: z e^{i strength noise}, independent over tokens, planes and heads.
    """
    match edit:
        case "shuffle_magnitudes":
            return torch.polar(z.abs()[:, draw.cycle(strength)], z.angle())
        case "shuffle_phases":
            return torch.polar(z.abs(), z.angle()[:, draw.cycle(strength)])
        case "mean_magnitude":
            square = z.abs().square()
            return torch.polar(torch.lerp(square, square.mean(1, keepdim=True), strength).sqrt(), z.angle())
        case "mean_phase":
            mean = z.mean(1, keepdim=True)
            return torch.polar(z.abs(), mean.angle() + (1 - strength) * (z * mean.conj()).angle())
        case "phase_noise":
            angles = strength * draw.noise[..., 0].to(z.real.dtype)
        case _:  # shuffle_positions
            source = draw.cycle(strength)
            steps = double(source - torch.arange(len(source), device=source.device))
            angles = steps[:, None] * double(theta).to(z.device)
    return z * torch.polar(torch.ones_like(angles), angles).to(z.dtype)


def random_rotation(
    z: Complex[Tensor, "head token plane"], energy: Float[Tensor, " head"], noise: Float[Tensor, "head token plane 2"]
) -> Complex[Tensor, "head token plane"]:
    r"""z'_t = cos(phi) z_t + sin(phi) |z_t| w_t, w_t a random unit vector with Re <w_t, z_t> = 0 over all planes.

    Hence |z'_t| = |z_t| and |z'_t - z_t|^2 = 4 sin^2(phi / 2) |z_t|^2, so sin^2(phi / 2) = energy / (4 E|z|^2) makes
    E|z' - z|^2 = energy exactly, E over tokens, of all planes. Such an angle exists for every edit here, since none
    changes a vector by more than twice its length in the mean square. Ours.
    """
    length = z.abs().square().sum(-1, keepdim=True)
    drawn = torch.view_as_complex(noise.to(z.real.dtype).contiguous())
    along = (drawn * z.conj()).real.sum(-1, keepdim=True) / length.clamp(min=torch.finfo(length.dtype).tiny)
    across = drawn - along * z
    across = across * (length / across.abs().square().sum(-1, keepdim=True)).sqrt()
    half = (energy / (4 * length[..., 0].mean(-1))).nan_to_num(0).clamp(0, 1)[:, None, None]  # sin^2(phi / 2)
    return (1 - 2 * half) * z + 2 * (half * (1 - half)).sqrt() * across


def edit_planes(
    z: Complex[Tensor, "head token plane"],
    edit: Edit | str,
    strength: float,
    theta: Float[Tensor, " plane"],
    draw: Draw,
    planes: Bool[Tensor, " plane"],
    *,
    control: bool = False,
) -> Complex[Tensor, "head token plane"]:
    """Return z with some planes edited, or (`control`) with a random rotation of all planes of the same energy.

    z are queries or keys before RoPE, theta radians per token. strength is a share of the tokens that are shuffled, or
    of the way to the mean, in [0, 1]; of noise its standard deviation in radians.
    """
    if not z.shape[1] or not strength:
        return z
    changed = torch.where(planes.to(z.device), edited(z, edit, strength, theta, draw), z)
    return random_rotation(z, (changed - z).abs().square().sum(-1).mean(1), draw.noise) if control else changed
