"""Arithmetic of sums, moments and angles: float64, on the host where the model's device has none."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor

DOUBLE = torch.float64
COMPLEX_DOUBLE = torch.complex128
MOST_DISTANCES = 2**20  # longer than any context, and still fits in memory
_WITHOUT_DOUBLE = ("mps",)  # types of devices: Metal has neither float64 nor complex128


def double_device(device: torch.device) -> torch.device:
    """Return the device on which sums over tensors of `device` are formed: itself, or the host if it has no float64."""
    return torch.device("cpu") if device.type in _WITHOUT_DOUBLE else device


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


SCORES_AT_ONCE = 2**18  # entries of a block of rows: fits the cache
_ON_ACCELERATOR = 2**25  # elements: 128 MiB of float32, 512 MiB of complex128


def elements_at_once(device: torch.device, in_cache: int) -> int:
    """Return how many elements to work on at once: on a CPU as many as fit its cache, elsewhere more, as an accelerator
    takes longer to start a kernel than to run a small one.

    Example:
        >>> elements_at_once(torch.device("cpu"), 2**18) == 2**18
        True
    """
    return in_cache if device.type == "cpu" else _ON_ACCELERATOR


def row_ranges(n: int, row: int, at_once: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of ranges that cover n rows of `row` elements: as many as have `at_once` elements, or one.

    Example:
        >>> list(row_ranges(5, row=10, at_once=20))
        [(0, 2), (2, 4), (4, 5)]
    """
    step = max(1, at_once // max(1, row))
    return ((start, min(start + step, n)) for start in range(0, n, step))


def query_ranges(n_heads: int, n: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of ranges of queries whose scores over all n keys, of all heads, are formed at once."""
    return row_ranges(n, n_heads * n, elements_at_once(device, SCORES_AT_ONCE))


TF32 = 2.0**-10  # its unit of rounding


def rounding_unit(dtype: torch.dtype, device: torch.device) -> float:
    """Return the unit of rounding of products on a device: the dtype's, but not below float32's; TF32's where torch is
    allowed it.

    Example:
        >>> rounding_unit(torch.bfloat16, torch.device("cpu"))
        0.0078125
    """
    unit = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    return max(unit, TF32) if device.type == "cuda" and dtype != DOUBLE and tf32_allowed() else unit


def tf32_allowed() -> bool:
    """Tell whether torch may round the factors of float32 products on CUDA to TF32."""
    matmul = torch.backends.cuda.matmul
    return matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else bool(matmul.allow_tf32)


@contextmanager
def full_precision() -> Iterator[None]:
    """Let products of float32 numbers be formed in float32 for as long as this is open, also where TF32 is allowed.

    Usable as a decorator. What was allowed before, by either of torch's interfaces, is allowed again afterwards: where
    threads overlap, when the last of them leaves. The setting is torch's, of the whole process: products of threads
    that have not entered are formed in float32 meanwhile, too.

    Example:
        >>> with full_precision():
        ...     torch.get_float32_matmul_precision()
        'highest'
    """
    with _LOCK:
        block = ExitStack()
        if not _BLOCKS:
            block.enter_context(_no_rounded_factors())
        _BLOCKS.append(block)
    try:
        yield
    finally:
        with _LOCK:  # the one that is left last is the first, whichever thread entered it
            _BLOCKS.pop().close()


_LOCK = Lock()
_BLOCKS: list[ExitStack] = []  # in which full precision is asked for, by all threads; the first ends it


@contextmanager
def _no_rounded_factors() -> Iterator[None]:
    places: list[Any] = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
    newer = [(place, place.fp32_precision) for place in places if hasattr(place, "fp32_precision")]  # from torch 2.9 on
    older = _older_precision()
    if older == "highest":
        for place, before in newer:
            if before not in ("none", "ieee"):
                place.fp32_precision = "ieee"
    else:
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if older != "highest":
            torch.set_float32_matmul_precision(older)
        for place, before in newer:
            if place.fp32_precision != before:
                place.fp32_precision = "none" if before == _inherited_precision() else before


def _inherited_precision() -> str:
    """Return what places without a precision of their own have, by torch's newer interface."""
    return torch.backends.fp32_precision  # pyright: ignore[reportAttributeAccessIssue]


def _older_precision() -> str:
    """Return torch's precision of float32 products; "highest" where it refuses to tell, as the newer interface is in
    use."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "highest"


def is_real_tensor(value: Any, ndim: int) -> bool:
    """Return whether a value is a real tensor with `ndim` axes."""
    return isinstance(value, Tensor) and value.ndim == ndim and not value.is_complex()
