"""Scores with the interaction of query, key and distance cut, doubled, shuffled, or with as much noise: as hooks.

W_ij = f(q_i, d) + g(q_i, k_j) + D_ij, d = i - j, or min(i - j, training length) in LM-Infinite's windows. f is of the
mean key, g of each query's profile p(d) = softmax_d f(q_i, d) over the distances of training, as `query_profile` of
`substitution` has it. D is what they leave, the interaction, less its mean over each row, which softmax does not see.
D' is D shuffled among the queries of one training length, distance by distance: as much of it at every distance, and
at the wrong query and key.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_posgen.editing.printed_hooks import HookList
from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.editing.score_functions import finished
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.model import Model
from tl_posgen.position.substitution.numbers import positional_profile
from tl_posgen.rope.scores_at import scores_frozen_beyond
from tl_posgen.rope.splits import DistanceDistribution, split_scores

EDITS = {  # name -> how often D and D' are added
    "intact": (0, 0),
    "cut": (-1, 0),  # f + g
    "doubled": (1, 0),  # as much changed as by the cut
    "noise": (0, 1),  # likewise, and the interaction stays
    "shuffled": (-1, 1),  # scores as large as ever, the interaction of no use
}
FROZEN = ("position frozen", "interaction frozen")  # this part alone at min(i - j, training length), without windows
N_GLOBAL = 10  # first tokens that every query sees in LM-Infinite's windows


def edit_scores(model: Model, inside: int, edit: str, *, windows: bool = False) -> HookList:
    """Return hooks that edit the scores of all heads; with LM-Infinite's windows too, or without."""

    def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        attended = capture.geometry.visible(capture.length, capture.q.device)
        if windows:
            distance = capture.positions[:, None] - capture.positions
            attended = attended & ((capture.positions < N_GLOBAL) | (distance < inside))
        scores = exact(capture, inside, frozen=windows)
        if edit in FROZEN:
            scores = frozen_part(capture, inside, edit)
        elif edit != "intact":
            own, moved = EDITS[edit]
            residual = interaction(capture, inside, attended, frozen=windows)
            generator = torch.Generator().manual_seed(capture.layer)
            scores = scores + own * residual + moved * shuffled(residual, attended, inside, generator)
        return scores.masked_fill(~attended, -torch.inf)

    return replace_scores(model, scores_of)


def exact(capture: LayerCapture, inside: int, *, frozen: bool) -> Float[Tensor, "head query key"]:
    """Return W at the true distances, or at those frozen beyond the training length."""
    if not frozen:
        return capture.scores()
    geometry, away = capture.geometry, capture.query_positions[:, None] - capture.positions
    products = scores_frozen_beyond(capture.q, capture.k, geometry.rope, geometry.scale, inside)
    return finished(products, capture, away.clamp(max=inside))


def position(capture: LayerCapture, inside: int, *, frozen: bool) -> Float[Tensor, "head query key"]:
    """Return f at the true distances, or at those frozen beyond the training length."""
    geometry, mean_key = capture.geometry, capture.k.mean(1, keepdim=True).expand_as(capture.k)
    furthest = inside if frozen else capture.length
    return scores_frozen_beyond(capture.q, mean_key, geometry.rope, geometry.scale, furthest)


def content(capture: LayerCapture, inside: int) -> Float[Tensor, "head query key"]:
    """Return g."""
    q, k, rope, scale = capture.q, capture.k, capture.geometry.rope, capture.geometry.scale
    profile = positional_profile(q, k, rope, scale)
    weights = profile.weights[..., :inside]
    trained = DistanceDistribution(profile.distances[:inside], weights / weights.sum(-1, keepdim=True))
    return split_scores(q, k, rope, scale, trained).content


def interaction(
    capture: LayerCapture, inside: int, attended: Bool[Tensor, "query key"], *, frozen: bool
) -> Float[Tensor, "head query key"]:
    """Return D, zero where a key is not attended."""
    of_all = exact(capture, inside, frozen=frozen) - position(capture, inside, frozen=frozen)
    residual = (of_all - content(capture, inside)).masked_fill(~attended, 0)
    mean = residual.sum(-1, keepdim=True) / attended.sum(-1, keepdim=True)
    return (residual - mean).masked_fill(~attended, 0)


def frozen_part(capture: LayerCapture, inside: int, edit: str) -> Float[Tensor, "head query key"]:
    """Return W with f, or all but f, at distances frozen beyond the training length."""
    of_position, of_rest = edit == FROZEN[0], edit == FROZEN[1]
    rest = exact(capture, inside, frozen=of_rest) - position(capture, inside, frozen=of_rest)
    return position(capture, inside, frozen=of_position) + rest


def shuffled(
    residual: Float[Tensor, "head query key"],
    attended: Bool[Tensor, "query key"],
    inside: int,
    generator: torch.Generator,
) -> Float[Tensor, "head query key"]:
    """Return D': each distance's entries of the queries of one multiple of `inside` in another order."""
    n = residual.shape[-1]
    query, every = torch.arange(n)[:, None], torch.arange(n)
    key = (query - every).clamp(min=0)  # [query, distance]
    there = (every <= query) & attended.gather(1, key)
    by_distance = residual.gather(2, key.expand_as(residual))
    for start in range(0, n, inside):
        rows = slice(start, start + inside)
        known = there[rows]
        drawn = torch.rand(known.shape, generator=generator).masked_fill(~known, 2).argsort(0)
        to = (~known).int().argsort(dim=0, stable=True)  # attended ones first, as in `drawn`
        source = torch.empty_like(to).scatter(0, to, drawn)
        by_distance[:, rows] = by_distance[:, rows].gather(1, source.expand_as(by_distance[:, rows]))
    return by_distance.gather(2, key.expand_as(residual)).masked_fill(~attended, 0)
