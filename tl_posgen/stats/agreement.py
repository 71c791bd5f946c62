"""Agreement of two measurements over heads: correlations of values and of ranks."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from tl_posgen.arithmetic import DOUBLE, double

EQUAL = 1e-12  # relative difference of what is equal but for rounding


def pearson(x: Float[Tensor, "*batch n"], y: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
    r"""r = <x - mean x, y - mean y> / (|x - mean x| |y - mean y|), float64; NaN where x or y is constant."""
    x, y = (double(v) - double(v).mean(-1, keepdim=True) for v in (x, y))
    constant = (x == x[..., :1]).all(-1) | (y == y[..., :1]).all(-1)
    r = (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))
    return r.clamp(-1, 1).masked_fill(constant, torch.nan)


def fisher_interval(
    r: Float[Tensor, "*batch"], n: Float[Tensor, "*batch"] | int
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    r"""tanh(artanh r -+ 1.96 / sqrt(n - 3)): 95% interval of correlations over n independent rows; NaN for n < 4.

    Example:
        >>> low, high = fisher_interval(torch.tensor([0.9, 1.0]), 16)
        >>> [round(float(one), 2) for one in (*low, *high)]
        [0.73, 1.0, 0.97, 1.0]
    """
    n = torch.as_tensor(n, dtype=DOUBLE)
    reach = torch.where(n > 3, 1.96 / (n - 3) ** 0.5, torch.nan)
    return torch.tanh(torch.atanh(r) - reach), torch.tanh(torch.atanh(r) + reach)


def spearman(x: Float[Tensor, "*batch n"], y: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
    """Return Pearson's correlation of the ranks; equal values share their mean rank."""
    return pearson(ranks(x), ranks(y))


def ranks(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
    """rank = (number below + number not above + 1) / 2: 1 for the smallest; equal values share their mean rank.

    Neighbours that differ by 1e-12 of their size or less are equal: heads that share a key head have one r1 of K but
    for rounding.

    Example:
        >>> ranks(torch.tensor([0.3, 0.1, 0.3])).tolist()
        [2.5, 1.0, 2.5]
    """
    ordered, order = x.sort(-1)
    apart = ~ordered[..., :-1].isclose(ordered[..., 1:], rtol=EQUAL, atol=0)
    group = pad(apart.long().cumsum(-1), (1, 0))[..., : x.shape[-1]]  # of equal values, in ascending order
    size = torch.zeros_like(group).scatter_add(-1, group, torch.ones_like(group))
    rank = double(2 * size.cumsum(-1) - size + 1) / 2
    return torch.zeros_like(rank).scatter(-1, order, rank.gather(-1, group))
