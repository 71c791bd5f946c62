"""Correlation and partial correlation against SciPy and against the textbook formula."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tl_posgen.stats.partial_correlation import correlation, partial_correlation, regression_line


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(seed=st.integers(0, 1000), n=st.integers(4, 60))
@settings(deadline=None)
def test_agrees_with_scipy_with_its_interval(seed, n):
    x, y = gaussian(2, n, seed=seed)
    found, expected = correlation(x, y), stats.pearsonr(x.numpy(), y.numpy())
    interval = expected.confidence_interval(0.95)
    assert found.r == pytest.approx(expected.statistic)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), abs=1e-4)


def test_one_control_gives_the_textbook_formula():
    x, y, z = gaussian(3, 40)
    rxy, rxz, ryz = (np.corrcoef(a, b)[0, 1] for a, b in ((x, y), (x, z), (y, z)))
    expected = (rxy - rxz * ryz) / math.sqrt((1 - rxz**2) * (1 - ryz**2))
    assert partial_correlation(x, y, z[:, None]).r == pytest.approx(expected)


def test_several_controls_agree_with_the_inverse_of_the_correlation_matrix():
    columns = gaussian(6, 50)
    precision = np.linalg.inv(np.corrcoef(columns.numpy()))
    expected = -precision[0, 1] / math.sqrt(precision[0, 0] * precision[1, 1])
    found = partial_correlation(columns[0], columns[1], columns[2:].mT)
    assert found.r == pytest.approx(expected)
    assert found.controls == 4


def test_a_common_cause_is_taken_out():
    width = gaussian(200)
    x, y = (width + 0.3 * gaussian(200, seed=seed) for seed in (1, 2))
    found = partial_correlation(x, y, width[:, None])
    assert correlation(x, y).r > 0.8
    assert found.low < 0 < found.high


def test_scale_and_doubled_controls_change_nothing():
    x, y, z = gaussian(3, 30)
    plain = partial_correlation(x, y, z[:, None])
    scaled = partial_correlation(1e6 * x + 5, -1e-6 * y, torch.stack([1e9 * z, z], dim=1))
    assert scaled.r == pytest.approx(-plain.r)
    assert partial_correlation(x, y, 1e-9 * z[:, None]).r == pytest.approx(plain.r)


def test_proportional_columns_have_a_correlation_of_one_and_no_more():
    found = [correlation(x, 3 * x) for x in gaussian(50, 8)]
    assert [one.low for one in found] == pytest.approx([1] * 50)
    assert max(one.r for one in found) == max(one.high for one in found) == 1


def test_a_column_that_controls_explain_has_no_correlation():
    x, y = gaussian(2, 10)
    assert math.isnan(partial_correlation(x, y, x[:, None]).r)
    assert math.isnan(correlation(torch.ones(10), y.float()).r)


def test_the_line_agrees_with_scipy():
    x, y = gaussian(2, 20)
    expected, found = stats.linregress(x.numpy(), y.numpy()), regression_line(x, y)
    assert (found.slope, found.intercept) == pytest.approx((expected.slope, expected.intercept))
    assert found.r2 == pytest.approx(expected.rvalue**2)


def test_too_few_rows_are_refused():
    with pytest.raises(ValueError, match="5 rows with 2 controls; at least 6"):
        partial_correlation(torch.arange(5.0), torch.arange(5.0), torch.ones(5, 2))


def test_values_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="NaN or infinite"):
        correlation(torch.tensor([1.0, 2.0, torch.nan, 4.0]), torch.arange(4.0))
