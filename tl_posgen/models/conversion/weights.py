"""Headers and values of a checkpoint's weights, looked at; and memory of weights, given back."""

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tl_posgen.errors import ModelError
from tl_posgen.models.conversion.source import COMPUTED

_INDEX = "model.safetensors.index.json"
_MOST_FREED = 2**22  # bytes of freed weights that may wait for `trim`
_trimmed = 0.0  # when that was last done


class _Header(NamedTuple):
    """Dtype, as safetensors calls it, and shape of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]


def headers(directory: Path) -> dict[str, _Header]:
    """Return the header of every tensor of a directory; ModelError for a file that is missing or is not safetensors."""
    from safetensors import safe_open

    paths, found = [directory / "model.safetensors"], dict[str, _Header]()
    if not paths[0].is_file() and (index := directory / _INDEX).is_file():
        with _readable(index):
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            paths = [directory / name for name in sorted(names)]
    for path in paths:
        with _readable(path), safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            found |= {name: _Header(one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}
    return found


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise a ModelError that names the file of weights, or their index, for whatever is wrong with it."""
    try:
        yield
    except Exception as error:  # safetensors, json and the system each have their own
        kind = "index of safetensors files" if path.name == _INDEX else "safetensors file"
        raise ModelError(f"{path}: not a readable {kind} ({error}); download it again") from error


def require_usable(directory: Path, config: Any) -> None:
    """Refuse quantised weights, and more layers than there are tensors, before so many are made."""
    stored = headers(directory)
    for name, (dtype, _) in stored.items():
        if not COMPUTED.search(name) and dtype not in ("F64", "F32", "F16", "BF16"):
            raise ModelError(f"{directory}: {name} is quantised ({dtype}); save the model in float32 or bfloat16")
    n_layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if n_layers > len(stored):
        wrong = f"config.json says {n_layers} layers, and the weights hold {len(stored)} tensors"
        raise ModelError(f"{directory}: {wrong}; they do not belong together")


def require_finite(place: Path, hf_model: Any) -> None:
    """Refuse weights with NaN or inf; names the tensor."""
    for name, weight in hf_model.named_parameters():
        if not weight.is_meta and weight.numel():
            low, high = weight.detach().aminmax()  # NaN is the least and the largest
            if not (low.isfinite() and high.isfinite()):
                kind = "NaN" if low.isnan() else "inf"
                raise ModelError(f"{place}: {name} holds {kind}; the weights are broken, load another checkpoint")


def move_weights(state: dict[str, Tensor], model: Any) -> None:
    """Copy every tensor into the model's own of that name, and free it."""
    own, freed = model.state_dict(), 0
    with torch.no_grad():
        for name in [name for name in state if name in own]:
            weight = state.pop(name)
            if weight.shape != own[name].shape:
                raise ValueError(f"{name} is {list(weight.shape)}, and not {list(own[name].shape)}")
            own[name].copy_(weight)
            freed += weight.nbytes
            del weight
            if freed > _MOST_FREED:
                trim()
                freed = 0
    trim()


def release(model: Any) -> None:
    """Give the memory of all weights back. The model is of no use afterwards: only for one that is ours."""
    for weight in model.parameters():
        weight.data = torch.empty(0, dtype=weight.dtype, device=weight.device)
    trim()


def is_released(model: Any) -> bool:
    """Tell whether `release` has been called on this model."""
    return not any(weight.numel() for weight in model.parameters())


def trim(every: float = 0.0) -> None:
    """Hand freed memory to the system: glibc keeps blocks below 32 MB, most weights and scores among them, for itself.
    It takes 5 to 30 ms, so not after every weight (`_MOST_FREED`), and with `every` once in so many seconds at most."""
    global _trimmed
    if every and monotonic() - _trimmed < every:
        return
    _trimmed = monotonic()
    with suppress(OSError, AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
