"""Correlations of values, of ranks, within groups and given other columns, and differences of them: against scipy."""

import math

import numpy as np
import pytest
import torch
from drawn import normal
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tl_posgen.stats.correlations import (
    Correlation,
    correlation,
    correlation_excess,
    partial_correlation,
    pearson,
    ranks,
    spearman,
)

SEEDS = st.integers(0, 2**31)
few_values = st.lists(st.integers(-4, 4), min_size=3, max_size=20)  # so that ties are common
MIX = torch.tensor([[1.0, 0.0, 0.0], [0.7, 0.5, 0.0], [0.6, 0.3, 0.6]], dtype=torch.float64)  # y, x, z


def samples(count, n):
    return (normal(count, n, 3) @ MIX.mT).unbind(-1)


def excesses(y, x, z):
    return [
        correlation_excess(correlation(b, a), correlation(c, a), np.corrcoef(b, c)[0, 1])
        for a, b, c in zip(y, x, z, strict=True)
    ]


@settings(deadline=None, max_examples=50)
@given(few_values, SEEDS)
def test_spearman_and_ranks_with_ties_are_scipys(x, seed):
    x = torch.tensor(x, dtype=torch.float64)
    y = torch.randint(0, 5, x.shape, generator=torch.Generator().manual_seed(seed)).double()
    assert ranks(x).tolist() == stats.rankdata(x).tolist()
    if x.unique().numel() == 1 or y.unique().numel() == 1:
        assert spearman(x, y).isnan()
    else:
        assert spearman(x, y).item() == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)


def test_pearson_is_scipys_for_every_leading_axis_and_nan_of_a_constant():
    x, y = normal(2, 3, 40).float()
    expected = [stats.pearsonr(a, b).statistic for a, b in zip(x.double(), y.double(), strict=True)]
    assert pearson(x, y).tolist() == pytest.approx(expected)
    assert pearson(torch.full((5,), 0.1), torch.arange(5.0)).isnan()
    assert pearson(torch.arange(5.0), torch.full((5,), 0.1)).isnan()


def test_ranks_of_infinite_values_and_of_values_that_differ_by_rounding():
    x = torch.tensor([1.0, torch.inf, 2.0, -torch.inf, 3.0, torch.inf, 1 + 1e-15], dtype=torch.float64)
    assert ranks(x).tolist() == [2.5, 6.5, 4, 1, 5, 6.5, 2.5]
    assert ranks(torch.zeros(2, 0)).shape == (2, 0)


@given(seed=SEEDS, n=st.integers(4, 60))
@settings(deadline=None)
def test_a_correlation_agrees_with_scipy_with_its_interval(seed, n):
    x, y = normal(2, n, seed=seed)
    found, expected = correlation(x, y), stats.pearsonr(x.numpy(), y.numpy())
    interval = expected.confidence_interval(0.95)
    assert found.r == pytest.approx(expected.statistic)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), abs=1e-4)


@pytest.mark.parametrize("n_controls", [1, 4])
def test_controls_agree_with_the_inverse_of_the_correlation_matrix(n_controls):
    columns = normal(2 + n_controls, 50)
    precision = np.linalg.inv(np.corrcoef(columns.numpy()))
    found = partial_correlation(columns[0], columns[1], columns[2:].mT)
    assert found.r == pytest.approx(-precision[0, 1] / math.sqrt(precision[0, 0] * precision[1, 1]))


def test_scale_and_doubled_controls_change_nothing():
    x, y, z = normal(3, 30)
    plain = partial_correlation(x, y, z[:, None])
    scaled = partial_correlation(1e6 * x + 5, -1e-6 * y, torch.stack([1e9 * z, z], dim=1))
    assert scaled.r == pytest.approx(-plain.r)
    assert partial_correlation(x, y, 1e-9 * z[:, None]).r == pytest.approx(plain.r)


def test_proportional_columns_have_a_correlation_of_one_and_explained_ones_none():
    found = [correlation(x, 3 * x) for x in normal(50, 8)]
    assert [one.low for one in found] == pytest.approx([1] * 50)
    assert max(one.r for one in found) == max(one.high for one in found) == 1
    x, y = normal(2, 10)
    assert math.isnan(partial_correlation(x, y, x[:, None]).r)
    assert math.isnan(correlation(torch.ones(10), y.float()).r)


def test_too_few_rows_and_values_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="5 rows with 2 controls; at least 6"):
        partial_correlation(torch.arange(5.0), torch.arange(5.0), torch.ones(5, 2))
    with pytest.raises(ValueError, match="NaN or infinite"):
        correlation(torch.tensor([1.0, 2.0, torch.nan, 4.0]), torch.arange(4.0))


@pytest.mark.slow
@pytest.mark.parametrize("n", [12, 40])
def test_the_interval_holds_the_difference_of_normal_columns_in_19_of_20_samples(n):
    (whole,) = excesses(*(one.reshape(1, -1) for one in samples(1, 10**5)))
    found = excesses(*samples(500, n))
    held = np.mean([low <= whole[0] <= high for _, low, high in found])
    assert 0.92 < held < 0.985
    assert np.mean([value for value, *_ in found]) == pytest.approx(whole[0], abs=0.03)


def test_the_direction_of_a_column_changes_no_difference():
    y, x, z = (one[0] for one in samples(1, 30))
    expected = excesses(y[None], x[None], z[None])[0]
    for signs in ((1, -1, 1), (1, 1, -1), (-1, 1, 1), (-1, -1, -1)):
        turned = (sign * one[None] for sign, one in zip(signs, (y, x, z), strict=True))
        assert excesses(*turned)[0] == pytest.approx(expected)


def test_a_difference_is_narrower_of_columns_that_say_the_same_and_nan_of_an_undefined_one():
    one, other = Correlation(0.6, 0.4, 0.75), Correlation(0.5, 0.25, 0.68)
    (_, low, high), (_, wide_low, wide_high) = (correlation_excess(one, other, between) for between in (0.95, 0.3))
    assert wide_low < low < high < wide_high
    perfect, undefined = Correlation(1.0, 1.0, 1.0), Correlation(math.nan, math.nan, math.nan)
    assert correlation_excess(perfect, Correlation(0.5, 0.1, 0.8), 0.5) == pytest.approx((0.5, 0.2, 0.9))
    assert all(map(math.isnan, correlation_excess(undefined, other, 0.5)))
