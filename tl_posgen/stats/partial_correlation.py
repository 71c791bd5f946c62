"""Correlation of two columns with other columns held fixed, and the least-squares line through them."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double
from tl_posgen.stats.agreement import fisher_interval


@dataclass(frozen=True)
class Correlation:
    """Pearson's r of two columns, with further columns held fixed, and its 95% interval.

    Attributes:
        r: in [-1, 1]; NaN where a column is constant or fully explained by the controls.
        low, high: 95% interval of r for normal samples (Fisher's z).
        n: number of rows.
        controls: number of columns held fixed.
    """

    r: float
    low: float
    high: float
    n: int
    controls: int = 0

    @property
    def ends(self) -> tuple[float, float, float]:
        """(r, low, high)."""
        return self.r, self.low, self.high


@dataclass(frozen=True)
class Line:
    """y ~ intercept + slope x by least squares; r2 is the share of Var(y) explained."""

    slope: float
    intercept: float
    r2: float


def correlation(x: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> Correlation:
    r"""r = Cov(x, y) / sqrt(Var(x) Var(y)), in float64, with its 95% interval tanh(artanh r -+ 1.96 / sqrt(n - 3))."""
    return partial_correlation(x, y, x.new_zeros(len(x), 0))


def partial_correlation(
    x: Float[Tensor, " n"], y: Float[Tensor, " n"], controls: Float[Tensor, "n control"]
) -> Correlation:
    r"""r_{xy.C}: Pearson's r between the residuals of x and of y after least squares on (1, C), in float64.

    The interval is tanh(artanh r -+ 1.96 / sqrt(n - c - 3)) with c controls. r is NaN if a residual is below 1e-10 of
    the spread of its column.

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
    columns = double(torch.stack([x, y], dim=1))
    spread = (columns - columns.mean(dim=0)).norm(dim=0)
    rest = unexplained(columns, controls)
    left_x, left_y = rest.norm(dim=0).tolist()
    varied = spread > 1e-12 * columns.norm(dim=0)  # less is rounding
    defined = varied.all() and left_x > 1e-10 * spread[0] and left_y > 1e-10 * spread[1]
    r = max(-1.0, min(1.0, float(rest[:, 0] @ rest[:, 1]) / (left_x * left_y))) if defined else float("nan")
    low, high = fisher_interval(torch.tensor(r, dtype=DOUBLE), n - c)
    return Correlation(r, float(low), float(high), n, c)


def unexplained(columns: Float[Tensor, "n column"], controls: Float[Tensor, "n control"]) -> Float[Tensor, "n column"]:
    """Return the residual of each column after least squares on (1, C), in float64; repeated controls count once."""
    columns, controls = double(columns), double(controls)
    if not (columns.isfinite().all() and controls.isfinite().all()):
        raise ValueError("a value is NaN or infinite; leave such rows out")
    centred, held = columns - columns.mean(dim=0), controls - controls.mean(dim=0)
    # a constant control has nothing to explain; its rounding errors would
    held = held[:, held.norm(dim=0) > 1e-10 * controls.norm(dim=0)]
    basis = torch.linalg.svd(held / held.norm(dim=0), full_matrices=False)
    kept = basis.U[:, basis.S > 1e-10]
    return centred - kept @ (kept.mT @ centred)


def regression_line(x: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> Line:
    """slope = Cov(x, y) / Var(x), intercept = mean(y) - slope mean(x), R^2 = r^2, in float64."""
    x, y = double(x), double(y)
    dx, dy = x - x.mean(), y - y.mean()
    slope = (dx @ dy / (dx @ dx)).item()
    return Line(slope, (y.mean() - slope * x.mean()).item(), ((dx @ dy) ** 2 / ((dx @ dx) * (dy @ dy))).item())
