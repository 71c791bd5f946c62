"""Prompts whose second half repeats something of the first, and between which gaps a curve passes zero."""

import itertools
import math
from collections.abc import Sequence

import torch
from jaxtyping import Int
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


def last_surely_below(places: Sequence[int], upper_ends: Sequence[float]) -> float:
    """Return the last place before the first one whose upper end is not below 0; NaN where none is before it.

    Example:
        >>> last_surely_below([0, 10, 20, 30], [-2.0, -1.0, 0.5, -1.0]), last_surely_below([0, 10], [1.0, -1.0])
        (10.0, nan)
    """
    below = list(itertools.takewhile(lambda pair: pair[1] < 0, zip(places, upper_ends, strict=True)))
    return float(below[-1][0]) if below else math.nan


def first_surely_above(places: Sequence[int], lower_ends: Sequence[float]) -> float:
    """Return the first place whose lower end is above 0; NaN where none is.

    Example:
        >>> first_surely_above([0, 10, 20, 30], [-2.0, -1.0, 0.5, -1.0]), first_surely_above([0, 10], [-1.0, 0.0])
        (20.0, nan)
    """
    above = (place for place, end in zip(places, lower_ends, strict=True) if end > 0)
    return float(next(above, math.nan))
