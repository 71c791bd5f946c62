"""Residuals by kind of token pair, for all heads at once and over any number of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double

ID_BITS = 32  # kind of pair = query id * 2^32 + key id
KEEP = 1024  # kinds of pair that a tally keeps per head


@dataclass(frozen=True)
class TokenPairTally:
    r"""Sum and number of the residuals e of each kind of pair (query token, key token); float64, all heads.

    Tallies of prompts add up: `a + b`. Kinds are sorted by n mean(e)^2, the energy of the residual that the two tokens
    explain: a frequent pair whose residuals cancel comes last. Each head keeps the first `KEEP` kinds, so the tally is
    exact for up to `KEEP` kinds; with more, a kind that was dropped and occurs again counts only from then on.

    Attributes:
        kind: query id * 2^32 + key id; -1 where there is none.
        total: sum of e. count: number of pairs.
        energy: sum of e^2 over all kinds, kept or not.
    """

    kind: Int[Tensor, "head kind"]
    total: Float[Tensor, "head kind"]
    count: Float[Tensor, "head kind"]
    energy: Float[Tensor, " head"]

    @classmethod
    def join_heads(cls, parts: Sequence["TokenPairTally"]) -> "TokenPairTally":
        """Join tallies of the same prompt for some heads each into one for all heads."""
        return cls(*(torch.cat([getattr(part, one.name) for part in parts]) for one in fields(cls)))

    def __add__(self, other: "TokenPairTally") -> "TokenPairTally":
        kind, order = torch.cat([self.kind, other.kind], 1).sort(dim=1)
        again = kind[:, 1:] == kind[:, :-1]  # a kind occurs once in each summand, so twice at most

        def merged(name: str) -> Tensor:
            x = torch.cat([getattr(self, name), getattr(other, name)], 1).gather(1, order)
            x[:, :-1] += x[:, 1:].masked_fill(~again, 0)
            x[:, 1:].masked_fill_(again, 0)
            return x

        kind[:, 1:].masked_fill_(again, -1)
        total, count = merged("total"), merged("count")
        return TokenPairTally(kind, total, count, self.energy + other.energy).strongest()

    @property
    def query_token(self) -> Int[Tensor, "head kind"]:
        return self.kind >> ID_BITS

    @property
    def key_token(self) -> Int[Tensor, "head kind"]:
        return torch.where(self.kind < 0, -1, self.kind & (2**ID_BITS - 1))

    @property
    def mean(self) -> Float[Tensor, "head kind"]:
        """Return the mean residual of each kind; NaN where there is no kind."""
        return self.total / self.count

    @property
    def explained(self) -> Float[Tensor, "head kind"]:
        """n mean(e)^2 of each kind."""
        return self.total.square() / self.count.clamp(min=1)

    @property
    def share(self) -> Float[Tensor, "head kind"]:
        """n mean(e)^2 as a share of the residual's energy."""
        return self.explained / self.energy[:, None]

    def strongest(self) -> "TokenPairTally":
        """Return the `KEEP` kinds that explain most, in that order."""
        ranking = self.explained.masked_fill(self.count == 0, -1)
        at = ranking.topk(min(KEEP, ranking.shape[1])).indices
        kind, total, count = (x.gather(1, at) for x in (self.kind, self.total, self.count))
        return TokenPairTally(kind, total, count, self.energy)


class TokenSums:
    """Sums of residuals over the pairs of each two tokens of one prompt, added up from blocks of rows.

    Example:
        >>> sums, left = TokenSums(torch.tensor([7, 7]), 1, "cpu"), torch.tensor([[[1.0, 0.0], [-3.0, 5.0]]])
        >>> sums.add(left, torch.ones(2, 2).tril())
        >>> tally = sums.tally(left.square().sum((1, 2)))
        >>> tally.query_token.tolist(), tally.mean.tolist(), tally.count.tolist()
        ([[7]], [[1.0]], [[3.0]])
    """

    def __init__(self, tokens: Int[Tensor, " pos"], n_heads: int, device: torch.device | str):
        self.ids, self._which = tokens.to(device).long().unique(return_inverse=True)
        shape = [len(self.ids)] * 2
        self.total, self._count = (torch.zeros(n, *shape, dtype=DOUBLE, device=device) for n in (n_heads, 1))

    def add(self, e: Float[Tensor, "head row key"], mask: Bool[Tensor, "row key"] | Float[Tensor, "row key"]) -> None:
        """Add some rows over the keys up to the last of them; e must be 0 where the mask is."""
        rows, keys = mask.shape
        of_keys = self._which[:keys]
        for sums, x in ((self.total, double(e)), (self._count, double(mask[None]))):
            by_key = x.new_zeros(len(x), rows, len(self.ids)).index_add_(2, of_keys, x)
            sums.index_add_(1, of_keys[-rows:], by_key)

    def tally(self, energy: Float[Tensor, " head"]) -> TokenPairTally:
        total, count = self.total.flatten(1), self._count.flatten(1)
        ranking = total.square().div_(count.clamp(min=1)).sub_(double(count == 0))  # kinds that do not occur: last
        at = ranking.topk(min(KEEP, int(count.count_nonzero()))).indices
        kind = (self.ids[at // len(self.ids)] << ID_BITS) + self.ids[at % len(self.ids)]
        return TokenPairTally(kind, total.gather(1, at), count.expand_as(total).gather(1, at), energy)
