"""Which (query, key) pairs a fit is made over, and the normal equations of three additive axes over them."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from tl_posgen.errors import InputError
from tl_posgen.rope.bilinear_sums import fft_length

SPAN = 1e15  # of weights: float64 cannot tell what lighter pairs add


@dataclass(frozen=True)
class CausalPairs:
    r"""The causal pairs (i, j) that count: 0 <= i - j < window, less what is left out: token 0, or the diagonal i = j.

    Leaving out the first token (as query and as key) or the diagonal leaves a causal triangle again, one smaller. Its
    three axes are alike: count the queries from the last one backwards, s = (n - 1) - i, and every visible pair has

        distance + s + key = n - 1,      all three >= 0,

    so each axis at index t has n - t pairs, and meets the indices 0 .. n - 1 - t of the other two. Every array on
    `corner coordinates` below is [axis, head, t] with the axes in the order distance, query (from the last), key.

    Attributes:
        n_tokens: length of the text.
        window: a query sees the `window` last keys, itself included; None sees all.
        first_token: whether token 0 counts.
        diagonal: whether a query paired with its own key counts.
        distance_weights: w_0, w_1, ...: how much a pair at each distance counts; the last one holds for all beyond.

    Raises:
        InputError: where no pair is left, a weight is not above 0, or weights are further apart than `SPAN`.

    Example:
        >>> pairs = CausalPairs(1024)
        >>> pairs.size, pairs.n_pairs, pairs.rank, round(pairs.iid_r, 3)
        (1024, 524800, 3069, 0.076)
        >>> CausalPairs(4, distance_weights=(3.0, 2.0, 0.5)).counts()[0].tolist()
        [[12.0, 6.0, 1.0, 0.5]]
    """

    n_tokens: int
    window: int | None = None
    first_token: bool = True
    diagonal: bool = True
    distance_weights: tuple[float, ...] = (1.0,)

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise InputError(f"window must be at least 1, or None for no window; got {self.window}")
        if self.size < 1 or self.width < 1:
            raise InputError(f"no (query, key) pair is left in {self}; give more tokens or leave out less")
        if not self.distance_weights or not all(0 < weight < math.inf for weight in self.distance_weights):
            raise InputError(
                f"weights by distance, {list(self.distance_weights)}: each must be above 0, since distances without "
                "weight leave a, b and c open; give far ones a small weight, such as 1e-6, or a window"
            )
        low, high = min(self.distance_weights), max(self.distance_weights)
        if high > SPAN * low or not 1 / SPAN <= high <= SPAN:
            raise InputError(
                f"weights by distance, from {low:g} to {high:g}: give weights about 1, the largest at most {SPAN:g} "
                "times the least; a common factor changes nothing"
            )

    @property
    def first_key(self) -> int:
        return 0 if self.first_token else 1

    @property
    def first_distance(self) -> int:
        return 0 if self.diagonal else 1

    @property
    def first_query(self) -> int:
        return self.first_key + self.first_distance

    @property
    def size(self) -> int:
        """n: as many queries as keys are left, and as many distances where there is no window."""
        return self.n_tokens - self.first_query

    @property
    def width(self) -> int:
        """Number of distances."""
        return min(self.window or self.n_tokens, self.n_tokens - self.first_key) - self.first_distance

    @property
    def n_pairs(self) -> int:
        return self.size * self.width - self.width * (self.width - 1) // 2

    @property
    def rank(self) -> int:
        """Independent parameters among distances, queries and keys: all but two constants and one straight line.

        With a single distance every pair has a query and a key of its own, and those fit anything.
        """
        return self.size if self.width == 1 else self.width + 2 * self.size - 3

    @property
    def saturated(self) -> bool:
        """Whether there are as many parameters as pairs, so that any scores are fitted exactly: 3 tokens or fewer."""
        return self.rank >= self.n_pairs

    @property
    def iid_r(self) -> float:
        """sqrt(E R^2) = sqrt((rank - 1) / (n_pairs - 1)): what iid Gaussian scores reach by chance, unweighted."""
        return math.sqrt((self.rank - 1) / (self.n_pairs - 1)) if self.n_pairs > 1 else math.nan

    @cached_property
    def own_weights(self) -> tuple[float, ...]:
        """w at the distances that count; the last holds for all beyond."""
        return self.distance_weights[self.first_distance :][: self.width] or self.distance_weights[-1:]

    @property
    def unweighted(self) -> bool:
        return set(self.own_weights) == {1.0}

    @cached_property
    def total(self) -> float:
        """The weights of all pairs together: their number where nothing is weighted."""
        return float(self.counts()[1].sum())

    def weights(self, device: torch.device | str) -> Float[Tensor, " size"]:
        """w by distance, from the first one that counts; 0 beyond the window."""
        given = torch.tensor(self.own_weights, dtype=torch.float64, device=device)
        far = given[-1:].expand(self.width - len(given))
        return pad(torch.cat([given, far]), (0, self.size - self.width))

    def counts(self, device: torch.device | str = "cpu") -> Float[Tensor, "axis=3 1 size"]:
        """Weight of the pairs at every index of every axis, in corner coordinates: their number without weights."""
        weights = self.weights(device)
        at_tokens = weights.cumsum(0).flip(0)
        return torch.stack([weights * torch.arange(self.size, 0, -1, device=device), at_tokens, at_tokens])[:, None]

    def over_band(self, x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
        """sum_{j <= i} w_{i-j} x_j at every i: a cumulative sum where nothing is weighted, else by FFT."""
        if not self.unweighted:
            length = fft_length(2 * self.size)
            spectrum = torch.fft.rfft(self.weights(x.device), length) * torch.fft.rfft(x, length)
            return torch.fft.irfft(spectrum, length)[..., : self.size]
        below = x.cumsum(-1)
        if self.width < self.size:
            below[..., self.width :] -= below[..., : -self.width].clone()
        return below

    def normal(
        self, x: Float[Tensor, "axis=3 head size"], counts: Float[Tensor, "axis=3 1 size"]
    ) -> Float[Tensor, "axis=3 head size"]:
        r"""X'WX x, X the design matrix of pairs by (distance, query, key), W the weights: O(n), by FFT O(n log n).

        (X'WX x)_t = N_t x_t + the weighted sum of the other two axes over the indices that t meets. Also the distance,
        query and key sums of the additive matrix x stands for.
        """
        weights = self.weights(x.device)
        of_tokens = weights * x[1:].sum(0).cumsum(-1).flip(-1)
        of_distances = (weights * x[0]).cumsum(-1).flip(-1)
        met = self.over_band(x[1:]).flip(0, -1) + of_distances
        return torch.cat([of_tokens[None], met]).addcmul_(counts, x)

    def consistent(
        self, sums: Float[Tensor, "axis=3 head size"], counts: Float[Tensor, "axis=3 1 size"]
    ) -> Float[Tensor, "axis=3 head size"]:
        """Sums made those of one matrix: by any axis they have one total, and distance + s + key = n - 1 in the mean.

        What rounding added across the three free directions is taken out, spread in proportion to the counts.
        """
        t = torch.arange(self.size, dtype=counts.dtype, device=counts.device) / self.size
        one = torch.ones_like(t)
        free = torch.stack(
            [torch.cat(line) for line in ([one, -one, 0 * one], [one, 0 * one, -one], [t - t[-1], t, t])]
        )
        weighted = free * counts.flatten()
        excess = sums.transpose(0, 1).flatten(1) @ free.T @ torch.linalg.pinv(free @ weighted.T, hermitian=True)
        return sums - (excess @ weighted).unflatten(1, (3, -1)).transpose(0, 1)

    def mask(self, queries: Int[Tensor, " query"], keys: Int[Tensor, " key"]) -> Bool[Tensor, "query key"]:
        """Whether query i paired with key j counts, for tokens numbered as in the text."""
        distance = queries[:, None] - keys
        stop = self.first_distance + self.width
        return (distance >= self.first_distance) & (distance < stop) & (keys >= self.first_key)

    def spread(
        self, x: Float[Tensor, "axis=3 head size"], fill: int | float = math.nan
    ) -> tuple[Float[Tensor, "head distance"], Float[Tensor, "head query"], Float[Tensor, "head key"]]:
        """From corner coordinates to arrays as long as the text; `fill` where no pair is."""
        distance, query, key = x[0, :, : self.width], x[1].flip(-1), x[2]

        def place(part: Tensor, start: int) -> Tensor:
            return pad(part, (start, self.n_tokens - start - part.shape[-1]), value=fill)

        return place(distance, self.first_distance), place(query, self.first_query), place(key, self.first_key)
