"""Random tokens for proofs, the comparison of two models' logits on them, rounding as a cause of differences, and hooks
set aside."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import rounding_unit

N_TOKENS = 23  # enough for most proofs; as many as hardly any model has heads, which streaming could not tell apart


def random_tokens(d_vocab: int, n: int, device: torch.device | str = "cpu") -> Int[Tensor, "1 pos"]:
    """Draw n token ids, the same ones every time and on every device.

    Example:
        >>> random_tokens(100, 4).tolist()
        [[44, 39, 33, 60]]
    """
    generator = torch.Generator().manual_seed(0)  # of the CPU, whatever torch's default device is
    return torch.randint(d_vocab, (1, n), generator=generator, device="cpu").to(device)


def centred(logits: Tensor) -> Float[Tensor, "batch pos vocabulary"]:
    """logits - their mean over the vocabulary, in float32: softmax cannot tell the difference."""
    logits = logits.float()
    return logits - logits.mean(-1, keepdim=True)


def how_they_differ(
    actual: Float[Tensor, "*batch pos width"], expected: Float[Tensor, "*batch pos width"], dtype: torch.dtype
) -> str:
    """max |actual - expected| <= max(1e-3, 32 units of rounding of dtype) max |expected|: "" where that holds (never of
    what is no number), else by how much two models' outputs differ."""
    error, largest = float((actual - expected).abs().max()), float(expected.abs().max())
    if error <= max(1e-3, 32 * rounding_unit(dtype, actual.device)) * largest:
        return ""
    return f"differ by {error:.2g}, the largest being {largest:.2g}"


def rounding_remedy(dtype: torch.dtype) -> str:
    """Say what removes the rounding of a model in half precision, as a sentence behind another; "" for wider dtypes.

    Example:
        >>> rounding_remedy(torch.bfloat16)
        ' Or rounding in bfloat16: load the model with dtype="float32".'
    """
    if dtype.itemsize >= torch.float32.itemsize:
        return ""
    return f' Or rounding in {str(dtype).removeprefix("torch.")}: load the model with dtype="float32".'


@contextmanager
def without_hooks(model: Any) -> Iterator[None]:
    """While the block runs, no hook of TransformerLens is called."""
    points = list({id(point): point for point in model.hook_dict.values()}.values())
    lists = [hooks for point in points for hooks in (point._forward_hooks, point._forward_pre_hooks)]
    copies = [dict(hooks) for hooks in lists]
    try:
        for hooks in lists:
            hooks.clear()
        yield
    finally:
        for hooks, before in zip(lists, copies, strict=True):
            hooks.update(before)
