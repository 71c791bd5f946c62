"""Maps of a head's scores, their position part and their content part, pair by pair within rows."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs
from tl_posgen.position.substitution.numbers.splits import uniform
from tl_posgen.rope.rotation import Rope
from tl_posgen.rope.splits import split_scores

NOTHING = 1e-20  # energy within rows below this share of the energy is rounding


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
    slopes: Float[Tensor, " head"] | None = None,
) -> SplitMaps:
    """f_ij = scale <R_i q_i, R_j kbar> - slope (i - j), g_ij = scale <Rbar q_i, k_j - kbar>, each within rows.

    kbar is the mean of the keys without the first, Rbar the mean of R_d over the distances 0 .. n - 1 of n tokens (or
    of the window). This split is the least-squares fit over all triples (query, key, distance), so f is the position
    part of the measure `variance`, g its content part, and W - f - g its interaction.

    Args:
        scores: W, the model's scores, -inf where invisible.
        q, k: before RoPE.
        slopes: of ALiBi.

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
    position = split.position
    if slopes is not None:
        position = position - slopes.to(position)[:, None, None] * (positions[:, None] - positions)
    w, f, g = (within_rows(one, counted) for one in (scores, position, split.content))
    parts = torch.stack([f, g, f + g])
    energies = w.square().sum((-2, -1)) * parts.square().sum((-2, -1))
    r = (w * parts).sum((-2, -1)) / energies.sqrt()
    w, f, g = (one.masked_fill(~counted, torch.nan) for one in (w, f, g))
    return SplitMaps(w, f, g, r)


def within_rows(
    scores: Float[Tensor, "head query key"], counted: Bool[Tensor, "query key"]
) -> Float[Tensor, "head query key"]:
    """W_ij - mean of row i over the keys that count; 0 elsewhere, and 0 where only rounding is left."""
    scores = double(scores).masked_fill(~counted, 0)
    means = scores.sum(-1) / counted.sum(-1).clamp(min=1)
    centred, size = (scores - means[..., None]).masked_fill_(~counted, 0), scores.square().sum((1, 2))
    return centred.masked_fill_((centred.square().sum((1, 2)) <= NOTHING * size)[:, None, None], 0)
