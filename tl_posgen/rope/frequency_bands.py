"""Frequency bands of RoPE: high, medium and low, by thirds of the planes or by wavelength."""

import torch
from jaxtyping import Bool
from torch import Tensor

from tl_posgen.rope.rotation import Rope

BANDS = ("high", "medium", "low")


def bands_by_thirds(n_planes: int) -> Bool[Tensor, "band=3 plane"]:
    """Plane m of P is in band floor(3m / P): high, medium and low frequencies, a third of the planes each [ours].

    Example:
        >>> bands_by_thirds(4).int().tolist()
        [[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    """
    return 3 * torch.arange(n_planes) // n_planes == torch.arange(3)[:, None]


def bands_by_wavelength(rope: Rope, n: int, shortest: float = 32.0) -> Bool[Tensor, "band=3 plane"]:
    r"""By wavelength 2 pi / theta in tokens: high < `shortest` <= medium <= n < low, n the length of the prompt [ours].

    Example:
        >>> bands_by_wavelength(Rope(torch.tensor([1.0, 0.1, 0.001], dtype=torch.float64)), n=512).int().tolist()
        [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    """
    wavelength = 2 * torch.pi / rope.inv_freq.double()
    high, low = wavelength < shortest, wavelength > max(n, shortest)
    return torch.stack([high, ~high & ~low, low])
