"""Frequency bands of RoPE: high, medium and low, by thirds of the planes or by wavelength, or chosen planes."""

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.errors import InputError
from tl_posgen.rope.rotation import Rope

BANDS = ("high", "medium", "low")
PlaneChoice = Bool[Tensor, " plane"] | Sequence[int] | Callable[[Rope], Bool[Tensor, " plane"] | Sequence[int]]


def planes_of(rope: Rope, choice: PlaneChoice, name: str = "") -> Bool[Tensor, " plane"]:
    """Return chosen planes as a mask over the planes of one layer.

    Args:
        choice: a mask, a list of plane numbers, or a function from a Rope to one of these, which may choose none.
        name: the choice's name in messages.

    Raises:
        InputError: something else, a plane that does not exist, or a mask over other planes.

    Example:
        >>> rope = Rope(torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64))
        >>> planes_of(rope, [0, 2]).tolist(), planes_of(rope, lambda rope: rope.inv_freq < 0.5).tolist()
        ([True, False, True], [False, True, True])
    """
    chosen = booleans_as_mask(choice(rope) if callable(choice) else choice)
    n, of = len(rope.inv_freq), f"{name}: " if name else ""
    if isinstance(chosen, Sequence) and all(
        isinstance(plane, Integral) and not isinstance(plane, bool) for plane in chosen
    ):
        chosen = [int(plane) for plane in chosen]
        if not chosen and not callable(choice):
            raise InputError(f"{of}no planes chosen; choose from planes 0 to {n - 1}")
        if wrong := [plane for plane in chosen if not 0 <= plane < n]:
            raise InputError(f"{of}plane {wrong[0]} does not exist; there are planes 0 to {n - 1}")
        return torch.isin(torch.arange(n), torch.tensor(chosen, dtype=torch.long))
    if not isinstance(chosen, Tensor) or chosen.dtype != torch.bool:
        described = f"a tensor of {chosen.dtype}" if isinstance(chosen, Tensor) else repr(chosen)
        raise InputError(
            f"{of}{described} is no boolean for each plane; give such a tensor (bands_by_thirds(16)[0] of "
            "tl_posgen.rope.frequency_bands, say), a list of plane numbers, or a function from a Rope to one of these"
        )
    if chosen.shape != (n,):
        raise InputError(f"{of}{list(chosen.shape)} booleans, and there are {n} planes")
    return chosen


def booleans_as_mask(choice: Any) -> Any:
    """Return a list of booleans as a tensor; any other choice of planes as it is.

    Example:
        >>> booleans_as_mask([True, False]).tolist(), booleans_as_mask([1, 0])
        ([True, False], [1, 0])
    """
    is_booleans = isinstance(choice, Sequence) and choice and all(isinstance(plane, bool) for plane in choice)
    return torch.tensor(choice) if is_booleans else choice


def bands_by_thirds(n_planes: int) -> Bool[Tensor, "band=3 plane"]:
    """band(m) = floor(3m / P) for plane m of P: high, medium and low frequencies, a third of the planes each [ours]."""
    return 3 * torch.arange(n_planes) // n_planes == torch.arange(3)[:, None]


def bands_by_wavelength(rope: Rope, n: int, shortest: float = 32.0) -> Bool[Tensor, "band=3 plane"]:
    """Return bands by wavelength 2 pi / theta: high below `shortest` tokens, medium up to n, low above [ours]."""
    wavelength = 2 * torch.pi / double(rope.inv_freq)
    high, low = wavelength < shortest, wavelength > max(n, shortest)
    return torch.stack([high, ~high & ~low, low])
