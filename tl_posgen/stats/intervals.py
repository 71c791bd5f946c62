"""95 % intervals over prompts: one rule for means and for all other smooth functions of what is summed over prompts.

1. Whole prompts are resampled, never tokens: each is left out in turn, or, where a measure holds its sums for groups of
   them, each of at most MOST_GROUPS groups of neighbours (`prompts_per_group`). Neighbours depend on each other, so
   they stay together. Fewer than FEWEST prompts have no interval: their ends are NaN.
2. The ends are Tukey's, mean -+ t s of the jackknife's pseudo-values (`jackknife_interval`), whose mean lacks the bias
   of an estimate from few prompts; of a mean over prompts that is Student's interval (`mean_interval`).
3. An interval holds its value, and is cut at the bounds of the quantity (`_within_bounds`).

A share of heads that a maximum chooses jumps where a prompt changes the maximum of a head: its interval holds the truth
.75 to .98 of the time, not .95.

Measured in benchmarks/intervals.py: scales on which the bounds lie at infinity (Fisher's z, the logit) hold the truth
no more often than cutting does, less often near a bound, and their ends run away where a value lies close to one.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from tl_posgen.errors import InputError

Bounds = tuple[int | float, int | float]  # lowest and highest value of a quantity; -inf or inf for none on a side
Values = Float[np.ndarray, "*measure"] | float
Ends = tuple[Float[np.ndarray, "*measure"], Float[np.ndarray, "*measure"]]  # low and high

FEWEST = 4  # prompts, or groups of them: fewer leave intervals too wide to say anything
MOST_GROUPS = 6
_T_975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)  # of Student's t, 1 to 9 degrees
_Z_975 = 1.959964


def prompts_per_group(n: int) -> int:
    """min {2^k: ceil(n / 2^k) <= MOST_GROUPS}, how many neighbouring prompts are left out together, of n in all.

    A power of two, so that groups can be joined in pairs while prompts keep coming: prompt p is in group p // size, and
    from FEWEST prompts on there are FEWEST to MOST_GROUPS groups; the last may be smaller.

    Example:
        >>> {n: prompts_per_group(n) for n in (4, 6, 7, 8, 12, 13, 16, 100)}
        {4: 1, 6: 1, 7: 2, 8: 2, 12: 2, 13: 4, 16: 4, 100: 32}
    """
    size = 1
    while n > MOST_GROUPS * size:
        size *= 2
    return size


def _within_bounds(value: Values, half: Values, mean: Values, bounds: Bounds | None) -> Ends:
    """min(value, max(mean - half, lowest)) and max(value, min(mean + half, highest)): ends that hold the value.

    The truth lies within the bounds, so that cutting leaves out nothing of it. A value at its bound keeps the other
    end; one beyond it (by rounding, or as the bound is none) is the end on that side. NaN where value or half is.
    """
    lowest, highest = (-np.inf, np.inf) if bounds is None else bounds
    if not lowest < highest:
        raise InputError(
            f"bounds {lowest:g} and {highest:g}: give the lowest value that there can be, then the highest"
        )
    low, high = np.maximum(mean - half, lowest), np.minimum(mean + half, highest)
    return np.asarray(np.minimum(value, low)), np.asarray(np.maximum(value, high))


def t_975(degrees: Int[np.ndarray, "*measure"] | int) -> Float[np.ndarray, "*measure"]:
    r"""The 0.975 quantile of Student's t, to 1e-4: a table up to 9 degrees, then z + sum_k g_k(z) / degrees^k, k <= 3.

    Source: Abramowitz & Stegun 1964, 26.7.5.
    """
    degrees = np.asarray(degrees)
    z, n = _Z_975, np.maximum(degrees, 1)
    g = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    expanded = z + sum(term / n ** (k + 1) for k, term in enumerate(g))
    return np.where(degrees < 1, np.nan, np.where(degrees > 9, expanded, np.take(_T_975, n - 1, mode="clip")))


def mean_interval(values: Float[np.ndarray, "prompt *measure"], bounds: Bounds | None = None) -> Ends:
    r"""mean -+ t_{.975, n - 1} s / sqrt(n), cut at the bounds: Student's interval of the mean over n prompts.

    Args:
        values: one row a prompt. One that is NaN counts nothing there.
        bounds: of the quantity, such as (0, 1) of a share; None for none.

    Returns:
        Lower and upper end; NaN of fewer than FEWEST values.

    Source: Student 1908; cutting at the bounds is ours.

    Example:
        >>> low, high = mean_interval(np.array([0.90, 0.92, 0.91, 0.95]))
        >>> round(float(low), 4), round(float(high), 4)  # 0.92 -+ 3.182 * 0.0216 / 2
        (0.8856, 0.9544)
    """
    values = np.asarray(values, dtype=np.float64)
    defined = ~np.isnan(values)
    n = defined.sum(0)
    mean = np.where(defined, values, 0).sum(0) / np.maximum(n, 1)
    squares = (np.where(defined, values - mean, 0) ** 2).sum(0)
    half = t_975(np.asarray(n - 1)) * np.sqrt(squares / np.maximum(n - 1, 1) / np.maximum(n, 1))
    return _within_bounds(mean, np.where(n < FEWEST, np.nan, half), mean, bounds)


def jackknife_interval(
    value: Float[np.ndarray, "*measure"] | float,
    without: Float[np.ndarray, "group *measure"],
    share: Float[np.ndarray, " group"],
    bounds: Bounds | None = None,
) -> Ends:
    r"""mean_J -+ t_{.975, G - 1} s, s^2 = 1/G sum_g (p_g - mean_J)^2 / (h_g - 1): the delete-a-group jackknife.

    theta is the estimate of all prompts, theta_g that without group g, h_g = 1 / share_g,
    p_g = h_g theta - (h_g - 1) theta_g the pseudo-values and mean_J = G theta - sum_g (1 - 1/h_g) theta_g their mean,
    theta less its bias. The interval is stretched to theta where it does not hold it, and cut at the bounds; of a mean
    over prompts and groups of one prompt each it is Student's. For smooth functions of sums over prompts (shares,
    correlations); not for counts, and not for where something is largest.

    Args:
        value: theta.
        without: theta_g.
        share: of the prompts that are in each group, above 0, summing to 1.
        bounds: of the quantity, such as (-1, 1) of a correlation; None for none.

    Returns:
        Lower and upper end; NaN of fewer than FEWEST groups, and where one of the estimates is.

    Source: Quenouille 1956, Tukey 1958; groups of unequal size: Busing, Meijer & van der Leeden 1999;
    stretching and cutting are ours.

    Example:
        >>> prompts = np.array([0.90, 0.92, 0.91, 0.95])
        >>> without = np.array([np.delete(prompts, g).mean() for g in range(4)])
        >>> low, high = jackknife_interval(prompts.mean(), without, np.full(4, 0.25), bounds=(0.0, 1.0))
        >>> round(float(low), 4), round(float(high), 4)  # 0.92 -+ 3.182 * 0.0216 / 2
        (0.8856, 0.9544)
    """
    n, value = len(without), np.asarray(value, dtype=np.float64)
    if len(share) != n:
        raise InputError(f"jackknife: {n} groups and {len(share)} shares; give a share each")
    if n and (not (share > 0).all() or abs(share.sum() - 1) > 1e-9):
        raise InputError(f"jackknife: shares {share.tolist()} of the prompts; they are above 0 and sum to 1")
    if n < FEWEST:
        return _within_bounds(value, np.nan, value, bounds)
    h = (1 / share).reshape(n, *(1 for _ in np.shape(value)))
    mean = n * value - ((1 - 1 / h) * without).sum(0)
    pseudo_values = h * value - (h - 1) * without
    half = t_975(n - 1) * np.sqrt(((pseudo_values - mean) ** 2 / (h - 1)).mean(0))
    return _within_bounds(value, half, mean, bounds)


def bounds_of_difference(bounds: Bounds | None) -> Bounds | None:
    """(lowest - highest, highest - lowest): the range of the difference of two numbers in these bounds; None for none.

    Example:
        >>> bounds_of_difference((0, 1)), bounds_of_difference((-1, 1))
        ((-1, 1), (-2, 2))
    """
    return None if bounds is None else (bounds[0] - bounds[1], bounds[1] - bounds[0])


def difference_interval(
    first: Sequence[Float[np.ndarray, "*measure"]], second: Sequence[Float[np.ndarray, "*measure"]]
) -> Ends:
    r"""d - sqrt((b - l_b)^2 + (h_a - a)^2) and d + sqrt((h_b - b)^2 + (a - l_a)^2), d = b - a.

    For two numbers of independent prompts, given as (a, l_a, h_a) and (b, l_b, h_b); those of the same prompts are left
    out of both together, see `jackknife_interval`. NaN where one of the ends is.

    Source: Newcombe 1998; Zou & Donner 2008.

    Example:
        >>> a, b = ([np.array(one) for one in ends] for ends in ((0.5, 0.2, 0.9), (0.6, 0.3, 0.9)))
        >>> [round(float(end), 4) for end in difference_interval(a, b)]  # 0.1 - 0.5 and 0.1 + 0.4243
        [-0.4, 0.5243]
    """
    (a, low_a, high_a), (b, low_b, high_b) = first, second
    low, high = b - a - np.hypot(b - low_b, high_a - a), b - a + np.hypot(high_b - b, a - low_a)
    return np.asarray(low), np.asarray(high)
