"""Attention mass taken from drawn keys: as much as other keys of the same query hold."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def take_from_drawn_keys(
    pattern: Float[Tensor, "head query key"], hidden: Bool[Tensor, "#head query key"], generator: torch.Generator
) -> Float[Tensor, "head query key"]:
    """p_ij - t_ij with sum_j t_ij = min(m_i, 1 - m_i), m_i = sum of p_ij over hidden keys; t_ij is 0 at hidden keys.

    Of every query, keys that are not hidden give all their mass in a drawn order until m_i is taken, the last of them a
    part. Where m_i is over a half, all of the others give theirs.

    Example:
        >>> pattern = torch.tensor([[[0.25, 0.25, 0.5]]]).double()
        >>> left = take_from_drawn_keys(pattern, torch.tensor([[[True, False, False]]]), torch.Generator())
        >>> left[0, 0, 0].item(), round(left.sum().item(), 9)
        (0.25, 0.75)
    """
    mass = pattern.masked_fill(~hidden, 0).sum(-1, keepdim=True)
    order = torch.rand(pattern.shape, generator=generator).argsort(-1).to(pattern.device)
    others = pattern.masked_fill(hidden, 0).gather(-1, order)
    taken = torch.minimum(others, (mass - (others.cumsum(-1) - others)).clamp(min=0))
    return pattern - torch.zeros_like(pattern).scatter(-1, order, taken)
