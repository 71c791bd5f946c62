"""Reading a checkpoint's weights once, tensor by tensor, and giving memory of weights back."""

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from tl_posgen.errors import ModelError
from tl_posgen.models.conversion.source import COMPUTED

INDEX = "model.safetensors.index.json"
MOST_FREED = 2**22  # bytes of freed weights that may wait for `trim`
_trimmed = 0.0  # when that was last done


class Stored:
    """One tensor of a file, read when transformers asks for it.

    Read, not mapped: of a mapped file every page that was looked at counts as memory until the last tensor is let go.
    """

    def __init__(self, path: Path, name: str, file: Any, broken: list[str]):
        self.path, self.name, self.file, self.broken = path, name, file, broken

    def __getitem__(self, part: Any) -> Tensor:
        tensor: Tensor = self.file.get_slice(self.name)[part]
        if fault := fault_of(self.name, tensor):
            self.broken.append(f"{self.path}: {self.name} {fault}")
        return tensor


def fault_of(name: str, tensor: Tensor) -> str:
    """Say that a weight is quantised, or holds NaN or inf; "" where neither."""
    if not COMPUTED.search(name) and (not tensor.is_floating_point() or tensor.element_size() < 2):
        dtype = str(tensor.dtype).removeprefix("torch.")
        return f"is quantised ({dtype}); save the model in float32 or bfloat16"
    if not tensor.is_floating_point() or not tensor.numel():
        return ""
    low, high = tensor.aminmax()  # NaN is the least and the largest
    if low.isfinite() and high.isfinite():
        return ""
    return f"holds {'NaN' if low.isnan() else 'inf'}; the weights are broken, load another checkpoint"


def files_of(directory: Path) -> list[Path]:
    """Return the files that hold the weights: model.safetensors, or those that the index names."""
    whole, index = directory / "model.safetensors", directory / INDEX
    if whole.is_file() or not index.is_file():
        return [whole]
    with readable(index):
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        return [directory / name for name in names]


@dataclass(frozen=True)
class StoredWeights:
    """Tensors of a directory by name, not yet read, and what is wrong with those that were read."""

    tensors: dict[str, Stored]
    broken: list[str]

    def require_finite(self) -> None:
        """Refuse weights with NaN or inf among those that were read; names the tensor."""
        if self.broken:
            raise ModelError(min(self.broken))


def stored_weights(directory: Path) -> StoredWeights:
    """Return every tensor of a directory; ModelError for a file that is missing or is not safetensors."""
    from safetensors import safe_open

    weights = StoredWeights({}, [])
    for path in files_of(directory):
        with readable(path):
            file: Any = safe_open(path, framework="pt", backend="pread")
            names = file.keys()
            weights.tensors.update({name: Stored(path, name, file, weights.broken) for name in names})
    return weights


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise a ModelError that names the file of weights, or their index, for whatever is wrong with it."""
    try:
        yield
    except Exception as error:  # safetensors, json and the system each have their own
        kind = "index of safetensors files" if path.name == INDEX else "safetensors file"
        raise ModelError(f"{path}: not a readable {kind} ({error}); download it again") from error


def require_layers(directory: Path, config: Any, weights: StoredWeights) -> None:
    """Refuse more layers than there are tensors, before so many are made."""
    n_layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if n_layers > len(weights.tensors):
        wrong = f"config.json says {n_layers} layers, and the weights hold {len(weights.tensors)} tensors"
        raise ModelError(f"{directory}: {wrong}; they do not belong together")


def release(model: Any) -> None:
    """Give the memory of all weights back. The model is of no use afterwards: only for one that is ours."""
    for weight in model.parameters():
        weight.data = torch.empty(0, dtype=weight.dtype, device=weight.device)
    trim()


def trim(every: float = 0.0) -> None:
    """Hand freed memory to the system: glibc keeps blocks below 32 MB, most weights and scores among them, for itself.
    It takes 5 to 30 ms, so not after every weight (`MOST_FREED`), and with `every` once in so many seconds at most."""
    global _trimmed
    if every and monotonic() - _trimmed < every:
        return
    _trimmed = monotonic()
    with suppress(OSError, AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def is_released(model: Any) -> bool:
    """Tell whether `release` has been called on this model."""
    return not any(weight.numel() for weight in model.parameters())
