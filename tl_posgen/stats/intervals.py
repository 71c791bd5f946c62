"""95 % intervals: Student's of a mean, the jackknife of what is no mean, resampled where nothing else holds."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int

from tl_posgen.errors import InputError

T_975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)  # of Student's t, 1 to 9 degrees
Z_975 = 1.959964
N_RESAMPLES = 2000


def t_975(degrees: Int[np.ndarray, "*measure"] | int) -> Float[np.ndarray, "*measure"]:
    r"""The .975 quantile of Student's t, to 1e-4: a table up to 9 degrees, then z + sum_k g_k(z) / degrees^k, k <= 3.

    Source: Abramowitz & Stegun 1964, 26.7.5.

    Example:
        >>> t_975(np.array([3, 15, 1000])).round(3).tolist()
        [3.182, 2.131, 1.962]
    """
    degrees = np.asarray(degrees)
    z, n = Z_975, np.maximum(degrees, 1)
    g = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    expanded = z + sum(term / n ** (k + 1) for k, term in enumerate(g))
    return np.where(degrees < 1, np.nan, np.where(degrees > 9, expanded, np.take(T_975, n - 1, mode="clip")))


def mean_interval(
    values: Float[np.ndarray, "prompt *measure"],
) -> tuple[Float[np.ndarray, "*measure"], Float[np.ndarray, "*measure"]]:
    r"""mean -+ t_{.975, n - 1} s / sqrt(n), Student's interval of the mean over n prompts.

    A prompt whose value is NaN counts nothing there; NaN of fewer than two.

    Example:
        >>> low, high = mean_interval(np.array([0.90, 0.92, 0.91, 0.95]))
        >>> round(float(low), 4), round(float(high), 4)  # .92 -+ 3.182 * .0216 / 2
        (0.8856, 0.9544)
    """
    values = np.asarray(values, dtype=np.float64)
    known = ~np.isnan(values)
    n = known.sum(0)
    mean = np.where(known, values, 0).sum(0) / np.maximum(n, 1)
    squares = (np.where(known, values - mean, 0) ** 2).sum(0)
    half = t_975(np.asarray(n - 1)) * np.sqrt(squares / np.maximum(n - 1, 1) / np.maximum(n, 1))
    return np.asarray(mean - half), np.asarray(mean + half)


def statistic_interval(
    values: Float[np.ndarray, "prompt *measure"],
    statistic: Callable[[Float[np.ndarray, "some *measure"]], Float[np.ndarray, "some *found"]],
) -> tuple[Float[np.ndarray, "*found"], Float[np.ndarray, "*found"], Float[np.ndarray, "*found"]]:
    r"""T(mean), and the ends of its interval by leaving out each prompt in turn: a function T of means over prompts,
    such as their ratio or correlation. NaN ends of fewer than two prompts.

    Args:
        values: one row a prompt, without NaN.
        statistic: T, of many means at once.

    Source: as `jackknife_interval`.

    Example:
        >>> two = np.array([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]])
        >>> [round(float(one), 6) for one in statistic_interval(two, lambda means: means[:, 1] / means[:, 0])]
        [2.0, 2.0, 2.0]
    """
    values = np.asarray(values, dtype=np.float64)
    n = len(values)
    found = np.asarray(statistic(values.mean(0)[None])[0])
    if n < 2:
        return found, np.full_like(found, np.nan), np.full_like(found, np.nan)
    left_out = statistic((values.sum(0) - values) / (n - 1))
    return found, *jackknife_interval(found, left_out, np.full(n, 1 / n))


def resampled_interval(
    values: Float[np.ndarray, "prompt *measure"],
    statistic: Callable[[Float[np.ndarray, "some *measure"]], Float[np.ndarray, "some *found"]],
) -> tuple[Float[np.ndarray, "*found"], Float[np.ndarray, "*found"], Float[np.ndarray, "*found"]]:
    """T(mean) -+ t_{.975, n - 1} sqrt(n / (n - 1)) std T(means of resampled prompts); NaN ends of a single prompt.

    Ranks jump, so that leaving out one prompt in turn would not do; and percentiles of resampled means hold the noise
    of prompts twice, so that correlations of them lie below that of the mean itself.

    Args:
        values, statistic: as in `statistic_interval`.

    Source: the bootstrap's standard error, Efron & Tibshirani 1993, chapter 13; Student's t for the normal is ours.

    Example:
        >>> two = np.array([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]])
        >>> [round(float(one), 6) for one in resampled_interval(two, lambda means: means[:, 1] / means[:, 0])]
        [2.0, 2.0, 2.0]
    """
    n, found = len(values), np.asarray(statistic(values.mean(0)[None])[0])
    if n < 2:
        return found, np.full_like(found, np.nan), np.full_like(found, np.nan)
    shares = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=N_RESAMPLES) / n
    drawn = statistic(np.tensordot(shares, values, 1))
    reach = t_975(n - 1) * (n / (n - 1)) ** 0.5 * drawn.std(0, ddof=1)
    return found, np.asarray(found - reach), np.asarray(found + reach)


def jackknife_interval(
    whole: Float[np.ndarray, "*measure"] | float,
    left_out: Float[np.ndarray, "group *measure"],
    share: Float[np.ndarray, " group"],
) -> tuple[Float[np.ndarray, "*measure"], Float[np.ndarray, "*measure"]]:
    r"""theta -+ t_{.975, G - 1} s, s^2 = 1/G sum_g (p_g - mean_J)^2 / (h_g - 1): the delete-a-group jackknife.

    theta is the estimate of all prompts, theta_g that without group g, h_g = 1 / share_g,
    p_g = h_g theta - (h_g - 1) theta_g and mean_J = G theta - sum_g (1 - 1/h_g) theta_g. Of groups of one prompt each
    and a mean over prompts that is Student's interval. For smooth functions of what is summed over prompts (shares,
    correlations); not for counts, and not for where something is largest.

    Args:
        whole: estimates.
        left_out: the same without each group, two groups at least.
        share: of the prompts that are in each group, above 0, summing to 1.

    Returns:
        Lower and upper end; NaN where an estimate is.

    Raises:
        InputError: fewer than two groups, or shares that are none.

    Source: Quenouille 1956, Tukey 1958; groups of unequal size: Busing, Meijer & van der Leeden 1999.

    Example:
        >>> prompts = np.array([0.90, 0.92, 0.91, 0.95])
        >>> left_out = np.array([np.delete(prompts, g).mean() for g in range(4)])
        >>> low, high = jackknife_interval(prompts.mean(), left_out, np.full(4, 0.25))
        >>> round(float(low), 4), round(float(high), 4)  # .92 -+ 3.182 * .0216 / 2
        (0.8856, 0.9544)
    """
    n = len(left_out)
    if n < 2 or len(share) != n:
        raise InputError(f"jackknife: {n} groups and {len(share)} shares; give two groups or more, a share each")
    if not (share > 0).all() or abs(share.sum() - 1) > 1e-9:
        raise InputError(f"jackknife: shares {share.tolist()} of the prompts; they are above 0 and sum to 1")
    h = (1 / share).reshape(n, *(1 for _ in np.shape(whole)))
    mean = n * whole - ((1 - 1 / h) * left_out).sum(0)
    pseudo_values = h * whole - (h - 1) * left_out
    half = t_975(n - 1) * np.sqrt(((pseudo_values - mean) ** 2 / (h - 1)).mean(0))
    return np.asarray(whole - half), np.asarray(whole + half)
