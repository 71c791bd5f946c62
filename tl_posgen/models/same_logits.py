"""Random tokens for proofs, and the comparison of two models' logits on them."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import rounding_unit


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


def logit_error(
    actual: Float[Tensor, "*batch pos vocabulary"], expected: Float[Tensor, "*batch pos vocabulary"], dtype: torch.dtype
) -> tuple[bool, float, float]:
    """max |actual - expected| <= max(1e-3, 32 units of rounding of dtype) max |expected|: whether that holds (never of
    what is no number), the error, and what is allowed."""
    error = float((actual - expected).abs().max())
    allowed = max(1e-3, 32 * rounding_unit(dtype, actual.device)) * float(expected.abs().max())
    return error <= allowed, error, allowed
