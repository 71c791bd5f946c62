"""Causal (query, key) pairs that a fit is made over, and the normal equations of three additive axes on them."""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from tl_posgen.arithmetic import DOUBLE
from tl_posgen.errors import InputError
from tl_posgen.rope.bilinear_sums import fft_length

_SPAN = 1e15  # largest ratio of weights: in float64 lighter pairs would be lost


@dataclass(frozen=True)
class CausalPairs:
    r"""Causal pairs (i, j) that count: 0 <= i - j < window, without token 0 if that is left out.

    Without the first token (as query and as key) a causal triangle remains, smaller by one. Its three axes are
    symmetric: count the queries from the last one backwards, s = (n - 1) - i, and every visible pair has

        distance + s + key = n - 1,      all three >= 0,

    so index t of an axis has n - t pairs, one with each of the indices 0 .. n - 1 - t of either other axis. Arrays in
    "corner coordinates" are [axis, head, t] with the axes in the order distance, query (from the last), key.

    Attributes:
        n_tokens: length of the text.
        window: a query sees the `window` last keys, itself included; None for all.
        first_token: whether token 0 counts.
        distance_weights: w_0, w_1, ...: weight of a pair at each distance; the last holds for all larger distances.

    Raises:
        InputError: no pair is left, a weight is not above 0, or the ratio of two weights is above 1e15.

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
    distance_weights: tuple[float, ...] = (1.0,)

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise InputError(f"window must be at least 1, or None for no window; got {self.window}")
        if self.size < 1:
            raise InputError(f"no (query, key) pair is left in {self}; give more tokens or leave out less")
        if not self.distance_weights or not all(0 < weight < math.inf for weight in self.distance_weights):
            raise InputError(
                f"weights by distance, {list(self.distance_weights)}: each must be above 0, since distances without "
                "weight leave a, b and c open; give far ones a small weight, such as 1e-6, or a window"
            )
        low, high = min(self.distance_weights), max(self.distance_weights)
        if high > _SPAN * low or not 1 / _SPAN <= high <= _SPAN:
            raise InputError(
                f"weights by distance, from {low:g} to {high:g}: give weights about 1, the largest at most {_SPAN:g} "
                "times the least; a common factor changes nothing"
            )

    @property
    def first(self) -> int:
        """The first token that counts."""
        return int(not self.first_token)

    @property
    def size(self) -> int:
        """n, the number of queries, of keys and, without a window, of distances."""
        return self.n_tokens - self.first

    @property
    def width(self) -> int:
        """Number of distances."""
        return min(self.window or self.n_tokens, self.size)

    @property
    def n_pairs(self) -> int:
        return self.size * self.width - self.width * (self.width - 1) // 2

    @property
    def rank(self) -> int:
        """Number of independent parameters of distances, queries and keys: two constants and one straight line are
        free; with a single distance any scores are fitted."""
        return self.size if self.width == 1 else self.width + 2 * self.size - 3

    @property
    def saturated(self) -> bool:
        """Whether any scores are fitted exactly: as many parameters as pairs (up to 3 tokens)."""
        return self.rank >= self.n_pairs

    @cached_property
    def own_weights(self) -> tuple[float, ...]:
        """w at the distances that count; the last holds for all larger distances."""
        return self.distance_weights[: self.width]

    @cached_property
    def unweighted(self) -> bool:
        return set(self.own_weights) == {1.0}

    @property
    def iid_r(self) -> float:
        """sqrt(E R^2) = sqrt((rank - 1) / (n_pairs - 1)): r of iid Gaussian scores by chance, without weights."""
        return math.sqrt((self.rank - 1) / (self.n_pairs - 1)) if self.n_pairs > 1 else math.nan

    @cached_property
    def total(self) -> float:
        """Return the sum of the weights of all pairs; without weights, their number."""
        return float(self.counts()[1].sum())

    def weights(self, device: torch.device | str) -> Float[Tensor, " size"]:
        """Return w by distance; 0 beyond the window. Read only."""
        return _tables(self, torch.device(device))[0]

    def counts(self, device: torch.device | str = "cpu") -> Float[Tensor, "axis=3 1 size"]:
        """Return the summed weight of the pairs at every index of every axis, in corner coordinates. Read only."""
        return _tables(self, torch.device(device))[1]

    def over_band(self, x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
        """sum_{j <= i} w_{i-j} x_j at every i: a cumulative sum without weights, else by FFT."""
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

        (X'WX x)_t = N_t x_t + the weighted sum of the other two axes over the pairs of t: with x = (a, b, c), the sums
        by distance, query and key of the additive matrix a_{i-j} + b_i + c_j.
        """
        of_distances, at_distances = x[0], x[1:].sum(0).cumsum(-1).flip(-1)
        if not self.unweighted or self.width < self.size:
            weights = self.weights(x.device)
            of_distances, at_distances = weights * of_distances, weights * at_distances
        at_tokens = self.over_band(x[1:]).flip(0, -1) + of_distances.cumsum(-1).flip(-1)
        return torch.cat([at_distances[None], at_tokens]).addcmul_(counts, x)

    def consistent(self, sums: Float[Tensor, "axis=3 head size"]) -> Float[Tensor, "axis=3 head size"]:
        """Project sums onto those of one matrix: equal totals on the three axes, and mean distance + s + key = n - 1.

        Rounding adds a part along the three free directions; it is removed in proportion to the counts.
        """
        _, _, free, weighted = _tables(self, sums.device)
        flat = sums.transpose(0, 1).flatten(1)
        return torch.addmm(flat, flat @ free, weighted, alpha=-1).unflatten(1, (3, -1)).transpose(0, 1)

    def mask(self, queries: Int[Tensor, " query"], keys: Int[Tensor, " key"]) -> Bool[Tensor, "query key"]:
        """Return whether query i paired with key j counts, for tokens numbered as in the text."""
        distance = queries[:, None] - keys
        return (distance >= 0) & (distance < self.width) & (keys >= self.first)

    def spread(
        self, x: Float[Tensor, "axis=3 head size"], fill: int | float = math.nan
    ) -> tuple[Float[Tensor, "head distance"], Float[Tensor, "head query"], Float[Tensor, "head key"]]:
        """Return arrays as long as the text from corner coordinates, with `fill` where there is no pair."""
        starts = (0, self.first, self.first)
        distance, query, key = (
            pad(part, (start, self.n_tokens - start - part.shape[-1]), value=fill)
            for part, start in zip((x[0, :, : self.width], x[1].flip(-1), x[2]), starts, strict=True)
        )
        return distance, query, key


