"""Bytes that tensors hold at once, counted allocation by allocation: the same in every run, on every machine."""

import gc
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """While the block runs, `live` is what storages made inside it hold, and `peak` the most that they held at once.

    What an operation holds only while it runs is not seen, nor are numpy arrays. What waits for the garbage collector
    is counted as held, as nobody knows when it comes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref] = {}

    def __enter__(self) -> "LiveMemory":
        gc.collect()
        gc.disable()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        gc.enable()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        before = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in self._known and id(storage) not in before:
                    self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()

        def let_go(_: Any) -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, let_go)
        self.live += size
        self.peak = max(self.peak, self.live)
