"""Prompts whose second half repeats something of the first, and where a curve rises above zero."""

import numpy as np
import torch
from jaxtyping import Float, Int, Real
from torch import Tensor


def with_copy(tokens: Int[Tensor, "prompt pos"], first: int = 0) -> Int[Tensor, "prompt pos"]:
    """x_{split + i} <- x_i for i = first .. n/2 - 1, split = ceil(n / 2): the second half is a copy of the first.

    Args:
        first: tokens in front of a text, which are not repeated.

    Example:
        >>> with_copy(torch.arange(6)[None]).tolist(), with_copy(torch.arange(6)[None], 1).tolist()
        ([[0, 1, 2, 0, 1, 2]], [[0, 1, 2, 3, 1, 2]])
    """
    half, copied = tokens.shape[1] // 2, tokens.clone()
    copied[:, split_of(tokens.shape[1]) + first :] = tokens[:, first:half]
    return copied


def with_needle(tokens: Int[Tensor, "prompt pos"], needle: Int[Tensor, "prompt _"]) -> Int[Tensor, "prompt pos"]:
    """Return prompts with a needle in the middle of their first half, behind the first token, and once more at their
    end.

    Example:
        >>> with_needle(torch.arange(12)[None], torch.tensor([[91, 92]])).tolist()
        [[0, 1, 91, 92, 4, 5, 6, 7, 8, 9, 91, 92]]
    """
    changed, n = tokens.clone(), needle.shape[1]
    middle = max(1, (split_of(tokens.shape[1]) - n) // 2)
    changed[:, middle : middle + n] = needle
    changed[:, -n:] = needle
    return changed


def apart(n: int, gap: int) -> Int[Tensor, " pos"]:
    """p_i = i for i < ceil(n / 2), else i + gap: positions of a prompt whose second half stands further on.

    Example:
        >>> apart(4, 10).tolist()
        [0, 1, 12, 13]
    """
    position = torch.arange(n)
    return position + gap * (position >= split_of(n))


def split_of(n: int) -> int:
    """ceil(n / 2): the first position of the second half of n tokens."""
    return (n + 1) // 2


def first_rise(x: Real[np.ndarray, " place"], y: Float[np.ndarray, "*batch place"]) -> Float[np.ndarray, "*batch"]:
    """min {x: y(x) > 0}, with y linear between its places; the last place where y never rises above 0, NaN where y is.

    Example:
        >>> curves = np.array([[-1.0, -1.0, 1.0], [2.0, 0.0, 0.0], [-1.0, -1.0, -1.0]])
        >>> first_rise(np.array([0, 10, 20]), curves).tolist()
        [15.0, 0.0, 20.0]
    """
    above = y > 0
    place = above.argmax(-1)
    before = np.maximum(place - 1, 0)
    low, high = (np.take_along_axis(y, at[..., None], -1)[..., 0] for at in (before, place))
    share = np.divide(-low, high - low, out=np.zeros_like(low), where=(place > 0) & (high > low))
    rises = np.where(above.any(-1), x[before] + share * (x[place] - x[before]), x[-1])
    return np.where(np.isnan(y).any(-1), np.nan, rises)
