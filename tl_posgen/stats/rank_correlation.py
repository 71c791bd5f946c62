"""Rank correlation of two columns with its interval, over all rows or within groups of them."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double
from tl_posgen.stats.agreement import ranks
from tl_posgen.stats.partial_correlation import Correlation, partial_correlation


def rank_correlation(
    x: Float[Tensor, " n"], y: Float[Tensor, " n"], group: Int[Tensor, " n"] | None = None
) -> Correlation:
    r"""Return Spearman's rho, with the interval tanh(artanh rho -+ 1.96 sqrt((1 + rho^2 / 2) / (n - c - 3))).

    Rows where x or y is not finite are left out. With groups, rho is Pearson's r of the ranks (over all rows) after
    each group's mean rank is subtracted: the correlation within groups. c is the number of groups less one. The
    interval assumes independent rows; heads of a layer share their input, so it is rather too narrow.

    NaN where fewer than c + 4 rows are left, or a column is constant (within every group).

    Source: Bonett & Wright 2000 for the interval, with Fisher's n - c as for a partial correlation.

    Example:
        >>> x, layer = torch.tensor([1.0, 2.0, 3.0, 11.0, 12.0, 13.0]), torch.tensor([0, 0, 0, 1, 1, 1])
        >>> y = torch.tensor([3.0, 2.0, 1.0, 13.0, 12.0, 11.0])
        >>> [round(rank_correlation(x, y, group).r, 2) for group in (None, layer)]
        [0.54, -1.0]
    """
    known = x.isfinite() & y.isfinite()
    groups = torch.zeros_like(known, dtype=torch.int64) if group is None else group
    _, which = groups[known].unique(return_inverse=True)
    controls = double(torch.nn.functional.one_hot(which)[:, 1:]) if len(which) else double(torch.zeros(0, 0))
    n, c = controls.shape
    if n < c + 4:
        return Correlation(torch.nan, torch.nan, torch.nan, n, c)
    r = partial_correlation(ranks(x[known]), ranks(y[known]), controls).r
    z, reach = torch.atanh(torch.tensor(r, dtype=DOUBLE)), 1.96 * ((1 + r**2 / 2) / (n - c - 3)) ** 0.5
    return Correlation(r, float(torch.tanh(z - reach)), float(torch.tanh(z + reach)), n, c)
