"""Keys that a rule keeps within a budget, and the attention that they hold."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double


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
    ordered = ordered_keys(scores, visible)
    least = ordered.topk(min(budget, ordered.shape[-1]), sorted=False).values.amin(-1, keepdim=True)
    return (ordered >= least) & visible


def best_keys(
    scores: Float[Tensor, "head query key"], visible: Bool[Tensor, "query key"], budget: int
) -> Int[Tensor, "head query place"]:
    """Return the positions of the keys that `kept_keys` keeps, the best first; behind them keys that are not visible.

    Example:
        >>> scores, visible = torch.tensor([[[3.0, 1.0, 3.0, 9.0]]]), torch.tensor([[True, True, True, False]])
        >>> best_keys(scores, visible, 2).tolist()
        [[[2, 0]]]
    """
    return ordered_keys(scores, visible).topk(min(budget, scores.shape[-1])).indices


def ordered_keys(
    scores: Float[Tensor, "head query key"], visible: Bool[Tensor, "query key"]
) -> Int[Tensor, "head query key"]:
    """Return integers in the order of float32 scores, larger for the later of equal keys, and least where not visible.

    A float's bits, those of negative ones turned round, are integers in its order; the position of the key follows.
    """
    bits = (scores.float() + 0.0).view(torch.int32)  # -0.0 + 0.0 = 0.0
    bits = bits ^ ((bits >> 31) & (2**31 - 1))
    ordered = (bits.long() << 32) | torch.arange(scores.shape[-1], device=scores.device)
    return torch.where(visible, ordered, -(2**63))


def unions(
    best: Int[Tensor, "head query place"], members: Sequence[Sequence[int]], n_keys: int
) -> Bool[Tensor, "group query key"]:
    """Return which keys any head of each group keeps.

    Example:
        >>> unions(torch.tensor([[[2]], [[0]]]), [[0, 1]], 4).tolist()
        [[[True, False, True, False]]]
    """
    kept = torch.zeros(len(members), best.shape[1], n_keys, dtype=torch.bool, device=best.device)
    for group, of in zip(kept, members, strict=True):
        group.scatter_(-1, best[of].movedim(0, 1).flatten(1), True)
    return kept


def squared_correlations(
    x: Float[Tensor, "head query key"], y: Float[Tensor, "head query key"], visible: Bool[Tensor, "query key"]
) -> Float[Tensor, "3 head"]:
    """sum xy, sum xx and sum yy over visible keys, x and y less their mean in each query: R^2 = xy^2 / (xx yy)."""
    x, y = double(x), double(y)
    shown = visible.to(x.device)
    n = shown.sum(-1, keepdim=True).clamp(min=1)
    x, y = (one - one.masked_fill(~shown, 0).sum(-1, keepdim=True) / n for one in (x, y))
    x, y = (one.masked_fill(~shown, 0) for one in (x, y))
    return torch.stack([(x * y).sum((1, 2)), x.square().sum((1, 2)), y.square().sum((1, 2))])
