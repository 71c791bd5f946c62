"""Devices that a model can be loaded on."""

from typing import Any

import torch

from tl_posgen.errors import InputError
from tl_posgen.models.conversion.source import first_line


def usable(device: str | None) -> str:
    """Return the device, chosen where left open; InputError where torch does not know it or cannot compute there."""
    if device in (None, "auto"):
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if reason := why_unusable(device):
        here = " or ".join(map(repr, devices_here()))
        raise InputError(f"device {device!r} cannot be used ({reason}); give {here}, or leave it out")
    return device


def devices_here() -> list[str]:
    """Return "cpu" and the accelerators of this machine, as torch names them."""
    accelerators = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return ["cpu", *accelerators, *(["mps"] if torch.backends.mps.is_available() else [])]


def why_unusable(device: Any) -> str:
    """Say why nothing can be computed on a device; "" where something can."""
    try:
        known = torch.device(device)
    except (RuntimeError, TypeError):
        return "torch knows no device of that name"
    if known.type == "meta":
        return "it holds no numbers"
    if known.type == "cuda" and not torch.cuda.is_available():
        return "no CUDA device is here" if torch.backends.cuda.is_built() else "this torch is built without CUDA"
    if known.type == "mps" and not torch.backends.mps.is_available():
        return "no Apple GPU is here"
    if known.index is not None and known.type in ("cuda", "mps"):
        held = torch.cuda.device_count() if known.type == "cuda" else 1
        if known.index >= held:
            return f"this machine has {held} of them, numbered from 0"
    try:
        torch.zeros(1, device=known).item()
    except Exception as error:  # torch has several kinds for one mistake, and lists its backends in some
        return first_line(error).split(". ")[0]
    return ""
