"""Arithmetic of sums, moments and angles: float64, on the host where the model's device has none."""

import torch
from torch import Tensor

DOUBLE = torch.float64
COMPLEX_DOUBLE = torch.complex128
WITHOUT_DOUBLE = ("mps",)  # types of devices: Metal has neither float64 nor complex128


def double_device(device: torch.device) -> torch.device:
    """Return the device on which sums over tensors of `device` are formed: itself, or the host if it has no float64."""
    return torch.device("cpu") if device.type in WITHOUT_DOUBLE else device


def summable(x: Tensor) -> Tensor:
    """Return x on a device that has float64, in its own dtype."""
    return x.to(double_device(x.device))


def double(x: Tensor) -> Tensor:
    """Return x in float64, on the host where its device has no float64.

    Example:
        >>> double(torch.ones(2)).dtype
        torch.float64
    """
    return summable(x).to(DOUBLE)