@lru_cache(maxsize=32)
@torch.inference_mode(False)
def _tables(pairs: CausalPairs, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return weights, counts, and the free directions that `consistent` removes: how much of each sums have, and each
    one times the counts."""
    *near, far = pairs.own_weights
    in_window = torch.tensor([*near, *[far] * (pairs.width - len(near))], dtype=DOUBLE, device="cpu")
    weights, size = pad(in_window, (0, pairs.size - pairs.width)), pairs.size
    at_tokens = weights.cumsum(0).flip(0)
    counts = torch.stack([weights * torch.arange(size, 0, -1, device="cpu"), at_tokens, at_tokens])[:, None]
    t = torch.arange(size, dtype=DOUBLE, device="cpu") / size
    ones = torch.ones_like(t)
    free = torch.stack(
        [torch.cat(line) for line in ([ones, -ones, 0 * ones], [ones, 0 * ones, -ones], [t - t[-1], t, t])]
    )
    weighted = free * counts.flatten()
    tables = weights, counts, free.T @ torch.linalg.pinv(free @ weighted.T, hermitian=True), weighted
    weights, counts, free, weighted = (x.to(device) for x in tables)
    return weights, counts, free, weighted


def normal_blocks(
    p: Float[Tensor, "query key"],
) -> tuple[Float[Tensor, " distance"], Float[Tensor, "distance query_and_key"], Tensor]:
    """X'PX in three blocks, p_ij the weight of pair (i, j): distances (its diagonal), distances with queries and keys,
    queries and keys [query_and_key, query_and_key]."""
    index = torch.arange(len(p), device=p.device)
    distance = index[:, None] - index

    def by_distance(x: Tensor) -> Tensor:  # entry (i, i - d) of x at (i, d)
        return x.gather(1, distance.clamp(min=0)).masked_fill(distance < 0, 0)

    at_query, at_key = by_distance(p), by_distance(p.T.flip(0, 1)).flip(0)
    tokens = torch.cat([torch.cat([p.sum(1).diag(), p], 1), torch.cat([p.T, p.sum(0).diag()], 1)])
    return at_query.sum(0), torch.cat([at_query.T, at_key.T], 1), tokens
