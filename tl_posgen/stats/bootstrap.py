"""How sure a mean over prompts is, and what follows from such means."""

from collections.abc import Callable
from statistics import NormalDist

import numpy as np
from jaxtyping import Float

from tl_posgen.errors import InputError

AT_ONCE = 2**24  # resampled means held in memory at a time


def bootstrap_interval(
    values: Float[np.ndarray, "prompt *measure"], *, level: float = 0.95, n_resamples: int = 2000, seed: int = 0
) -> tuple[Float[np.ndarray, "*measure"], Float[np.ndarray, "*measure"]]:
    r"""Percentile bootstrap of the mean over prompts: the (1 -+ level) / 2 quantiles of means of resampled prompts.

    Prompts are drawn with replacement, the same ones for every measure of a resample, so what is known of one prompt
    stays together. A prompt whose value is NaN counts nothing there. Fewer than two prompts leave nothing to
    resample: the interval is NaN.

    Args:
        values: one row a prompt.
        seed: of the resampling; the same seed gives the same interval.

    Returns:
        Lower and upper end.

    Raises:
        InputError: for a level outside (0, 1), or fewer than one resample.

    Source: Efron 1979.

    Example:
        >>> low, high = bootstrap_interval(np.array([0.90, 0.92, 0.91, 0.95]))
        >>> bool(low < 0.92 < high)
        True
    """
    _check(level, n_resamples)
    shape = values.shape[1:]
    ends = np.full((2, int(np.prod(shape))), np.nan)
    if len(values) > 1:
        flat = np.asarray(values, dtype=np.float64).reshape(len(values), -1)
        weights = _resampling_counts(len(flat), n_resamples, seed)
        step = max(1, AT_ONCE // n_resamples)
        for start in range(0, flat.shape[1], step):
            ends[:, start : start + step] = _interval(flat[:, start : start + step], weights, level)
    return ends[0].reshape(shape), ends[1].reshape(shape)


def statistic_interval(
    values: Float[np.ndarray, "prompt *measure"],
    statistic: Callable[[Float[np.ndarray, "resample *measure"]], Float[np.ndarray, "resample *found"]],
    *,
    level: float = 0.95,
    n_resamples: int = 2000,
    seed: int = 0,
) -> tuple[Float[np.ndarray, "*found"], Float[np.ndarray, "*found"], Float[np.ndarray, "*found"]]:
    r"""T(mean) -+ z std T(means of resampled prompts): a function of means over prompts, such as their correlation.

    Percentiles would not do: resampled means hold the noise of prompts twice, so that correlations of them lie below
    that of the mean itself.

    Args:
        values: one row a prompt, without NaN.
        statistic: T, of many means at once.
        level, n_resamples, seed: as in `bootstrap_interval`; the same seed draws the same prompts.

    Returns:
        T of the means, lower and upper end; no ends (NaN) for fewer than two prompts.

    Raises:
        InputError: as `bootstrap_interval`.

    Source: the normal interval with the bootstrap's standard error, Efron & Tibshirani 1993, chapter 13.

    Example:
        >>> two = np.array([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]])
        >>> [round(float(one), 6) for one in statistic_interval(two, lambda means: means[:, 1] / means[:, 0])]
        [2.0, 2.0, 2.0]
    """
    _check(level, n_resamples)
    values = np.asarray(values, dtype=np.float64)
    found = np.asarray(statistic(values.mean(0)[None])[0])
    if len(values) < 2:
        return found, np.full_like(found, np.nan), np.full_like(found, np.nan)
    weights = _resampling_counts(len(values), n_resamples, seed) / len(values)
    drawn = np.asarray(statistic(np.tensordot(weights, values, 1)))
    reach = NormalDist().inv_cdf((1 + level) / 2) * drawn.std(0, ddof=1)
    return found, np.asarray(found - reach), np.asarray(found + reach)


def _check(level: float, n_resamples: int) -> None:
    if not 0 < level < 1:
        raise InputError(f"level {level}: give a share between 0 and 1, such as 0.95")
    if n_resamples < 1:
        raise InputError(f"{n_resamples} resamples asked for; give at least 1")


def _resampling_counts(n_prompts: int, n_resamples: int, seed: int) -> Float[np.ndarray, "resample prompt"]:
    """How often each resample drew each prompt."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(n_prompts, np.full(n_prompts, 1 / n_prompts), size=n_resamples).astype(np.float64)


def _interval(
    values: Float[np.ndarray, "prompt measure"], weights: Float[np.ndarray, "resample prompt"], level: float
) -> Float[np.ndarray, "end=2 measure"]:
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):  # a resample may hold no prompt whose value is known: 0 / 0, left out
        means = (weights @ np.where(known, values, 0)) / (weights @ known)
    interval = np.full((2, values.shape[1]), np.nan)
    enough = known.sum(0) > 1
    if enough.any():
        interval[:, enough] = np.nanquantile(means[:, enough], [(1 - level) / 2, (1 + level) / 2], axis=0)
    return interval
