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
    """Return prompts of `first` (a BOS token, or nothing), then `period` different random tokens, then these again."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.stack([torch.randperm(n_vocabulary, generator=generator)[:period] for _ in range(n_prompts)])
    return torch.cat([first.cpu().expand(n_prompts, -1), drawn, drawn], 1)


def repeated_scores(pattern: Float[Tensor, "head query key"], start: int, period: int) -> RepeatedScores:
    r"""Means of S_{i, i-1} over i > start, and of S_{i, i-T} and S_{i, i-T+1} over i = start + T .. start + 2T - 1.

    S is the pattern of one of `repeated_prompts`, with `start` tokens before the first block, and T the period, 2 or
    more.

    Source: the induction score is Olsson et al. 2022 (arXiv 2209.11895); all three as TransformerLens' head detector
    has them, on these diagonals.
    """
    whole, second = pattern[:, start:, start:], slice(start + period, start + 2 * period)
    back = {distance: pattern.diagonal(-distance, dim1=1, dim2=2) for distance in (period, period - 1)}
    return RepeatedScores(
        whole.diagonal(-1, dim1=1, dim2=2).mean(-1),
        back[period][:, second.start - period :].mean(-1),
        back[period - 1][:, second.start - period + 1 :].mean(-1),
    )
