"""Seeded swaps of tokens or words and jittered distances; a higher ratio adds to the swaps of a lower one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double
from tl_posgen.errors import InputError, check_choice, check_share, check_whole

Reach = Literal["adjacent", "window", "uniform"]


@dataclass(frozen=True)
class Disturbance:
    """Order disturbed by one draw: a permutation of disjoint swaps, new_p = old_{permutation_p}, or other distances.

    Attributes:
        permutation: new order; of token swaps its own inverse, so that it is both a text order and a position index.
        moved: whether a place holds a swapped token, or a token of a swapped word; nowhere under a jitter.
        pairs: the swapped units (tokens, or words by number), in the order of drawing; none of a jitter.
        distances: the distance of each pair under a jitter; else None.
    """

    permutation: Int[Tensor, " pos"]
    moved: Bool[Tensor, " pos"]
    pairs: Int[Tensor, "pair 2"]
    distances: Int[Tensor, "query key"] | None = None

    @property
    def ratio(self) -> float:
        """Share of tokens (of pairs, under a jitter) that is moved; rounding and missing partners change it."""
        if self.distances is None:
            return double(self.moved).mean().item()
        n = len(self.permutation)
        return float((self.distances != true_distances(n)).sum() / (n * (n + 1) / 2))


def true_distances(n: int) -> Int[Tensor, "query key"]:
    """i - j, and 0 where j > i."""
    return (torch.arange(n)[:, None] - torch.arange(n)).clamp(min=0)


def swap_tokens(
    n: int,
    ratio: int | float,
    reach: Reach | str = "uniform",
    *,
    seed: int,
    window: int = 8,
    protected: Iterable[int] = (0,),
) -> Disturbance:
    """Swap disjoint pairs of n tokens until about `ratio` of all n have moved.

    Args:
        n: number of tokens.
        ratio: share of tokens to move, in [0, 1]. The pairs of a lower ratio are the first of those of a higher one.
        reach: largest distance of a pair: "adjacent" 1, "window" `window`, "uniform" any.
        seed: of this draw alone.
        protected: positions that are never moved, by default the first token; list those of a clean suffix too.

    Disjoint neighbours cover at most about 0.86 of a text, which limits "adjacent": see `Disturbance.ratio`.
    Ours: the paper's definition of the perturbation is not known.

    Raises:
        InputError: ratio outside [0, 1], an unknown reach, a window below 1, a protected position that does not exist.

    Example:
        >>> swaps = swap_tokens(10, 0.2, "adjacent", seed=0)
        >>> swaps.ratio, bool((swaps.permutation[swaps.permutation] == torch.arange(10)).all())
        (0.2, True)
    """
    check_whole("swaps", 0, n=n)
    words = [(token, token + 1) for token in range(n)]
    return swap_words(n, words, ratio, reach, seed=seed, window=window, protected=protected)


def swap_words(
    n: int,
    words: Sequence[tuple[int, int]],
    ratio: int | float,
    reach: Reach | str = "uniform",
    *,
    seed: int,
    window: int = 8,
    protected: Iterable[int] = (0,),
) -> Disturbance:
    """Swap disjoint pairs of whole words until about `ratio` of all n tokens belong to a swapped word.

    Args:
        n: number of tokens.
        words: token range (start, stop) of each word, in order, not overlapping; other tokens stay between the words.
        ratio, seed: as in `swap_tokens`.
        reach, window: as in `swap_tokens`, with distances counted in words.
        protected: a word with one of these tokens is never moved.

    Swapping two words of different lengths shifts the tokens between them, which do not count as moved.

    Raises:
        InputError: as `swap_tokens`, or words that are empty, overlap, are out of order or leave the text.
    """
    check_share("swap ratio", ratio)
    check_choice("swap reach", reach, get_args(Reach))
    check_whole("swaps", 0, n=n, seed=seed)
    check_whole("swaps", 1, **({"window": window} if reach == "window" else {}))
    if not isinstance(words, Sequence) or not all(isinstance(word, Sequence) and len(word) == 2 for word in words):
        raise InputError(f"words={words!r}: give the token range (start, stop) of each word")
    end = 0
    for number, (start, stop) in enumerate(words):
        if not end <= start < stop <= n:
            raise InputError(
                f"word {number} is tokens {start} to {stop} after a word that ends at {end}, of {n} tokens; "
                "words must be non-empty, in order, and inside the text"
            )
        end = stop
    if not isinstance(protected, Iterable) or not all(isinstance(position, int) for position in protected):
        raise InputError(f"protected={protected!r}: give positions, such as protected=(0,)")
    fixed, furthest = set(protected), {"adjacent": 1, "window": window, "uniform": len(words)}[reach]
    if outside := sorted(position for position in fixed if not 0 <= position < n):
        raise InputError(f"protected position {outside[0]} does not exist in {n} tokens; give positions 0 to {n - 1}")
    free = [number for number, (start, stop) in enumerate(words) if fixed.isdisjoint(range(start, stop))]
    pairs = _matching(free, furthest, seed)
    lengths = [stop - start for start, stop in words]
    totals = [0, *accumulate(lengths[first] + lengths[second] for first, second in pairs)]
    pairs = pairs[: min(range(len(totals)), key=lambda count: abs(totals[count] - ratio * n))]
    partner = {first: second for pair in pairs for first, second in (pair, pair[::-1])}
    order, moved, end = [], [], 0
    for number, (start, stop) in enumerate(words):
        placed = range(*words[partner.get(number, number)])
        order += [*range(end, start), *placed]
        moved += [False] * (start - end) + [number in partner] * len(placed)
        end = stop
    order += range(end, n)
    moved += [False] * (n - end)
    return Disturbance(torch.tensor(order), torch.tensor(moved), torch.tensor(pairs, dtype=torch.long).reshape(-1, 2))


def jittered_distances(n: int, ratio: int | float, width: int, *, seed: int) -> Int[Tensor, "query key"]:
    """d_ij = i - j + u for a share `ratio` of the pairs j <= i, the true distance for the others; 0 where j > i.

    u is uniform on the whole numbers from -width to width, without 0, that keep d_ij >= 0, so the distance of every
    chosen pair changes. The pairs of a lower ratio are among those of a higher one, with the same u. Ours.

    Raises:
        InputError: ratio outside [0, 1], or width below 1.
    """
    check_share("jitter ratio", ratio)
    check_whole("jitter", 1, width=width)
    check_whole("jitter", 0, n=n, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    chosen, draw = torch.rand(2, n, n, generator=generator, dtype=DOUBLE)
    distance = true_distances(n)
    below = distance.clamp(max=width)  # largest step down
    step = (draw * (below + width)).long() - below
    step = step + (step >= 0)
    return (distance + step * (chosen < ratio)).tril()


def _matching(free: Sequence[int], reach: int, seed: int) -> list[tuple[int, int]]:
    """Return disjoint pairs of free units at most `reach` apart, in random order, until no further pair is possible."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(free), generator=generator).tolist()
    draws = torch.rand(len(free), generator=generator, dtype=DOUBLE).tolist()
    if reach >= (free[-1] - free[0] if free else 0):
        return [(free[order[at]], free[order[at + 1]]) for at in range(0, len(order) - 1, 2)]
    left, pairs = set(free), []
    for at, draw in zip(order, draws, strict=True):
        unit = free[at]
        near = [choice for choice in range(unit - reach, unit + reach + 1) if choice in left and choice != unit]
        if unit in left and near:
            partner = near[int(draw * len(near))]
            left -= {unit, partner}
            pairs.append((unit, partner))
    return pairs
