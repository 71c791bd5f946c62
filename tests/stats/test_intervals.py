"""The rule for intervals: Student's of means, the jackknife's of anything else, cut at bounds; none of few prompts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t

from tl_posgen.errors import InputError
from tl_posgen.stats.intervals import (
    FEWEST,
    MOST_GROUPS,
    difference_interval,
    jackknife_interval,
    mean_interval,
    prompts_per_group,
    t_975,
)

BOUNDS = {"correlation": (-1.0, 1.0), "share": (0.0, 1.0), "at_most_1": (-np.inf, 1.0), "positive": (0.0, np.inf)}
SEEDS = st.integers(0, 10**6)


def drawn_within(bounds, shape, rng):
    """Values within the bounds, many of them at one or close to it."""
    low, high = np.maximum(bounds[0], -5), np.minimum(bounds[1], 5)
    shares = rng.beta(0.2, 0.2, size=shape)
    return low + (high - low) * np.where(rng.random(shape) < 0.2, shares.round(), shares)


def left_out(values, groups, estimate):
    """Return the estimate of all values, the estimates without each group, and the groups' shares."""
    names = np.unique(groups)
    without = np.array([estimate(values[groups != name]) for name in names])
    return np.asarray(estimate(values)), without, np.array([(groups == name).mean() for name in names])


def test_the_quantiles_are_those_of_t():
    degrees = np.arange(1, 3000)
    np.testing.assert_allclose(t_975(degrees), t.ppf(0.975, degrees), rtol=1e-4)
    assert np.isnan(t_975(0))


@given(st.integers(FEWEST, 40), SEEDS)
def test_of_a_mean_over_single_prompts_it_is_students_interval(n, seed):
    values = np.random.default_rng(seed).normal(3, 2, size=(n, 4))
    low, high = jackknife_interval(*left_out(values, np.arange(n), lambda x: x.mean(0)))
    half = t.ppf(0.975, n - 1) * values.std(0, ddof=1) / np.sqrt(n)
    np.testing.assert_allclose([low, high], [values.mean(0) - half, values.mean(0) + half], atol=2e-4)
    np.testing.assert_allclose([low, high], mean_interval(values), rtol=1e-9)


@given(SEEDS)
def test_a_prompt_without_a_value_counts_nothing_there(seed):
    values = np.random.default_rng(seed).normal(size=(6, 3))
    values[1, 0] = values[4, 0] = values[FEWEST - 1 :, 2] = np.nan
    low, high = mean_interval(values)
    np.testing.assert_allclose([low[0], high[0]], mean_interval(np.delete(values[:, 0], [1, 4])))
    np.testing.assert_allclose([low[1], high[1]], mean_interval(values[:, 1]))
    assert np.isnan([low[2], high[2]]).all()  # of three prompts


@pytest.mark.parametrize("n", [4, 8, 16])
def test_intervals_of_few_prompts_hold_the_mean_as_often_as_they_say(n):
    values = np.random.default_rng(n).normal(size=(n, 20_000))
    low, high = mean_interval(values)
    assert ((low <= 0) & (high >= 0)).mean() == pytest.approx(0.95, abs=0.005)


@pytest.mark.parametrize("n", range(1, FEWEST))
def test_few_prompts_have_no_interval_of_anything(n):
    values = np.random.default_rng(n).normal(size=(n, 3))
    whole = values.mean(0)
    assert np.isnan(mean_interval(values)).all()
    assert np.isnan(jackknife_interval(whole, values, np.full(n, 1 / n))).all()


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
@given(n=st.integers(FEWEST, 9), seed=SEEDS)
def test_ends_hold_their_value_and_are_within_bounds(bounds, n, seed):
    rng = np.random.default_rng(seed)
    value, without = drawn_within(bounds, 5, rng), drawn_within(bounds, (n, 5), rng)
    share = rng.dirichlet(np.full(n, 5.0))
    rows = drawn_within(bounds, (n, 5), rng)
    for own, (low, high) in (
        (value, jackknife_interval(value, without, share, bounds)),
        (rows.mean(0), mean_interval(rows, bounds)),
    ):
        assert (low <= own + 1e-12).all()
        assert (own <= high + 1e-12).all()
    low, high = jackknife_interval(value, without, share, bounds)
    assert (low >= bounds[0]).all()
    assert (high <= bounds[1]).all()


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
@given(n=st.integers(FEWEST, 9), seed=SEEDS)
def test_ends_inside_their_bounds_are_those_without_bounds(bounds, n, seed):
    rows = drawn_within(bounds, (n, 7), np.random.default_rng(seed))
    for cut, free in zip(mean_interval(rows, bounds), mean_interval(rows), strict=True):
        inside = (free >= bounds[0]) & (free <= bounds[1])
        np.testing.assert_array_equal(cut[inside], free[inside])


@given(st.integers(FEWEST, 9), SEEDS)
def test_the_order_of_prompts_and_groups_says_nothing(n, seed):
    rng = np.random.default_rng(seed)
    rows, share, order = rng.normal(size=(n, 3)), rng.dirichlet(np.full(n, 5.0)), rng.permutation(n)
    value = rows.mean(0)
    np.testing.assert_allclose(mean_interval(rows[order], (-1.0, 1.0)), mean_interval(rows, (-1.0, 1.0)), rtol=1e-9)
    ends = jackknife_interval(value, rows, share, (-1.0, 1.0))
    np.testing.assert_allclose(jackknife_interval(value, rows[order], share[order], (-1.0, 1.0)), ends, rtol=1e-9)


