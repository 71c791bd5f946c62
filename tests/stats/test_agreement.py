"""Correlations against scipy."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tl_posgen.stats.agreement import pearson, ranks, spearman

# few distinct values, so that ties are common
values = st.lists(st.integers(-4, 4), min_size=3, max_size=20)


@settings(deadline=None, max_examples=50)
@given(values, st.integers(0, 99))
def test_spearman_with_ties_is_scipys(x, seed):
    x = torch.tensor(x, dtype=torch.float64)
    y = torch.randint(0, 5, x.shape, generator=torch.Generator().manual_seed(seed)).double()
    if x.unique().numel() == 1 or y.unique().numel() == 1:
        assert spearman(x, y).isnan()
    else:
        assert spearman(x, y).item() == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)


def test_pearson_is_scipys_for_every_leading_axis():
    x, y = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(0))
    expected = [stats.pearsonr(a, b).statistic for a, b in zip(x.double(), y.double(), strict=True)]
    assert pearson(x, y).tolist() == pytest.approx(expected)


@settings(deadline=None, max_examples=50)
@given(values)
def test_ranks_are_scipys_average_ranks(x):
    assert ranks(torch.tensor(x, dtype=torch.float64)).tolist() == stats.rankdata(x).tolist()


def test_infinite_values_rank_above_and_below_all_others():
    x = torch.tensor([1.0, torch.inf, 2.0, -torch.inf, 3.0, torch.inf, 1 + 1e-15], dtype=torch.float64)
    assert ranks(x).tolist() == [2.5, 6.5, 4, 1, 5, 6.5, 2.5]


def test_correlation_with_a_constant_is_nan_not_zero():
    assert pearson(torch.full((5,), 0.1), torch.arange(5.0)).isnan()
    assert pearson(torch.arange(5.0), torch.full((5,), 0.1)).isnan()


def test_values_that_differ_by_rounding_share_their_rank():
    third = torch.tensor([1 / 3, 0.1 + 0.2, 0.3, 1 / 3], dtype=torch.float64)
    assert ranks(third).tolist() == [3.5, 1.5, 1.5, 3.5]
    assert ranks(torch.zeros(2, 0)).shape == (2, 0)
