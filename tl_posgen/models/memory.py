"""Estimates of memory, made before anything runs, as a process that exceeds its memory is killed; and memory given
back."""

import ctypes
import os
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from tl_posgen.errors import InputError

_MATRICES = 3  # scores, scores under the mask, pattern: what one layer of eager attention holds at once


def memory_of(device: torch.device) -> int | None:
    """Return the bytes of memory that a device has; None where that cannot be asked."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if device.type != "cpu" or not hasattr(os, "sysconf"):
        return None
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *control_group_limits()])


def control_group_limits(root: Path = Path("/")) -> list[int]:
    """Return the bytes that each control group of Linux (a container, a scheduler) allows this process."""
    groups, top = root / "proc/self/cgroup", root / "sys/fs/cgroup"
    lines = groups.read_text().splitlines() if groups.is_file() else []
    places = [(top, line[3:], "memory.max") for line in lines if line.startswith("0::")]
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") > 1):
        if "memory" in controllers.split(","):
            places.append((top / "memory", path, "memory.limit_in_bytes"))
    files = [
        directory / name
        for above, path, name in places
        for directory in ((above / path.strip("/") / "-").parents)
        if directory.is_relative_to(above)
    ]
    limits = [file.read_text().strip() for file in files if file.is_file()]
    return [int(value) for value in limits if value.isdigit()]  # "max" where there is none


def fits_pass(session: Any, n: int, **options: Any) -> bool:
    """Return whether `require_pass_fits` lets prompts of n tokens through."""
    with suppress(InputError):
        require_pass_fits(session, n, **options)
        return True
    return False


def require_pass_fits(session: Any, n: int, *, is_streamed: bool, matrices: int = 0) -> None:
    """Refuse prompts of n tokens whose forward pass, or what is measured of it, cannot fit: see `_need_of_pass`."""
    cfg, weight = session.model.cfg, next(session.model.parameters())
    memory, width, size = memory_of(weight.device), cfg.d_vocab + cfg.d_model, weight.element_size()
    what, factor, power = _need_of_pass(max(session.n_heads), width, size, is_streamed=is_streamed, matrices=matrices)
    if memory is not None and factor * n**power > memory:
        raise InputError(
            f"prompts of {n} tokens: {what} {factor * n**power / 1e9:.0f} GB, and there are {memory / 1e9:.0f} GB of "
            f"memory; give at most {int((memory / factor) ** (1 / power))} tokens"
        )


def _need_of_pass(
    n_heads: int, width: int, itemsize: int, *, is_streamed: bool, matrices: int = 0
) -> tuple[str, int, int]:
    """Estimate what a forward pass over n tokens holds at most: in words, and (a, b) of a n^b bytes.

    The scores of one layer, 3 n_heads n^2 numbers of the model's dtype or `matrices` n_heads n^2 in float32; where
    attention is streamed and no matrix is formed, width n: the logits and the residual stream that they are made of.

    Args:
        width: d_vocab + d_model.
        itemsize: bytes of a number of the model.
        matrices: how many [head, query, key] matrices are held of one layer, see `tl_posgen.Measure.matrices`.

    Example:
        >>> _need_of_pass(n_heads=2, width=100, itemsize=4, is_streamed=False)
        ('attention of one layer (2 heads) needs', 24, 2)
    """
    if per_pair := max(matrices * max(itemsize, 4), 0 if is_streamed else _MATRICES * itemsize):
        return f"attention of one layer ({n_heads} heads) needs", per_pair * n_heads, 2
    return "the logits need", itemsize * width, 1


def release(model: Any) -> None:
    """Give the memory of all weights back. The model is of no use afterwards: only for one that is ours."""
    for weight in model.parameters():
        weight.data = torch.empty(0, dtype=weight.dtype, device=weight.device)
    trim()


def is_released(model: Any) -> bool:
    """Tell whether `release` has been called on this model."""
    return not any(weight.numel() for weight in model.parameters())


_trimmed = 0.0  # when that was last done


def trim(every: float = 0.0) -> None:
    """Hand freed memory to the system: glibc keeps blocks below 32 MB, most weights and scores among them, for itself.
    It takes 5 to 30 ms: with `every` once in so many seconds at most."""
    global _trimmed
    if every and monotonic() - _trimmed < every:
        return
    _trimmed = monotonic()
    with suppress(OSError, AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
