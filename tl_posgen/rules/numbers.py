"""Numbers of the rules of attention: by what a rule ranks the keys of a query, and which keys it keeps.

Rules know distances, and means of queries and keys, but not the attention. Query i of n queries is the one at key
n_keys - n_queries + i, as everywhere with a KV cache.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor

from tl_posgen.rope.planes import mean_curves
from tl_posgen.rope.rotation import Rope, complex_planes, real_coordinates
from tl_posgen.rope.scores_at import scores_at_positions
from tl_posgen.rope.splits import DistanceDistribution, split_scores

Rule = Literal["window", "sinks", "slashes", "vertical", "slashes_and_vertical", "mean_query", "position_and_content"]
RULES: tuple[Rule, ...] = get_args(Rule)  # the cheapest first
_N_SINKS = 4
_STEP = 2.0**-10  # logits: equal keys, such as a token's in the first layer, are equal whatever rounding makes of them


@dataclass(frozen=True)
class Means:
    """Calibration of some heads of a layer.

    Attributes:
        q, k: qbar and kbar, the mean query and the mean key before RoPE; a mean key for each query head.
        n_distances: ubar, the mean factor by which a plane turns, is over the distances 0 .. n_distances - 1, weighted
            by 1 / (d + 1), as attention mostly is near.
    """

    q: Float[Tensor, "head d_head"]
    k: Float[Tensor, "head d_head"]
    n_distances: int

    def turn(self, rope: Rope) -> Complex[Tensor, " plane_and_rest"]:
        """ubar_m = sum_d w(d) u_m(d) / sum_d w(d), w(d) = 1 / (d + 1)."""
        d = torch.arange(self.n_distances)
        weights = 1 / (d.double() + 1)
        return DistanceDistribution(d, weights / weights.sum()).mean_turn(rope, self.q.shape[-1])


def rule_scores(
    rule: Rule,
    q: Float[Tensor, "head query d_head"],
    k: Float[Tensor, "head key d_head"],
    means: Means,
    rope: Rope,
    scale: float,
    bias: Float[Tensor, "head query key"] | None = None,
) -> Float[Tensor, "head query key"]:
    """r_ij, by which rule r ranks key j of query i: the keys with the largest are kept. With d = i - j:

    window: -d. sinks: the first four keys, the first one before the others, then -d.
    slashes: a(d) = s Re sum_m qbar_m conj(kbar_m) u_m(d).
    vertical: c(j) = s Re sum_m qbar_m conj(k_jm - kbar_m) ubar_m, to 1/1024. slashes_and_vertical: a(d) + c(j).
    mean_query: s Re sum_m qbar_m conj(k_jm) u_m(d).
    position_and_content: s Re sum_m q_im conj(kbar_m) u_m(d) + s Re sum_m q_im conj(k_jm - kbar_m) ubar_m.

    As shares of the variance of a score these are d, k, d + k, d + k + kd and d + qd + k + qk (and what is the same for
    all keys of a query). A soft cap is left out: without a bias it changes no ranking.

    Args:
        q, k: before RoPE.
        bias: what the layer adds by distance, such as ALiBi's -slope d: part of every rule that has d and a mean.

    Source: window and sinks: Xiao et al. 2023 (arXiv 2309.17453). mean_query: the trigonometric series of TriAttention
    (arXiv 2604.04921), reconstructed from public text, without its weights by norms and without averages over later
    queries. Expected Attention (arXiv 2510.00636), reconstructed from its abstract, ranks keys by their expected
    attention over later queries, whose turns it averages as vertical and the content part do; position_and_content
    does that for the query that is there, and is ours, as are slashes and vertical keys from means alone.
    """
    n, distance = k.shape[1], distances_of(q.shape[1], k.shape[1], q.device)
    position = torch.arange(n, device=q.device)
    if rule in ("window", "sinks"):
        near = (-distance).to(q).expand(len(q), -1, -1)
        return near if rule == "window" else torch.where(position < _N_SINKS, (_N_SINKS - position).to(near), near)
    if rule == "vertical":
        keys = (_vertical(k, means, rope, scale) / _STEP).round() * _STEP
        return keys[:, None].expand(-1, q.shape[1], -1)
    if rule == "position_and_content":
        scores = split_scores(q, k, rope, scale, means.turn(rope).expand(len(q), -1), means.k).scores
    elif rule == "mean_query":
        mean_queries = means.q.to(k)[:, None].expand(-1, q.shape[1], -1)
        scores = scores_at_positions(mean_queries, k, rope, scale, position[n - q.shape[1] :], position)
    else:
        products = complex_planes(means.q, rope) * complex_planes(means.k, rope).conj()
        slashes = scale * mean_curves(products, rope, n, q.shape[-1])
        scores = slashes.to(q)[:, distance.clamp(min=0)]
        if rule == "slashes_and_vertical":
            scores = scores + _vertical(k, means, rope, scale)[:, None]
    return scores if bias is None else scores + bias.to(scores)


def distances_of(n_queries: int, n_keys: int, device: torch.device) -> Int[Tensor, "query key"]:
    """Return how far each key stands before each query; negative behind it."""
    position = torch.arange(n_keys, device=device)
    return position[n_keys - n_queries :, None] - position


def _vertical(k: Float[Tensor, "head key d_head"], means: Means, rope: Rope, scale: float) -> Float[Tensor, "head key"]:
    """c(j) = scale Re sum_m qbar_m conj(k_jm - kbar_m) ubar_m."""
    turned = complex_planes(means.q.to(k), rope)
    turned = real_coordinates(turned * means.turn(rope).to(turned))
    centred = real_coordinates(complex_planes(k - means.k.to(k)[:, None], rope))
    return scale * (centred @ turned[..., None])[..., 0]


def drawn_scores(
    heads: Int[Tensor, " head"], n_queries: int, n_keys: int, seed: int
) -> Float[Tensor, "head query key"]:
    """Return numbers in [0, 1] of head, query and key, as good as drawn, and the same when a prompt is written on."""
    position = torch.arange(n_keys, device=heads.device)
    query = position[n_keys - n_queries :, None]
    drawn = _scrambled(torch.full_like(heads[:, None, None], seed % 2**32))
    for number in (heads[:, None, None], query, position):
        drawn = _scrambled(drawn + number)
    return drawn.float() / 2**32


def _scrambled(x: Int[Tensor, "*place"]) -> Int[Tensor, "*place"]:
    """Return a whole number below 2^32 for each below 2^33 that seems to have nothing to do with it."""
    for _ in range(2):
        x = (x ^ (x >> 16)) % 2**32 * 0x45D9F3B % 2**32
    return x ^ (x >> 16)


# Keys that are kept


def kept_keys(
    scores: Float[Tensor, "head query key"], visible: Bool[Tensor, "query key"], budget: int
) -> Bool[Tensor, "head query key"]:
    """Keep the `budget` visible keys of a query with the largest scores, the later one of equals; all of fewer.

    The query's own key and the first ones count and are ranked as all others.

    Example:
        >>> scores, visible = torch.tensor([[[3.0, 1.0, 2.0, 9.0]]]), torch.tensor([[True, True, True, False]])
        >>> kept_keys(scores, visible, 2).tolist()
        [[[True, False, True, False]]]
    """
    is_kept = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    return is_kept.scatter_(-1, best_keys(scores, visible, budget), value=True) & visible


def best_keys(
    scores: Float[Tensor, "head query key"], visible: Bool[Tensor, "query key"], budget: int
) -> Int[Tensor, "head query place"]:
    """Return the positions of the keys that `kept_keys` keeps, in any order; of fewer, also keys that are not visible.

    A float's bits, those of negative ones turned round, are integers in its order; the position of the key follows.

    Example:
        >>> scores, visible = torch.tensor([[[3.0, 1.0, 3.0, 9.0]]]), torch.tensor([[True, True, True, False]])
        >>> best_keys(scores, visible, 2).sort().values.tolist()
        [[[0, 2]]]
    """
    bits = (scores.float() + 0.0).view(torch.int32)  # -0.0 + 0.0 = 0.0
    bits = bits ^ ((bits >> 31) & (2**31 - 1))
    ordered = (bits.long() << 32) | torch.arange(scores.shape[-1], device=scores.device)
    return torch.where(visible, ordered, -(2**63)).topk(min(budget, scores.shape[-1]), sorted=False).indices
