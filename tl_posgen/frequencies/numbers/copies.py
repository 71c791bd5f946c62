"""Random tokens that stand twice: the prompts, what of the second copy is predicted, and which heads attend to it."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double


def copied_rows(
    pool: Int[Tensor, " token"], first: Int[Tensor, " start"], half: int, n_rows: int, seed: int
) -> Int[Tensor, "row pos"]:
    """Return rows of `first`, then `half` different tokens drawn from the pool, then these again.

    Example:
        >>> copied_rows(torch.arange(5, 9), torch.tensor([0]), half=3, n_rows=1, seed=0)[0].tolist()
        [0, 5, 6, 8, 5, 6, 8]
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.stack([pool[torch.randperm(len(pool), generator=generator)[:half]] for _ in range(n_rows)])
    return torch.cat([first.expand(n_rows, -1), drawn, drawn], 1)


def foretold(half: int, start: int) -> slice:
    """Return the positions of the second copy, behind `start` tokens, whose next token the first copy foretells and a
    pair of tokens confirms: all but the first, where one token alone repeats, and the last, which nothing follows."""
    return slice(start + half + 1, start + 2 * half - 1)


def recall_of_copy(
    logits: Float[Tensor, "pos vocabulary"], tokens: Int[Tensor, " pos"], half: int, start: int = 1
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return the share of the second copy's tokens that have the largest logit, and their mean loss in nats."""
    positions = foretold(half, start)
    wanted = tokens[positions.start + 1 : positions.stop + 1, None].to(logits.device)
    log_p = double(logits[positions]).log_softmax(-1)
    wanted = wanted.to(log_p.device)
    return double(log_p.argmax(-1, keepdim=True) == wanted).mean(), -log_p.gather(-1, wanted).mean()


def induction_hits(pattern: Float[Tensor, "head query key"], half: int, start: int = 1) -> Float[Tensor, " head"]:
    """Return the share of queries in the second copy whose largest attention is on the token behind their own first
    occurrence.

    Source: the place is that of Olsson et al. 2022 (arXiv 2209.11895); a rate of hits: ours.
    """
    queries = torch.arange(len(pattern[0]), device=pattern.device)[foretold(half, start)]
    return double(pattern[:, queries].argmax(-1) == queries - half + 1).mean(-1)
