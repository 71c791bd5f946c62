"""The bootstrap interval of a mean over prompts."""

import numpy as np
import pytest

from tl_posgen.errors import InputError
from tl_posgen.stats import bootstrap
from tl_posgen.stats.bootstrap import bootstrap_interval, statistic_interval


def test_interval_of_gaussian_means_is_that_of_theory():
    values = np.random.default_rng(0).normal(3.0, 2.0, size=(400, 5))
    low, high = bootstrap_interval(values)
    error = values.std(0) / np.sqrt(400)
    np.testing.assert_allclose(low, values.mean(0) - 1.96 * error, atol=0.15 * error.max())
    np.testing.assert_allclose(high, values.mean(0) + 1.96 * error, atol=0.15 * error.max())


def test_interval_covers_the_truth_about_as_often_as_it_says():
    values = np.random.default_rng(1).normal(size=(60, 2000))
    low, high = bootstrap_interval(values, level=0.9)
    assert ((low < 0) & (high > 0)).mean() == pytest.approx(0.9, abs=0.03)


def test_a_seed_gives_the_same_interval_again_and_another_seed_another():
    values = np.random.default_rng(2).normal(size=(10, 3))
    assert np.array_equal(bootstrap_interval(values, seed=5), bootstrap_interval(values, seed=5))
    assert not np.array_equal(bootstrap_interval(values, seed=5), bootstrap_interval(values, seed=6))


def test_measures_of_one_prompt_are_resampled_together():
    values = np.random.default_rng(3).normal(size=(8, 1))
    low, high = bootstrap_interval(np.concatenate([values, -values], 1))
    np.testing.assert_allclose([low[0], high[0]], [-high[1], -low[1]])


def test_an_unknown_value_counts_nothing():
    values = np.random.default_rng(4).normal(size=(9, 2, 2))
    values[3, 0, 1] = np.nan
    low, high = bootstrap_interval(values, n_resamples=20_000)
    alone = bootstrap_interval(np.delete(values[:, 0, 1], 3), n_resamples=20_000)
    assert not np.isnan([low, high]).any()
    np.testing.assert_allclose([low[0, 1], high[0, 1]], alone, atol=0.05)


@pytest.mark.parametrize("values", [np.ones((1, 4)), np.full((5, 4), np.nan), np.empty((0, 4))], ids=str)
def test_fewer_than_two_known_prompts_have_no_interval(values):
    assert np.isnan(bootstrap_interval(values)).all()


def test_two_known_prompts_have_one():
    """The mean of two is either alone one time in four, so the middle 95 % reach from one to the other."""
    for values in (np.array([[1.0], [3.0]]), np.array([[1.0], [np.nan], [3.0]])):
        low, high = bootstrap_interval(values)
        assert (low.item(), high.item()) == (1, 3)


def test_measures_taken_in_parts_are_as_together(monkeypatch):
    values = np.random.default_rng(5).normal(size=(6, 7))
    together = bootstrap_interval(values)
    monkeypatch.setattr(bootstrap, "AT_ONCE", 6000)
    np.testing.assert_allclose(bootstrap_interval(values), together)


def test_bad_options_are_refused():
    with pytest.raises(InputError, match="between 0 and 1"):
        bootstrap_interval(np.ones((3, 1)), level=95.0)
    with pytest.raises(InputError, match="0 resamples"):
        bootstrap_interval(np.ones((3, 1)), n_resamples=0)


def test_the_interval_of_a_function_of_means_is_that_of_the_mean_itself_where_it_is_linear():
    values = np.random.default_rng(5).normal(2.0, 1.0, size=(400, 3))
    found, low, high = statistic_interval(values, lambda means: 3 * means)
    error = 3 * values.std(0) / np.sqrt(400)
    np.testing.assert_allclose(found, 3 * values.mean(0))
    np.testing.assert_allclose([found - low, high - found], [1.96 * error] * 2, rtol=0.1)


def test_a_function_of_one_prompt_has_no_interval():
    found, *ends = statistic_interval(np.array([[1.0, 2.0]]), lambda means: means.sum(-1))
    assert found == 3
    assert np.isnan(ends).all()


def test_the_least_that_can_be_asked_for():
    with pytest.raises(InputError, match="level 0"):
        bootstrap_interval(np.ones((3, 1)), level=0.0)
    low, high = bootstrap_interval(np.arange(3.0)[:, None], n_resamples=1)  # one is enough to ask for
    assert low == high
