"""Keys that a rule keeps within a budget, and the attention that they hold."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double


def key_ranks(
    scores: Float[Tensor, "head query key"], visible: Bool[Tensor, "query key"]
) -> Int[Tensor, "head query key"]:
    """Return how many keys of a query come before each: visible ones with a larger score, of equals the later ones."""
    order = scores.masked_fill(~visible, -torch.inf).flip(-1).argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter(-1, order, places).flip(-1)


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
    return (key_ranks(scores, visible) < budget) & visible


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
