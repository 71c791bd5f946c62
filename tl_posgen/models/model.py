"""The protocol of a model of TransformerLens: the attributes and methods that this package uses."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor
from torch.nn import Module, Parameter


@runtime_checkable
class Model(Protocol):
    """HookedTransformer (TransformerLens 3.9) or TransformerBridge (3.9 and 4): what both have and this package uses.

    Which of the two it is, only `tl_posgen.models.session.session_of` asks.
    """

    if TYPE_CHECKING:  # isinstance evaluates what is no method, and a bridge's hook_dict takes milliseconds
        cfg: Any

        @property
        def tokenizer(self) -> Any: ...

        @property
        def hook_dict(self) -> Mapping[str, Any]: ...

        def to_tokens(self, *args: Any, **options: Any) -> Tensor: ...

        def generate(self, *args: Any, **options: Any) -> Any: ...

    def __call__(self, *args: Any, **options: Any) -> Any: ...

    def hooks(self, fwd_hooks: Any = ..., bwd_hooks: Any = ...) -> AbstractContextManager[Any]: ...

    def run_with_hooks(self, *args: Any, **options: Any) -> Any: ...

    def run_with_cache(self, *args: Any, **options: Any) -> Any: ...

    def parameters(self) -> Iterator[Parameter]: ...

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]: ...

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]: ...

    def named_modules(self) -> Iterator[tuple[str, Module]]: ...
