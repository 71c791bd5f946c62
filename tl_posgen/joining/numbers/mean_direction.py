"""Keys split into the part along one direction and the rest, and the rest shrunk."""

import torch
from jaxtyping import Float
from torch import Tensor


def mean_direction(k: Float[Tensor, "head token d_head"]) -> Float[Tensor, "head d_head"]:
    """u = E k / |E k|; zero where the mean is."""
    return torch.nn.functional.normalize(k.mean(1), dim=-1)


def shrink_rest(
    k: Float[Tensor, "head token d_head"],
    direction: Float[Tensor, "head d_head"],
    share: Float[Tensor, " head"] | float,
) -> Float[Tensor, "head token d_head"]:
    """<k, u> u + share (k - <k, u> u), u of length one: of rank one at 0, unchanged at 1."""
    along = (k * direction[:, None]).sum(-1, keepdim=True) * direction[:, None]
    share = share[:, None, None] if isinstance(share, Tensor) else share
    return along + share * (k - along)


def rest_energy(
    k: Float[Tensor, "head token d_head"], direction: Float[Tensor, "head d_head"]
) -> Float[Tensor, " head"]:
    """E|k - <k, u> u|^2 over tokens."""
    return shrink_rest(k, direction, 0.0).sub(k).square().sum(-1).mean(1)


def share_of_equal_energy(
    k: Float[Tensor, "head token d_head"],
    direction: Float[Tensor, "head d_head"],
    other: Float[Tensor, "head d_head"],
    share: float,
) -> Float[Tensor, " head"]:
    """mu with E|shrink_rest(k, other, mu) - k|^2 = E|shrink_rest(k, direction, share) - k|^2.

    1 - mu = (1 - share) sqrt(rest energy along `direction` / rest energy along `other`). Where the rest of `other` is
    the smaller one mu may be negative: the energy is kept, the rest then turned round.
    """
    ratio = rest_energy(k, direction) / rest_energy(k, other)
    return 1 - (1 - share) * ratio.nan_to_num(0, posinf=0).sqrt()
