"""Frequency bands of RoPE: high, medium and low, by thirds of the planes or by wavelength, or chosen planes."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.errors import InputError
from tl_posgen.rope.rotation import Rope

BANDS = ("high", "medium", "low")
Band = Bool[Tensor, " plane"] | Sequence[int] | Callable[[Rope], Tensor]


def band_of(band: Band | None, rope: Rope) -> Bool[Tensor, " plane"] | None:
    """Return a band as a mask over the planes of one layer; None stays None.

    Args:
        band: a mask, a list of plane numbers, or a function from a Rope to one of these.

    Raises:
        InputError: something else, or a plane that does not exist.

    Example:
        >>> rope = Rope(torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64))
        >>> band_of([0, 2], rope).tolist(), band_of([True, False, True], rope).tolist()
        ([True, False, True], [True, False, True])
    """
    chosen = band(rope) if callable(band) and not isinstance(band, Tensor) else band
    if isinstance(chosen, Sequence) and chosen and all(type(plane) is bool for plane in chosen):
        return torch.tensor(chosen)
    if isinstance(chosen, Sequence) and chosen and all(type(plane) is int for plane in chosen):
        n = len(rope.inv_freq)
        if wrong := [plane for plane in chosen if not 0 <= plane < n]:
            raise InputError(f"band: plane {wrong[0]} does not exist; there are planes 0 to {n - 1}")
        return torch.isin(torch.arange(n), torch.tensor(chosen))
    if chosen is not None and not (isinstance(chosen, Tensor) and chosen.dtype == torch.bool):
        described = f"a tensor of {chosen.dtype}" if isinstance(chosen, Tensor) else repr(chosen)
        raise InputError(
            f"band: {described} is no boolean for each plane; give such a tensor (bands_by_thirds(16)[0] of "
            "tl_posgen.rope.frequency_bands, say), a list of plane numbers, or a function from a Rope to one of these"
        )
    return chosen


def bands_by_thirds(n_planes: int) -> Bool[Tensor, "band=3 plane"]:
    """band(m) = floor(3m / P) for plane m of P: high, medium and low frequencies, a third of the planes each [ours]."""
    return 3 * torch.arange(n_planes) // n_planes == torch.arange(3)[:, None]


def bands_by_wavelength(rope: Rope, n: int, shortest: float = 32.0) -> Bool[Tensor, "band=3 plane"]:
    """Return bands by wavelength 2 pi / theta: high below `shortest` tokens, medium up to n, low above [ours]."""
    wavelength = 2 * torch.pi / double(rope.inv_freq)
    high, low = wavelength < shortest, wavelength > max(n, shortest)
    return torch.stack([high, ~high & ~low, low])
