"""Sums of scores over prompts of one length, and the shares of their mean: memory does not grow with the prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.core.measure import by_tokens
from tl_posgen.errors import InputError
from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.numbers.position_shares import PositionParts, position_shares, row_centred

SHARED: WeakValueDictionary[tuple, PositionParts] = WeakValueDictionary()


@dataclass
class ScoreSums:
    """Sums over prompts of a layer's scores over the pairs that count, and of their `PositionParts.energy`: `a + b`.

    `parts` stay on the device of the model, as all layers and prompts share them.
    """

    parts: list[PositionParts]
    scores: Float[Tensor, "head pair"]
    energy: Float[Tensor, "variant head part=5"]

    def __add__(self, other: "ScoreSums") -> "ScoreSums":
        require_same_length([one.parts[0].n for one in (self, other)])
        return replace(self, scores=self.scores + other.scores, energy=self.energy + other.energy)

    def mean(self, n_prompts: int) -> Float[Tensor, "head query key"]:
        """Return the mean scores; 0 where a pair does not count."""
        mask = self.parts[0].mask.to(self.scores.device)
        mean = self.scores.new_zeros(len(self.scores), *mask.shape)
        mean[:, mask] = self.scores / n_prompts
        return mean

    def shares(self, n_prompts: int) -> dict[str, Float[Tensor, "tokens head *function"]]:
        """Return the numbers of `position_shares`, with the first token and without."""
        means = energies(self.mean(n_prompts).to(self.parts[0].mask.device), self.parts).to(self.energy.device)
        both = [
            position_shares(energy / n_prompts, of_mean, n_prompts, int(parts.mask.sum()))
            for energy, of_mean, parts in zip(self.energy, means, self.parts, strict=True)
        ]
        return by_tokens(*both)


def energies(scores: Tensor, parts: Sequence[PositionParts]) -> Float[Tensor, "variant head part=5"]:
    """Return `PositionParts.energy` of the scores within rows, with the first token and without."""
    return torch.stack([part.energy(row_centred(scores, part.mask)) for part in parts])


def position_parts(n: int, window: int | None, device: torch.device) -> list[PositionParts]:
    """Return the spaces of functions of position over the pairs that count, with the first token and without; the same
    ones for all layers and prompts, as long as somebody holds them."""
    found = []
    for first_token in (True, False):
        place = n, window, first_token, str(device)
        if (parts := SHARED.get(place)) is None:
            positions = torch.arange(n, device=device)
            parts = PositionParts(CausalPairs(n, window, first_token=first_token).mask(positions, positions))
            SHARED[place] = parts
        found.append(parts)
    return found


def require_same_length(lengths: Sequence[int]) -> None:
    """Refuse prompts that cannot be compared pair by pair."""
    if len(set(lengths)) > 1:
        raise InputError(
            f"across_prompts: prompts of {' and '.join(map(str, dict.fromkeys(lengths)))} tokens cannot be compared "
            "pair by pair; give length= to cut all alike"
        )
    if min(lengths) < 3:
        raise InputError(f"across_prompts: prompts of {min(lengths)} tokens; give 3 at least")
