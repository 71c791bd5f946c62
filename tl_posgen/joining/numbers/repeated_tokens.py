"""Repeated random tokens: where a head attends when the only structure is that a block of tokens stands twice."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class RepeatedScores:
    """Mean attention from a token i of the second block; each number in [0, 1].

    Attributes:
        previous_token: to i - 1, of every token of both blocks that has one there.
        duplicate_token: to the earlier occurrence of the same token, i - period.
        induction: to the token after the earlier occurrence, i - period + 1.
    """

    previous_token: Float[Tensor, " head"]
    duplicate_token: Float[Tensor, " head"]
    induction: Float[Tensor, " head"]


def repeated_prompts(
    first: Int[Tensor, " start"], period: int, n_vocabulary: int, n_prompts: int, seed: int
) -> Int[Tensor, "prompt pos"]:
    """`first`, then `period` different random tokens, then the same again.

    Args:
        first: what every prompt begins with, a BOS token say; may be empty.
        period: at most n_vocabulary.

    Example:
        >>> [one.tolist() for one in repeated_prompts(torch.tensor([7]), 3, 4, 1, seed=0)[0].split([1, 3, 3])]
        [[7], [0, 1, 3], [0, 1, 3]]
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.stack([torch.randperm(n_vocabulary, generator=generator)[:period] for _ in range(n_prompts)])
    return torch.cat([first.cpu().expand(n_prompts, -1), drawn, drawn], 1)


def repeated_scores(pattern: Float[Tensor, "head query key"], start: int, period: int) -> RepeatedScores:
    r"""Means of S_{i, i-1} over i > start, and of S_{i, i-T} and S_{i, i-T+1} over i = start + T .. start + 2T - 1.

    Args:
        pattern: S of a prompt of `repeated_prompts`.
        start: tokens before the first block.
        period: T, 2 or more.

    Source: the induction score is Olsson et al. 2022 (arXiv 2209.11895); all three as TransformerLens' head detector
    has them, on these diagonals.

    Example:
        >>> S = torch.zeros(1, 4, 4)
        >>> S[0, [0, 1, 2, 3], [0, 0, 1, 2]] = 1.0  # the previous token; with period 2 that is the induction target
        >>> vars(repeated_scores(S, start=0, period=2))
        {'previous_token': tensor([1.]), 'duplicate_token': tensor([0.]), 'induction': tensor([1.])}
    """
    whole, second = pattern[:, start:, start:], slice(start + period, start + 2 * period)
    back = {distance: pattern.diagonal(-distance, dim1=1, dim2=2) for distance in (period, period - 1)}
    return RepeatedScores(
        whole.diagonal(-1, dim1=1, dim2=2).mean(-1),
        back[period][:, second.start - period :].mean(-1),
        back[period - 1][:, second.start - period + 1 :].mean(-1),
    )
