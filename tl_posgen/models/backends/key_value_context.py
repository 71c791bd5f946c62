"""The keys and values of tokens already read, and the forward pass that reads and extends them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Int
from torch import Tensor

from tl_posgen.progress import count


@dataclass(frozen=True)
class KeyValueContext:
    """Model and the keys and values of one prompt's tokens so far.

    Attributes:
        read: one forward pass of tokens [1, pos] that uses and extends the cache.
        layers: what the cache holds of each layer.
        held: names of its keys and its values there; none where later layers read them again.
    """

    read: Callable[[Int[Tensor, "1 pos"]], Any]
    layers: Sequence[Any]
    held: tuple[str, ...]

    def extend(self, tokens: Int[Tensor, " pos"]) -> None:
        """Run one forward pass of the next tokens, which see those before them."""
        count(1)
        self.read(tokens[None])

    def forget(self, layer: int) -> None:
        """Let go of a layer's keys and values, where no later layer reads them."""
        for name in self.held:
            if isinstance(tensor := getattr(self.layers[layer], name, None), Tensor):
                setattr(self.layers[layer], name, tensor[:0].clone())
