"""Differences of correlations with one column: against simulation, and what does not change them."""

import math

import numpy as np
import pytest
import torch

from tl_posgen.stats.correlation_excess import correlation_excess
from tl_posgen.stats.partial_correlation import Correlation, correlation
from tl_posgen.stats.rank_correlation import rank_correlation

MIX = torch.tensor([[1.0, 0.0, 0.0], [0.7, 0.5, 0.0], [0.6, 0.3, 0.6]], dtype=torch.float64)  # y, x, z


def samples(count, n):
    drawn = torch.randn(count, n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (drawn @ MIX.mT).unbind(-1)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "n"), [(correlation, 12), (correlation, 40), (rank_correlation, 40)])
def test_the_interval_holds_the_difference_of_normal_columns_in_19_of_20_samples(kind, n):
    y, x, z = samples(500, n)
    (whole,) = correlation_of(*(one.reshape(1, -1) for one in samples(1, 10**5)), kind=kind)
    found = correlation_of(y, x, z, kind=kind)
    held = np.mean([low <= whole[0] <= high for _, low, high in found])
    assert 0.92 < held < 0.985
    assert np.mean([value for value, *_ in found]) == pytest.approx(whole[0], abs=0.03)


def correlation_of(y, x, z, kind):
    return [
        correlation_excess(kind(b, a), kind(c, a), np.corrcoef(b, c)[0, 1]) for a, b, c in zip(y, x, z, strict=True)
    ]


def test_the_direction_of_a_column_changes_nothing():
    y, x, z = (one[0] for one in samples(1, 30))
    expected = correlation_of(y[None], x[None], z[None], kind=correlation)[0]
    for signs in ((1, -1, 1), (1, 1, -1), (-1, 1, 1), (-1, -1, -1)):
        turned = (sign * one[None] for sign, one in zip(signs, (y, x, z), strict=True))
        assert correlation_of(*turned, kind=correlation)[0] == pytest.approx(expected)


def test_columns_that_say_the_same_have_a_narrower_interval_than_independent_ones():
    one, other = Correlation(0.6, 0.4, 0.75, 50), Correlation(0.5, 0.25, 0.68, 50)
    (_, low, high), (_, wide_low, wide_high) = (correlation_excess(one, other, between) for between in (0.95, 0.3))
    assert wide_low < low < high < wide_high


def test_a_perfect_correlation_is_told_from_another_and_an_undefined_one_from_none():
    perfect, other = Correlation(1.0, 1.0, 1.0, 9), Correlation(0.5, 0.1, 0.8, 9)
    undefined = Correlation(math.nan, math.nan, math.nan, 9)
    assert correlation_excess(perfect, other, 0.5) == pytest.approx((0.5, 0.2, 0.9))
    assert all(map(math.isnan, correlation_excess(undefined, other, 0.5)))
