"""Keys that a rule keeps within a budget, and the attention that they hold."""

import torch
from jaxtyping import Bool, Float
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
    ranked = scores.masked_fill(~visible, -torch.inf)
    least = ranked.topk(min(budget, ranked.shape[-1]), sorted=False).values.amin(-1, keepdim=True)
    above, equal = ranked > least, ranked == least
    from_behind = equal.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1)
    return (above | (equal & (from_behind <= budget - above.sum(-1, keepdim=True)))) & visible


def mass_of(
    pattern: Float[Tensor, "head query key"], kept: Bool[Tensor, "head query key"]
) -> Float[Tensor, "head query"]:
    """Return the attention that the kept keys hold."""
    return pattern.masked_fill(~kept.to(pattern.device), 0).sum(-1)


def best_masses(pattern: Float[Tensor, "head query key"]) -> Float[Tensor, "head query key"]:
    """Return the attention that the best 1, 2, .. keys of each query hold."""
    return pattern.sort(-1, descending=True).values.cumsum(-1)


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
