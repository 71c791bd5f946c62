"""Shuffled weights: the entries of each trained parameter in random order, in the model itself."""

import re
from typing import Any

import torch
from jaxtyping import Integer
from torch import Tensor

from tl_posgen.arithmetic import elements_at_once, row_ranges
from tl_posgen.models.memory import trim
from tl_posgen.models.model import Model

_AT_ONCE = 2**24  # entries that are moved: smaller blocks stay in the heap, between those that are freed
# gains and biases of queries, keys and values, which hold d_head entries a head, whatever a family calls the module
_OF_HEADS = re.compile(r"(^|\.)(q|k|v|qkv|query|key|value|Wqkv|c_attn)(_\w+)?\.(weight|bias|w|b)$")


def shuffle(model: Model, seed: int, *, vectors: bool = True, undo: bool = False) -> None:
    """Put the entries of every parameter, or matrix, of this very model in random order, or back from that order."""
    for_matrices, for_vectors = (torch.Generator().manual_seed(seed) for _ in range(2))
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            memory = weight.untyped_storage()
            # parts of its memory that are weights too (a bridge's joint q/k/v) are shuffled instead
            is_joint = weight.nbytes == memory.nbytes() and any(
                part.untyped_storage().data_ptr() == memory.data_ptr() and part.numel() < weight.numel()
                for part in weights.values()
            )
            if is_joint:
                continue
            if is_matrix(name, weight):
                _reorder(weight, _permutation(weight.numel(), weight.numel(), for_matrices), undo=undo)
            elif vectors:
                length = entries_together(name, weight, head_width(model, name))
                _reorder(weight, _permutation(weight.numel(), length, for_vectors), undo=undo)


def is_matrix(name: str, weight: Tensor) -> bool:
    """Tell matrices from biases and gains, of which some have a row a head: b_Q [head, d_head] of a HookedTransformer,
    the norms of Cohere's queries and keys."""
    module, _, last = name.rpartition(".")
    return weight.ndim > 1 and not last.lstrip("_").startswith("b_") and "norm" not in _plain(module).rsplit(".", 1)[-1]


def entries_together(name: str, weight: Tensor, d_head: int) -> int:
    """Return the number of neighbouring entries of a vector that change places with each other: those of one head, or
    all."""
    if weight.ndim > 1:
        return weight.shape[-1]
    of_heads = _OF_HEADS.search(_plain(name)) is not None and weight.numel() % d_head == 0
    return d_head if of_heads else weight.numel()


def head_width(model: Model, name: str) -> int:
    """Return d_head of the attention layer that a parameter belongs to: that of its module, which may differ from other
    layers' (Gemma 4), else the model's."""
    module: Any = model
    width = int(model.cfg.d_head)
    for part in name.split(".")[:-1]:
        module = module.get_submodule(part)
        width = getattr(module, "head_dim", None) or width
    return width


def _plain(name: str) -> str:
    """Return the name of a parameter without the wrappers of a bridge."""
    return name.replace("._original_component", "")


def _permutation(n: int, together: int, generator: torch.Generator) -> Integer[Tensor, " entry"]:
    """Return a random order of n entries that keeps each run of `together` entries in its place."""
    indices = torch.int32 if n < 2**31 else torch.int64  # both give the same permutation
    starts = range(0, n, max(1, together))
    orders = [torch.randperm(together, generator=generator, dtype=indices, device="cpu") + start for start in starts]
    return orders[0] if len(orders) == 1 else torch.cat(orders)


def _reorder(weight: Tensor, order: Integer[Tensor, " entry"], *, undo: bool) -> None:
    """weight[i] -> weight[order[i]] of its flat entries, or back."""
    n, flat, order = weight.numel(), weight.flatten(), order.to(weight.device)
    # entries take the memory of the part of the order that has been read: a permutation is as large as the weight
    reused = not undo and flat.element_size() <= order.element_size()
    shuffled = order.view(flat.dtype)[:n] if reused else torch.empty_like(flat)
    for start, stop in row_ranges(n, 1, elements_at_once(flat.device, _AT_ONCE)):
        indices = order[start:stop]
        if undo:
            shuffled[indices] = flat[start:stop]
        else:
            shuffled[start:stop] = flat.index_select(0, indices)
    weight.copy_(shuffled.view_as(weight))
    if n > 2**20:
        del order, flat, shuffled
        trim(every=0.2)
