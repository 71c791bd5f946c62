"""Does it fit into memory? Asked before it is begun, as what does not fit takes the process down."""

import os
from typing import Any

import torch

from tl_posgen.errors import InputError

MATRICES = 3  # scores, scores under the mask, pattern: what one layer of eager attention holds at once


def memory_of(device: torch.device) -> int | None:
    """Bytes of memory that a device has; None where that cannot be asked."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if device.type != "cpu" or not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def require_pass_fits(model: Any, n: int, *, is_streamed: bool, matrices: int = 0) -> None:
    """Refuse prompts of n tokens whose forward pass, or what is measured of it, cannot fit.

    Its largest need: the scores of one layer, 3 n_heads n^2 numbers of the model's dtype or `matrices` n_heads n^2
    in float32; where attention is streamed and no matrix is formed, (d_vocab + d_model) n, the logits and the residual
    stream that they are made of.

    Args:
        matrices: how many [head, query, key] matrices are held of one layer, see `tl_posgen.measure.Measure.matrices`.

    Raises:
        InputError: with the estimate, and how many tokens would fit.
    """
    cfg, weight = model.cfg, next(model.parameters())
    held, size = memory_of(weight.device), weight.element_size()
    per_pair = max(matrices * max(size, 4), 0 if is_streamed else MATRICES * size)
    if per_pair:
        what, power, each = f"attention of one layer ({cfg.n_heads} heads) needs", 2, per_pair * cfg.n_heads
    else:
        what, power, each = "the logits need", 1, size * (cfg.d_vocab + cfg.d_model)
    if held is not None and each * n**power > held:
        raise InputError(
            f"prompts of {n} tokens: {what} {each * n**power / 1e9:.0f} GB, and there are {held / 1e9:.0f} GB of "
            f"memory; give at most {int((held / each) ** (1 / power))} tokens"
        )
