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


def require_attention_fits(model: Any, n: int) -> None:
    """Refuse prompts of n tokens whose attention cannot fit: 3 n_heads n^2 numbers in one layer, the largest need.

    Raises:
        InputError: with the estimate, and how many tokens would fit.
    """
    weight, heads = next(model.parameters()), model.cfg.n_heads
    a_pair, held = MATRICES * heads * weight.element_size(), memory_of(weight.device)
    if held is not None and a_pair * n**2 > held:
        needed, most = a_pair * n**2, int((held / a_pair) ** 0.5)
        raise InputError(
            f"prompts of {n} tokens: attention of one layer ({heads} heads) needs {needed / 1e9:.0f} GB, and there are "
            f"{held / 1e9:.0f} GB of memory; give at most {most} tokens"
        )
