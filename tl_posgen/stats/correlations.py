"""Correlation of two columns: of values, of ranks, with other columns held fixed, and the difference of two of them."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from tl_posgen.arithmetic import DOUBLE, double

_EQUAL = 1e-12  # relative difference of what is equal but for rounding
ROUNDING = 1e-10  # of a column's spread: less than this is left of one that controls explain


class Correlation(NamedTuple):
    """A correlation of two columns, with further columns held fixed, and its 95% interval.

    Attributes:
        r: in [-1, 1]; NaN where a column is constant or fully explained by the controls.
        low, high: 95% interval of r.
    """

    r: float
    low: float
    high: float


def pearson(x: Float[Tensor, "*batch n"], y: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
    r"""r = <x - mean x, y - mean y> / (|x - mean x| |y - mean y|), float64; NaN where x or y is constant."""
    x, y = (double(v) - double(v).mean(-1, keepdim=True) for v in (x, y))
    constant = (x == x[..., :1]).all(-1) | (y == y[..., :1]).all(-1)
    r = (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))
    return r.clamp(-1, 1).masked_fill(constant, torch.nan)


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
    apart = ~ordered[..., :-1].isclose(ordered[..., 1:], rtol=_EQUAL, atol=0)
    group = pad(apart.long().cumsum(-1), (1, 0))[..., : x.shape[-1]]  # of equal values, in ascending order
    size = torch.zeros_like(group).scatter_add(-1, group, torch.ones_like(group))
    rank = double(2 * size.cumsum(-1) - size + 1) / 2
    return torch.zeros_like(rank).scatter(-1, order, rank.gather(-1, group))


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


def correlation(x: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> Correlation:
    r"""r = Cov(x, y) / sqrt(Var(x) Var(y)), in float64, with its 95% interval tanh(artanh r -+ 1.96 / sqrt(n - 3))."""
    return partial_correlation(x, y, x.new_zeros(len(x), 0))


def partial_correlation(
    x: Float[Tensor, " n"], y: Float[Tensor, " n"], controls: Float[Tensor, "n control"]
) -> Correlation:
    r"""r_{xy.C}: Pearson's r between the residuals of x and of y after least squares on (1, C), in float64.

    The interval is tanh(artanh r -+ 1.96 / sqrt(n - c - 3)) with c controls; repeated controls explain once. r is NaN
    if a residual is below 1e-10 of the spread of its column.

    Raises:
        ValueError: fewer than c + 4 rows, so that no interval exists; or a value that is not finite.

    Source: Fisher 1924 for the degrees of freedom.

    Example:
        >>> size = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        >>> score = size + torch.tensor([0.1, -0.1, 0.1, -0.1, 0.1, -0.1])
        >>> other = size + torch.tensor([0.1, 0.1, -0.1, -0.1, 0.1, 0.1])
        >>> round(correlation(score, other).r, 2), round(partial_correlation(score, other, size[:, None]).r, 2)
        (1.0, 0.0)
    """
    n, c = controls.shape
    if n < c + 4:
        raise ValueError(f"{n} rows with {c} controls; at least {c + 4} are needed")
    columns, controls = double(torch.stack([x, y], dim=1)), double(controls)
    if not (columns.isfinite().all() and controls.isfinite().all()):
        raise ValueError("a value is NaN or infinite; leave such rows out")
    centred, held = columns - columns.mean(dim=0), controls - controls.mean(dim=0)
    # a constant control has nothing to explain; its rounding errors would
    held = held[:, held.norm(dim=0) > ROUNDING * controls.norm(dim=0)]
    basis = torch.linalg.svd(held / held.norm(dim=0), full_matrices=False)
    directions = basis.U[:, basis.S > ROUNDING]
    residuals = centred - directions @ (directions.mT @ centred)
    spread, lengths = centred.norm(dim=0), residuals.norm(dim=0)
    varied = spread > _EQUAL * columns.norm(dim=0)
    defined = bool((varied & (lengths > ROUNDING * spread)).all())
    r = max(-1.0, min(1.0, float(residuals[:, 0] @ residuals[:, 1] / lengths.prod()))) if defined else math.nan
    low, high = fisher_interval(torch.tensor(r, dtype=DOUBLE), n - c)
    return Correlation(r, float(low), float(high))


def correlation_excess(first: Correlation, second: Correlation, between: float) -> Correlation:
    r"""|r_xy| - |r_zy|, and the ends of its 95% interval, of two columns x and z against one y over the same rows.

    With x and z turned so that a = r_xy and b = r_zy are not negative, and [l, u] the interval of each, the ends are
    a - b - sqrt((a - l_a)^2 + (u_b - b)^2 - 2 c (a - l_a) (u_b - b)) and
    a - b + sqrt((u_a - a)^2 + (b - l_b)^2 - 2 c (u_a - a) (b - l_b)), c the correlation of the two correlations:
    ((r_xz - a b / 2) (1 - a^2 - b^2 - r_xz^2) + r_xz^3) / ((1 - a^2) (1 - b^2)).

    Args:
        first: of x and y, with its interval.
        second: of z and y.
        between: r_xz.

    Returns:
        Difference, lower and upper end, cut at -1 and 1; NaN where a correlation or its interval is.

    Source: Zou 2007 (Psychological Methods 12) for the ends; absolute values are ours.

    Example:
        >>> one, other = Correlation(0.6, 0.4, 0.75), Correlation(-0.5, -0.68, -0.25)
        >>> [round(end, 2) for end in correlation_excess(one, other, -0.3)]
        [0.1, -0.15, 0.37]
    """
    if math.isnan(first.low + second.low + between):
        return Correlation(math.nan, math.nan, math.nan)
    (a, low_a, high_a), (b, low_b, high_b) = (
        (-estimate.r, -estimate.high, -estimate.low) if estimate.r < 0 else estimate for estimate in (first, second)
    )
    r = between * math.copysign(1, first.r) * math.copysign(1, second.r)
    scale = (1 - a**2) * (1 - b**2)
    c = ((r - a * b / 2) * (1 - a**2 - b**2 - r**2) + r**3) / scale if scale else 0.0  # its factors are then 0 too
    c = max(-1.0, min(1.0, c))
    below, above = (
        math.sqrt(max(0.0, x**2 + z**2 - 2 * c * x * z)) for x, z in ((a - low_a, high_b - b), (high_a - a, b - low_b))
    )
    return Correlation(a - b, max(-1.0, a - b - below), min(1.0, a - b + above))