@given(st.integers(FEWEST, 9), st.floats(0.1, 10), st.floats(1, 5), SEEDS)
def test_it_moves_with_its_values_and_grows_with_their_spread(n, step, factor, seed):
    rng = np.random.default_rng(seed)
    value, without, share = rng.normal(), rng.normal(size=n), rng.dirichlet(np.full(n, 5.0))
    ends = np.array(jackknife_interval(value, without, share))
    np.testing.assert_allclose(jackknife_interval(value + step, without + step, share), ends + step, atol=1e-7)
    wider = jackknife_interval(value, value + factor * (without - value), share)
    np.testing.assert_allclose(wider, value + factor * (ends - value), atol=1e-6)
    raised = jackknife_interval(value + step, without + step, share, (-1.0, 1.0))
    assert (np.array(raised) >= jackknife_interval(value, without, share, (-1.0, 1.0))).all()


@pytest.mark.parametrize("at", [0.0, 0.3, 1.0])
def test_what_never_varies_has_an_interval_without_width(at):
    rows = np.full((5, 2), at)
    np.testing.assert_allclose(mean_interval(rows, (0.0, 1.0)), np.full((2, 2), at), atol=1e-12)
    ends = jackknife_interval(rows[0], rows, np.full(5, 0.2), (0.0, 1.0))
    np.testing.assert_allclose(ends, np.full((2, 2), at), atol=1e-12)


def test_a_value_beyond_its_bound_is_the_end_there():
    low, high = jackknife_interval(1.02, np.array([1.0, 1.01, 1.03, 1.04]), np.full(4, 0.25), (-np.inf, 1.0))
    assert low < 1
    assert high == 1.02


@pytest.mark.parametrize("bounds", [(1.0, 0.0), (0.5, 0.5), (np.nan, 1.0)])
def test_what_are_no_bounds_is_refused(bounds):
    with pytest.raises(InputError, match="give the lowest value that there can be, then the highest"):
        mean_interval(np.arange(5.0), bounds)


@pytest.mark.parametrize("n", [4, 6, 8])
def test_the_bias_of_few_prompts_is_taken_from_the_interval(n):
    rows = np.random.default_rng(n).normal(size=(n, 20_000))
    value, without = rows.var(0), np.stack([np.delete(rows, one, 0).var(0) for one in range(n)])  # 1 - 1/n of 1
    low, high = jackknife_interval(value, without, np.full(n, 1 / n), (0.0, np.inf))
    half = t.ppf(0.975, n - 1) * np.sqrt((n - 1) / n * ((without - without.mean(0)) ** 2).sum(0))
    covered, about_value = ((low <= 1) & (high >= 1)).mean(), (abs(value - 1) <= half).mean()
    assert covered > about_value + 0.01


def test_groups_are_neighbours_joined_in_pairs():
    for n in range(1, 300):
        size = prompts_per_group(n)
        n_groups = -(-n // size)
        assert n_groups <= MOST_GROUPS
        assert size & (size - 1) == 0  # a power of two
        assert n_groups >= min(n, FEWEST)
        assert size == 1 or -(-n // (size // 2)) > MOST_GROUPS  # the smallest


@given(SEEDS)
def test_the_interval_of_a_difference_adds_distances_to_ends_as_squares(seed):
    rng = np.random.default_rng(seed)
    first, second = (drawn_within((0, 1), (3, 4), rng) for _ in range(2))
    (low_a, a, high_a), (low_b, b, high_b) = np.sort(first, 0), np.sort(second, 0)
    low, high = difference_interval((a, low_a, high_a), (b, low_b, high_b))
    assert (low >= -1 - 1e-12).all()
    assert (high <= 1 + 1e-12).all()
    np.testing.assert_allclose(low, b - a - ((b - low_b) ** 2 + (high_a - a) ** 2) ** 0.5, atol=1e-12)
    back = difference_interval((b, low_b, high_b), (a, low_a, high_a))
    np.testing.assert_allclose(back, [-high, -low], atol=1e-12)


def test_the_interval_of_a_difference_of_means_holds_it_as_often_as_it_says():
    rng = np.random.default_rng(0)
    of_sides = [rng.normal(mean, spread, size=(8, 20_000)) for mean, spread in ((0.2, 1), (0.5, 2))]
    low, high = difference_interval(*((rows.mean(0), *mean_interval(rows)) for rows in of_sides))
    assert ((low <= 0.3) & (high >= 0.3)).mean() == pytest.approx(0.955, abs=0.015)


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
    ("n", "share", "message"), [(1, [0.5], "sum to 1"), (2, [0.5, 0.6], "sum to 1"), (2, [0.0, 1.0], "above 0")]
)
def test_what_is_no_grouping_is_refused(n, share, message):
    with pytest.raises(InputError, match=message):
        jackknife_interval(np.array(0.0), np.zeros(n), np.array(share))
