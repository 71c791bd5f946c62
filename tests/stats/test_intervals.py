"""The jackknife interval of anything that is estimated from all prompts together."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t

from tl_posgen.errors import InputError
from tl_posgen.stats.intervals import jackknife_interval, mean_interval, statistic_interval, t_975


def left_out(values, groups, estimate):
    """Return the estimate of all values, the estimates without each group, and the groups' shares."""
    names = np.unique(groups)
    without = np.array([estimate(values[groups != name]) for name in names])
    return np.asarray(estimate(values)), without, np.array([(groups == name).mean() for name in names])


def test_the_quantiles_are_those_of_t():
    degrees = np.arange(1, 3000)
    np.testing.assert_allclose(t_975(degrees), t.ppf(0.975, degrees), rtol=1e-4)
    assert np.isnan(t_975(0))


@given(st.integers(2, 40), st.integers(0, 10**6))
def test_of_a_mean_over_single_prompts_it_is_students_interval(n, seed):
    values = np.random.default_rng(seed).normal(3, 2, size=(n, 4))
    low, high = jackknife_interval(*left_out(values, np.arange(n), lambda x: x.mean(0)))
    half = t.ppf(0.975, n - 1) * values.std(0, ddof=1) / np.sqrt(n)
    np.testing.assert_allclose([low, high], [values.mean(0) - half, values.mean(0) + half], atol=2e-4)
    np.testing.assert_allclose([low, high], mean_interval(values), rtol=1e-9)
    np.testing.assert_allclose([low, high], statistic_interval(values, lambda means: means)[1:], rtol=1e-9)


@given(st.integers(0, 10**6))
def test_a_prompt_without_a_value_counts_nothing_there(seed):
    values = np.random.default_rng(seed).normal(size=(6, 3))
    values[1, 0] = values[4, 0] = values[:, 2] = np.nan
    values[2, 2] = 1.0
    low, high = mean_interval(values)
    np.testing.assert_allclose([low[0], high[0]], mean_interval(np.delete(values[:, 0], [1, 4])))
    np.testing.assert_allclose([low[1], high[1]], mean_interval(values[:, 1]))
    assert np.isnan([low[2], high[2]]).all()  # of one prompt


@pytest.mark.parametrize("n", [2, 4, 16])
def test_intervals_of_few_prompts_hold_the_mean_as_often_as_they_say(n):
    values = np.random.default_rng(n).normal(size=(n, 20_000))
    low, high = mean_interval(values)
    assert ((low <= 0) & (high >= 0)).mean() == pytest.approx(0.95, abs=0.005)


def test_a_ratio_of_means_is_left_out_prompt_by_prompt():
    values = np.random.default_rng(3).normal(5, 1, size=(7, 2))
    ratio = lambda means: means[:, 0] / means[:, 1]  # noqa: E731
    found, low, high = statistic_interval(values, ratio)
    without = np.array([np.divide(*np.delete(values, one, 0).mean(0)) for one in range(7)])
    assert found == pytest.approx(np.divide(*values.mean(0)))
    np.testing.assert_allclose([low, high], jackknife_interval(found, without, np.full(7, 1 / 7)))
    assert np.isnan(statistic_interval(values[:1], ratio)[1:]).all()


@pytest.mark.parametrize("n", [20, 23, 29])  # groups of equal and of unequal size
@pytest.mark.parametrize("estimate", [np.mean, np.var, lambda x: x.mean() / x.std()])
def test_it_covers_the_truth_about_as_often_as_it_says(n, estimate):
    rng = np.random.default_rng(n)
    truth = estimate(rng.normal(1, 1, size=10**6))
    ends = np.array(
        [jackknife_interval(*left_out(rng.normal(1, 1, size=n), np.arange(n) % 5, estimate)) for _ in range(400)]
    )
    covered = ((ends[:, 0] <= truth) & (truth <= ends[:, 1])).mean()
    assert 0.87 < covered < 0.98  # small samples of skewed estimates cover a little less than 95 %


def test_where_an_estimate_is_unknown_so_is_its_interval():
    values = np.random.default_rng(0).normal(size=(5, 3))
    whole, without, share = left_out(values, np.arange(5), lambda x: x.mean(0))
    without[2, 1] = np.nan
    low, high = jackknife_interval(whole, without, share)
    assert np.isnan([low[1], high[1]]).all()
    assert np.isfinite([*low[[0, 2]], *high[[0, 2]]]).all()


@pytest.mark.parametrize(
    ("n", "share", "message"),
    [
        (1, [1.0], "1 groups and 1 shares"),
        (2, [0.5, 0.6], "sum to 1"),
        (2, [0.0, 1.0], "above 0"),
    ],
)
def test_what_is_no_grouping_is_refused(n, share, message):
    with pytest.raises(InputError, match=message):
        jackknife_interval(np.array(0.0), np.zeros(n), np.array(share))
