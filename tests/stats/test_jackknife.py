"""The jackknife interval of anything that is estimated from all prompts together."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t

from tl_posgen.errors import InputError
from tl_posgen.stats.jackknife import MOST_GROUPS, T_975, jackknife_interval


def left_out(values, groups, estimate):
    """The estimate of all values, without each group, and the groups' shares."""
    names = np.unique(groups)
    without = np.array([estimate(values[groups != name]) for name in names])
    return np.asarray(estimate(values)), without, np.array([(groups == name).mean() for name in names])


def test_the_quantiles_are_those_of_t():
    np.testing.assert_allclose(T_975, t.ppf(0.975, np.arange(1, MOST_GROUPS)), atol=5e-5)


@given(st.integers(2, MOST_GROUPS), st.integers(0, 10**6))
def test_of_a_mean_over_single_prompts_it_is_students_interval(n, seed):
    values = np.random.default_rng(seed).normal(3, 2, size=(n, 4))
    low, high = jackknife_interval(*left_out(values, np.arange(n), lambda x: x.mean(0)))
    half = T_975[n - 2] * values.std(0, ddof=1) / np.sqrt(n)
    np.testing.assert_allclose([low, high], [values.mean(0) - half, values.mean(0) + half], rtol=1e-9, atol=1e-9)


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
        (11, [1 / 11] * 11, "11 groups"),
        (2, [0.5, 0.6], "sum to 1"),
        (2, [0.0, 1.0], "above 0"),
    ],
)
def test_what_is_no_grouping_is_refused(n, share, message):
    with pytest.raises(InputError, match=message):
        jackknife_interval(np.array(0.0), np.zeros(n), np.array(share))
