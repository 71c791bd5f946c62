"""Massive coordinates of queries and keys, and vectors with one coordinate at another value."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double

MASSIVE = 5.0  # times the mean over the coordinates of a head


def massive_coordinates(mean_square: Float[Tensor, "head coordinate"]) -> Bool[Tensor, "head coordinate"]:
    """M_d > 5 mean_d M_d, M_d = (E x_d^2)^1/2 over tokens: coordinates of a head that dwarf its others.

    Source: Jin et al. 2025 (arXiv 2502.01563), as we read it.

    Example:
        >>> massive_coordinates(torch.tensor([[400.0, *[1.0] * 15]])).sum().item()
        1
    """
    size = double(mean_square).sqrt()
    return size > MASSIVE * size.mean(-1, keepdim=True)


def largest_coordinate(x: Float[Tensor, "head pos coordinate"]) -> Int[Tensor, " head"]:
    """argmax_d E x_d^2 over tokens: the coordinate of each head that is massive if any is."""
    return x.norm(dim=1).argmax(-1)


def another_coordinate(x: Float[Tensor, "head pos coordinate"], seed: int) -> Int[Tensor, " head"]:
    """Return a coordinate of each head drawn from all but its largest.

    Example:
        >>> another_coordinate(torch.tensor([[[9.0, 1.0]], [[1.0, 9.0]]]), seed=0).tolist()
        [1, 0]
    """
    order = torch.rand(len(x), x.shape[-1], generator=torch.Generator().manual_seed(seed)).to(x.device)
    return order.scatter(-1, largest_coordinate(x)[:, None], -1.0).argmax(-1)


def with_coordinate_at(
    x: Float[Tensor, "head pos coordinate"], coordinate: Int[Tensor, " head"], value: Literal["mean", "zero"]
) -> Float[Tensor, "head pos coordinate"]:
    """x_id <- E_i x_id, or 0, in one coordinate d of each head; the others stay.

    Source: Jin et al. 2025 (arXiv 2502.01563), as we read it.

    Example:
        >>> with_coordinate_at(torch.tensor([[[1.0, 2.0], [3.0, 6.0]]]), torch.tensor([1]), "mean").tolist()
        [[[1.0, 4.0], [3.0, 4.0]]]
    """
    chosen = torch.nn.functional.one_hot(coordinate, x.shape[-1]).bool()[:, None]
    return torch.where(chosen, x.mean(1, keepdim=True) if value == "mean" else torch.zeros_like(x[:, :1]), x)
