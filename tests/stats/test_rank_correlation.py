"""Rank correlations against scipy, over all rows and within groups."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tl_posgen.stats.rank_correlation import rank_correlation


@settings(max_examples=40, deadline=None)
@given(n=st.integers(5, 40), seed=st.integers(0, 2**31), ties=st.booleans())
def test_it_is_spearmans_with_its_interval(n, seed, ties):
    x, y = torch.randn(2, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = x.round() if ties else x
    found, expected = rank_correlation(x, y), stats.spearmanr(x, y).statistic if len(x.unique()) > 1 else math.nan
    assert found.r == pytest.approx(expected, nan_ok=True)
    if abs(found.r) < 1:
        z, reach = math.atanh(found.r), 1.96 * math.sqrt((1 + found.r**2 / 2) / (n - 3))
        assert (found.low, found.high) == pytest.approx((math.tanh(z - reach), math.tanh(z + reach)))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), sizes=st.lists(st.integers(2, 6), min_size=2, max_size=4))
def test_within_groups_it_is_the_correlation_of_what_group_means_leave(seed, sizes):
    group = torch.repeat_interleave(torch.arange(len(sizes)) * 3, torch.tensor(sizes))
    n = len(group)
    x, y = torch.randn(2, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 5 * group
    found = rank_correlation(x, y, group)
    if n < len(sizes) + 3:
        assert math.isnan(found.r)
        return
    left = []
    for column in (x, y):
        ranks = torch.from_numpy(stats.rankdata(column))
        left.append(torch.cat([ranks[group == one] - ranks[group == one].mean() for one in group.unique()]))
    assert found.r == pytest.approx(stats.pearsonr(*left).statistic)
    assert found.controls == len(sizes) - 1


def test_rows_without_a_value_are_left_out_and_too_few_give_nothing():
    x = torch.tensor([1.0, 2.0, torch.nan, 3.0, 5.0, 4.0])
    y = torch.tensor([1.0, 3.0, 9.0, 2.0, 5.0, torch.inf])
    assert rank_correlation(x, y).n == 4
    assert rank_correlation(x, y).r == pytest.approx(0.8)
    assert math.isnan(rank_correlation(x[:4], y[:4]).r)
    assert math.isnan(rank_correlation(x[:0], y[:0]).r)
    assert math.isnan(rank_correlation(torch.ones(6), y).r)
