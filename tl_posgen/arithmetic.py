"""Arithmetic of sums, moments and angles: float64, on the host where the model's device has none."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


TF32 = 2.0**-10  # its unit of rounding


def rounding_unit(dtype: torch.dtype, device: torch.device) -> float:
    """Return the unit of rounding of products on a device: the dtype's, but not below float32's; TF32's where torch is
    allowed it.

    Example:
        >>> rounding_unit(torch.bfloat16, torch.device("cpu"))
        0.0078125
    """
    unit = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    return max(unit, TF32) if device.type == "cuda" and tf32_allowed() else unit


def tf32_allowed() -> bool:
    """Tell whether torch may round the factors of float32 products on CUDA to TF32."""
    matmul = torch.backends.cuda.matmul
    return matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else bool(matmul.allow_tf32)


@contextmanager
def full_precision() -> Iterator[None]:
    """Let products of float32 numbers be formed in float32 for as long as this is open, also where TF32 is allowed.

    Usable as a decorator. What was allowed before is allowed again afterwards.

    Example:
        >>> with full_precision():
        ...     torch.get_float32_matmul_precision()
        'highest'
    """
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # set by the newer interface alone, which the older one refuses to tell
        with _ieee_products():
            yield
        return
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _ieee_products() -> Iterator[None]:
    """Set torch's newer interface (`fp32_precision`, from 2.9 on) to float32 on CUDA and on the CPU."""
    backends: Any = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before = [one.fp32_precision for one in backends]
    for one in backends:
        one.fp32_precision = "ieee"
    try:
        yield
    finally:
        for one, was in zip(backends, before, strict=True):
            one.fp32_precision = was
