"""Copies of a layer's values on their way to the host, so that the device goes on with the next layer meanwhile."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry


class _LayerKey(NamedTuple):
    """Layer and prompt that values belong to, without what was captured of them."""

    layer: int
    geometry: LayerGeometry
    heads: list[int]
    prompt: int
    length: int


@dataclass(frozen=True)
class HostCopies:
    """Values of every measure for one layer of one prompt, being copied to the host.

    Attributes:
        place: layer and prompt.
        values: measure -> name -> value, whose tensors are on the host once `arrived` has returned.
        copied: event of the device behind the copies; None where there was nothing to wait for.
    """

    place: _LayerKey
    values: Mapping[str, Mapping[str, Any]]
    copied: Any = None

    @classmethod
    def start(cls, capture: LayerCapture, values: Mapping[str, Mapping[str, Any]]) -> "HostCopies":
        """Start the copies. CUDA copies into pinned memory while it computes; other devices are waited for here."""
        place = _LayerKey(capture.layer, capture.geometry, list(capture.heads), capture.prompt, capture.length)
        copies = {name: {key: _on_host(value) for key, value in of_one.items()} for name, of_one in values.items()}
        device = capture.device
        return cls(place, copies, torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None)

    def arrived(self) -> "HostCopies":
        """Wait until the copies are complete; they are already, once the host has waited for a later result."""
        if self.copied is not None:
            self.copied.synchronize()
        return self


def _on_host(value: Any) -> Any:
    """Return a value with the tensors in it, and in lists and dataclasses in it, copied to the host; CUDA is not waited
    for."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", non_blocking=value.is_cuda)
    if isinstance(value, list):
        return [_on_host(one) for one in value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: _on_host(getattr(value, one.name)) for one in fields(value) if one.init})
    return value
