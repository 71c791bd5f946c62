"""Difference of two correlations with one column, over the same rows."""

import math

from tl_posgen.stats.partial_correlation import Correlation


def correlation_excess(first: Correlation, second: Correlation, between: float) -> tuple[float, float, float]:
    r"""|r_xy| - |r_zy|, and the ends of its 95% interval, of two columns x and z against one y over the same rows.

    With x and z turned so that a = r_xy and b = r_zy are not negative, and [l, u] the interval of each, the ends are
    a - b - sqrt((a - l_a)^2 + (u_b - b)^2 - 2 c (a - l_a) (u_b - b)) and
    a - b + sqrt((u_a - a)^2 + (b - l_b)^2 - 2 c (u_a - a) (b - l_b)), c the correlation of the two correlations:
    ((r_xz - a b / 2) (1 - a^2 - b^2 - r_xz^2) + r_xz^3) / ((1 - a^2) (1 - b^2)).

    Args:
        first: of x and y, with its interval; of their ranks, that of ranks.
        second: of z and y.
        between: r_xz.

    Returns:
        Difference, lower and upper end, cut at -1 and 1; NaN where a correlation or its interval is.

    Source: Zou 2007 (Psychological Methods 12) for the ends; absolute values, and the use for ranks, are ours.

    Example:
        >>> one, other = Correlation(0.6, 0.4, 0.75, 50), Correlation(-0.5, -0.68, -0.25, 50)
        >>> [round(end, 2) for end in correlation_excess(one, other, -0.3)]
        [0.1, -0.15, 0.37]
    """
    if math.isnan(first.low + second.low + between):
        return math.nan, math.nan, math.nan
    a, low_a, high_a = turned(first)
    b, low_b, high_b = turned(second)
    r = between * math.copysign(1, first.r) * math.copysign(1, second.r)
    scale = (1 - a**2) * (1 - b**2)
    c = ((r - a * b / 2) * (1 - a**2 - b**2 - r**2) + r**3) / scale if scale else 0.0  # its factors are then 0 too
    c = max(-1.0, min(1.0, c))
    below, above = (
        math.sqrt(max(0.0, x**2 + z**2 - 2 * c * x * z)) for x, z in ((a - low_a, high_b - b), (high_a - a, b - low_b))
    )
    return a - b, max(-1.0, a - b - below), min(1.0, a - b + above)


def turned(one: Correlation) -> tuple[float, float, float]:
    """Return r and its ends with the sign of r taken away."""
    return (-one.r, -one.high, -one.low) if one.r < 0 else one.ends
