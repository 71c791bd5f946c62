"""What planes do to scores: at a distance against the next ones, along distance, for place or content of keys."""

from collections.abc import Sequence

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from tl_posgen.stats.correlations import pearson

N_NEXT = 3  # distances that one is held against


def scores_at(
    q: Complex[Tensor, "head pos plane"],
    k: Complex[Tensor, "head pos plane"],
    rows: Int[Tensor, " row"],
    distance: int,
) -> Float[Tensor, "head row plane"]:
    """s_m(i, i - D) = Re z^q_im conj(z^k_{i-D, m}) of these queries i >= D, rotated."""
    return (q[:, rows] * k[:, rows - distance].conj()).real


def contrast_at(
    q: Complex[Tensor, "head pos plane"],
    k: Complex[Tensor, "head pos plane"],
    rows: Int[Tensor, " row"],
    distance: int,
) -> Float[Tensor, "head plane"]:
    """E_i s_m(i, i - D) - 1/3 sum_{a=1..3} E_i s_m(i, i - D - a): by how much each plane lifts a diagonal above
    the next ones. Its sum over planes is that of the scores.

    Source: ours.
    """
    next_scores = [scores_at(q, k, rows, distance + more).mean(1) for more in range(1, N_NEXT + 1)]
    return scores_at(q, k, rows, distance).mean(1) - torch.stack(next_scores).mean(0)


def correlation_with_mean_curve(
    q: Complex[Tensor, "head pos plane"],
    k: Complex[Tensor, "head pos plane"],
    mean_curve: Float[Tensor, "head distance"],
    distances: Sequence[int],
    rows: Int[Tensor, " row"],
) -> Float[Tensor, " head"]:
    """E_i r_d(s(i, i - d), a(d)): how well the curve a of the mean query and the mean key foretells a query's scores at
    these distances.

    Source: TriAttention (arXiv 2604.04921), as we read it.
    """
    scores = torch.stack([scores_at(q, k, rows, distance).sum(-1) for distance in distances], -1)
    return pearson(scores, mean_curve[:, None].expand_as(scores)).nanmean(1)


def swap_scores(
    q: Complex[Tensor, "head plane"],
    contents: Complex[Tensor, "head pos plane"],
    turns: Complex[Tensor, "pos plane"],
    pairs: Int[Tensor, "pair two=2"],
    weights: Float[Tensor, "head pair"],
) -> tuple[Float[Tensor, " head"], Float[Tensor, " head"]]:
    """Return how far attention goes with places, and how far with contents, when two keys change contents.

    With d = (e^s_aa, e^s_bb) of two keys and e = (e^s_ba, e^s_ab), s_xy the score of content x at place y, the
    positional score is cos(d, e) and the symbolic one cos(d, (e_2, e_1)), means over pairs.

    Args:
        q: one query, rotated and scaled.
        contents: keys before RoPE.
        turns: by which each place rotates them.
        pairs: the two keys.
        weights: of a pair; heads that give none a weight are NaN.

    Source: reconstructed from Urrutia et al. 2026 (arXiv 2511.11579), as we read it; the weights: ours.
    """
    a, b = pairs.unbind(-1)

    def exponentials(places: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:  # cosines do not see their size
        scores = [(q[:, None] * (contents[:, content] * turns[place]).conj()).real.sum(-1) for content, place in places]
        highest = torch.maximum(*scores)
        return [(score - highest).exp() for score in scores]

    (d_a, d_b), (e_a, e_b) = exponentials([(a, a), (b, b)]), exponentials([(b, a), (a, b)])
    size = torch.hypot(d_a, d_b) * torch.hypot(e_a, e_b)
    by_place, by_content = (d_a * e_a + d_b * e_b) / size, (d_a * e_b + d_b * e_a) / size
    total = weights.sum(-1)
    return (weights * by_place).sum(-1) / total, (weights * by_content).sum(-1) / total
