"""What each plane adds to the scores of a query: mean and variance over its keys, in closed form, and the first key."""

from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from tl_posgen.arithmetic import COMPLEX_DOUBLE, DOUBLE, summable


@dataclass(frozen=True)
class RowMoments:
    """Moments of s_m(i, j) = Re z^q_im conj(z^k_jm) over the keys j = 1 .. i that query i sees, and the first key.

    Attributes:
        mean: E_j s_m(i, j); NaN for a query that sees no such key.
        variance: E_j (s_m(i, j) - mean)^2.
        first: s_m(i, 0); NaN for a query whose window ends before the first key.
    """

    mean: Float[Tensor, "head row plane"]
    variance: Float[Tensor, "head row plane"]
    first: Float[Tensor, "head row plane"]


def row_moments(
    q: Complex[Tensor, "head pos plane"],
    k: Complex[Tensor, "head pos plane"],
    rows: Int[Tensor, " row"],
    window: int | None = None,
) -> RowMoments:
    """E_j s_m and Var_j s_m of each query from running sums of its keys, float64, without a matrix of queries and keys.

    With a = z^q_i, s = Re a conj(z), so E s = Re a conj(E z) and E s^2 = (|a|^2 E|z|^2 + Re a^2 conj(E z^2)) / 2.

    Args:
        q, k: rotated to their positions, in the planes of `rotation.complex_planes`.
        rows: the queries.
        window: a query sees so many last keys, itself included.

    Source: ours.

    Example:
        >>> z = torch.tensor([[[9.0], [1.0], [3.0]]], dtype=torch.complex128)
        >>> found = row_moments(z, z, torch.tensor([2]))
        >>> found.mean.item(), found.variance.item(), found.first.item()
        (6.0, 9.0, 27.0)
    """
    a, k = (summable(x).to(COMPLEX_DOUBLE) for x in (q, k))
    rows = summable(rows)
    a, first = a[:, rows], torch.zeros_like(rows) if window is None else (rows - window).clamp(min=0)
    n = (rows - first).to(DOUBLE)[:, None]

    def mean_over_keys(x: Tensor) -> Tensor:
        total = x.cumsum(1) - x[:, :1]  # of the keys 1 .. i
        return (total[:, rows] - total[:, first]) / n

    mean = (a * mean_over_keys(k).conj()).real
    of_length = a.abs().square() * mean_over_keys(k.abs().square())
    square = (of_length + (a.square() * mean_over_keys(k.square()).conj()).real) / 2
    is_first_seen = rows < (len(k[0]) if window is None else window)
    of_first = (a * k[:, :1].conj()).real.masked_fill(~is_first_seen[:, None], torch.nan)
    return RowMoments(mean, (square - mean.square()).clamp(min=0), of_first)
