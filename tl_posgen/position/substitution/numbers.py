"""Profiles and mean keys of each query for splits of scores, and what a split leaves or replaces."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from tl_posgen.arithmetic import double
from tl_posgen.errors import check_share
from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs
from tl_posgen.rope.planes import turning_factors
from tl_posgen.rope.rotation import Rope, complex_planes, real_coordinates
from tl_posgen.rope.splits import DistanceDistribution, split_scores, uniform

NOTHING = 1e-20  # energy within rows below this share of the energy is rounding
ThresholdOf = Literal["head", "layer"]
FAR = 16  # tokens from which on a query counts for a sink
MAPS = ("scores", "position", "content")  # of `SplitMaps`


def positional_profile(
    q: Float[Tensor, "head pos d_head"], k: Float[Tensor, "head pos d_head"], rope: Rope, scale: float
) -> DistanceDistribution:
    """p(d | q_i) = softmax_d f(q_i, d), d = 0 .. n - 1: attention of query i by position alone, a row per query. Ours.

    With p a function of the query, f + g still is one of (q, d) plus one of (q, k), and each query's least-squares fit.
    """
    n = q.shape[1]
    zq, zm = complex_planes(q, rope), complex_planes(k.mean(dim=1, keepdim=True), rope)
    turn = turning_factors(torch.arange(n, device=q.device), rope, q.shape[-1]).to(zq)
    f = scale * real_coordinates(zq * zm.conj()) @ real_coordinates(turn.conj()).mT
    return DistanceDistribution(torch.arange(n, device=q.device), f.softmax(-1))


def running_mean_key(
    k: Float[Tensor, "head pos d_head"], window: int | None = None
) -> Float[Tensor, "head pos d_head"]:
    """kbar_i = mean of the keys that query i sees: those up to i, or the last `window` of them."""
    total = double(k).cumsum(dim=1)
    seen = torch.arange(1, k.shape[1] + 1, device=k.device)
    if window is not None and window < k.shape[1]:
        total = torch.cat([total[:, :window], total[:, window:] - total[:, :-window]], dim=1)
        seen = seen.clamp(max=window)
    return (total / seen[:, None]).to(k.dtype)


def attention_from_afar(
    pattern: Float[Tensor, "head query key"], visible: Bool[Tensor, "query key"]
) -> Float[Tensor, " key"]:
    """share_j = sum_i A_ij / max(n_j, 16) over the n_j queries i >= j + 16 that see key j, A the mean over heads. Ours.

    Near queries attend to any key, and a key near the end has few that are far: missing ones count as 0.

    Example:
        >>> first = torch.eye(40)[[0] * 40]  # every query attends to the first key alone
        >>> attention_from_afar(first[None], torch.ones(40, 40).tril() > 0)[:3].tolist()
        [1.0, 0.0, 0.0]
    """
    far = visible & visible.new_ones(visible.shape).tril(-FAR)
    return double(pattern).mean(0).masked_fill(~far, 0).sum(0) / far.sum(0).clamp(min=FAR)


def random_keys(sinks: Bool[Tensor, " key"], visible: Bool[Tensor, "query key"], seed: int = 0) -> Bool[Tensor, " key"]:
    """Return keys drawn from those that are no sinks, until as many queries as of all sinks, or more, see them: as many
    scores. None without sinks."""
    seen_by, generator = visible.sum(0), torch.Generator().manual_seed(seed)
    drawn = torch.randperm(len(sinks), generator=generator).to(sinks.device)
    drawn = drawn[~sinks[drawn]]
    before = seen_by[drawn].cumsum(0) - seen_by[drawn]
    return torch.zeros_like(sinks).index_fill(0, drawn[before < seen_by[sinks].sum()], True)


def add_residual(
    approximate: Float[Tensor, "head query key"], exact: Float[Tensor, "head query key"], share: int | float
) -> Float[Tensor, "head query key"]:
    """approximate + share (exact - approximate): 0 drops the residual, 1 is exact; entries at -inf stay approximate."""
    return torch.where(exact.isfinite(), approximate + share * (exact - approximate), approximate)


def below_quantile(
    scores: Float[Tensor, "head query key"],
    visible: Bool[Tensor, "query key"],
    gamma: int | float = 0.97,
    threshold: ThresholdOf | str = "head",
) -> Bool[Tensor, "head query key"]:
    """W_ij <= the floor(gamma n)-th smallest of n visible scores; gamma 1 selects all visible ones, 0 none.

    The n scores are all of a head ("head"), or the last row of the first given head, for the whole layer ("layer").

    Source: the public code of the first author of Han & Ji 2025 for "layer", with head 0 (gamma = 0.97, layers from 4
    on). "head", and the treatment of ties and of ranks between two scores, are ours.

    Example:
        >>> scores, visible = torch.tensor([[[0.0, 0.0], [1.0, 2.0]], [[3.0, 0.0], [0.0, 1.0]]]), torch.ones(2, 2) > 0
        >>> below_quantile(scores, visible.tril(), 0.5, "layer").int().tolist()  # 1 is the smaller of [1, 2]
        [[[1, 0], [1, 0]], [[0, 0], [1, 1]]]
    """
    check_share("gamma", gamma)
    if gamma == 1:
        return visible.expand_as(scores)
    seen = scores[:, visible] if threshold == "head" else scores[:1, -1, visible[-1]]
    rank = int(gamma * seen.shape[1] + 1e-9)
    if rank == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    return (scores <= seen.kthvalue(rank, dim=1).values[:, None, None]) & visible


def attention_kl(
    exact: Float[Tensor, "head query key"],
    approximate: Float[Tensor, "head query key"],
    visible: Bool[Tensor, "query key"],
    sinks: Float[Tensor, " head"] | None = None,
) -> Float[Tensor, "head query"]:
    """KL(softmax(exact_i) || softmax(approximate_i)) in nats over the visible keys of each query, in float64.

    Args:
        sinks: logits that join each row's softmax: what they take is one outcome more.
    """
    return kl_of_logs(log_attention(exact, visible, sinks), approximate, visible, sinks)


def log_attention(
    scores: Float[Tensor, "head query key"],
    visible: Bool[Tensor, "query key"],
    sinks: Float[Tensor, " head"] | None = None,
) -> Float[Tensor, "head query outcome"]:
    """Return ln softmax(scores_i) over the visible keys of each query, -inf elsewhere, in float64; in one column more
    what the sinks take, where there are some."""
    logits = double(scores).masked_fill(~visible, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.to(logits)[:, None, None].expand(*logits.shape[:2], 1)], -1)
    return logits.log_softmax(-1)


def kl_of_logs(
    log_p: Float[Tensor, "head query outcome"],
    approximate: Float[Tensor, "head query key"],
    visible: Bool[Tensor, "query key"],
    sinks: Float[Tensor, " head"] | None = None,
) -> Float[Tensor, "head query"]:
    """Return `attention_kl` of the `log_attention` of exact scores."""
    outcomes = visible if sinks is None else pad(visible, (0, 1), value=True)
    gap = torch.where(outcomes, log_p - log_attention(approximate, visible, sinks), 0.0)
    return (log_p.exp() * gap).sum(-1)


@dataclass(frozen=True)
class SplitMaps:
    """Maps of scores W, position f and content g, each row less its mean over the keys that count; float64.

    Attributes:
        scores, position, content: NaN at pairs that do not count: those of the first token, and invisible ones.
        r: Pearson's r of W with f, with g and with f + g, within rows; NaN where either is constant in rows.
    """

    scores: Float[Tensor, "head query key"]
    position: Float[Tensor, "head query key"]
    content: Float[Tensor, "head query key"]
    r: Float[Tensor, "part=3 head"]


def split_maps(
    scores: Float[Tensor, "head query key"],
    q: Float[Tensor, "head pos d_head"],
    k: Float[Tensor, "head pos d_head"],
    rope: Rope,
    scale: float,
    *,
    window: int | None = None,
    bias: Float[Tensor, "head pos pos"] | None = None,
) -> SplitMaps:
    """f_ij = scale <R_i q_i, R_j kbar> + bias_ij, g_ij = scale <Rbar q_i, k_j - kbar>, each within rows.

    kbar is the mean of the keys without the first, Rbar the mean of R_d over the distances 0 .. n - 1 of n tokens (or
    of the window). This split is the least-squares fit over all triples (query, key, distance), so f is the position
    part of the measure `variance`, g its content part, and W - f - g its interaction.

    Args:
        scores: W, the model's scores, -inf where invisible.
        q, k: before RoPE.
        bias: what the layer adds by distance, such as ALiBi's -slope (i - j).

    Source: Han & Ji 2025 (arXiv 2503.13305) for the two maps next to the true one; their split is not known in full.
    This split, `split_scores`, and the maps within rows are ours.

    Example:
        >>> rope = Rope(torch.zeros(1, dtype=torch.float64))  # a plane that never turns: all is content
        >>> q, k = torch.randn(2, 1, 9, 2, generator=torch.Generator().manual_seed(0))
        >>> split_maps(q @ k.mT, q, k, rope, 1.0).r.round(decimals=5).tolist()
        [[nan], [1.0], [1.0]]
    """
    n, positions = q.shape[1], torch.arange(q.shape[1], device=q.device)
    counted = CausalPairs(n, window, first_token=False).mask(positions, positions)
    q, k = double(q), double(k)
    split = split_scores(q, k, rope, scale, uniform(min(n, window or n)), k[:, 1:].mean(1))
    position = split.position if bias is None else split.position + bias.to(split.position)
    w, f, g = (_within_rows(values, counted) for values in (scores, position, split.content))
    parts = torch.stack([f, g, f + g])
    energies = w.square().sum((-2, -1)) * parts.square().sum((-2, -1))
    r = (w * parts).sum((-2, -1)) / energies.sqrt()
    w, f, g = (values.masked_fill(~counted, torch.nan) for values in (w, f, g))
    return SplitMaps(w, f, g, r)


def _within_rows(
    scores: Float[Tensor, "head query key"], counted: Bool[Tensor, "query key"]
) -> Float[Tensor, "head query key"]:
    """W_ij - mean of row i over the keys that count; 0 elsewhere, and 0 where only rounding is left."""
    scores = double(scores).masked_fill(~counted, 0)
    means = scores.sum(-1) / counted.sum(-1).clamp(min=1)
    centred, size = (scores - means[..., None]).masked_fill_(~counted, 0), scores.square().sum((1, 2))
    return centred.masked_fill_((centred.square().sum((1, 2)) <= NOTHING * size)[:, None, None], 0)
