"""Moments of each plane over the keys of a query, against the keys one by one in float64."""

import pytest
import torch
from drawn import normal, visible
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.frequencies.numbers.rows import row_moments

HEADS, PLANES = 2, 3


def planes(n, seed):
    real, imag = normal(2, HEADS, n, PLANES, seed=seed)
    return torch.complex(real + 2, imag)


@settings(deadline=None)
@given(n=st.integers(1, 12), window=st.none() | st.integers(1, 14), seed=st.integers(0, 99))
def test_moments_are_those_of_the_keys_that_a_query_sees(n, window, seed):
    q, k = planes(n, seed), planes(n, seed + 100)
    rows = torch.arange(n // 2, n)
    found = row_moments(q, k, rows, window)
    parts = (q[:, :, None] * k[:, None].conj()).real  # [head, query, key, plane]
    seen = visible(n, window)
    for row, i in enumerate(rows.tolist()):
        keys = [j for j in range(1, n) if seen[i, j]]
        of_row = parts[:, i, keys]
        expected = of_row.mean(1) if keys else torch.full((HEADS, PLANES), torch.nan).double()
        torch.testing.assert_close(found.mean[:, row], expected, equal_nan=True)
        if keys:
            torch.testing.assert_close(found.variance[:, row], of_row.var(1, correction=0), atol=1e-10, rtol=1e-8)
        first = parts[:, i, 0] if seen[i, 0] else torch.full((HEADS, PLANES), torch.nan).double()
        torch.testing.assert_close(found.first[:, row], first, equal_nan=True)


def test_planes_sum_to_the_mean_score():
    q, k = planes(9, 0), planes(9, 1)
    scores = (q @ k.mH).real
    expected = torch.stack([scores[:, i, 1 : i + 1].mean(-1) for i in range(4, 9)], -1)
    torch.testing.assert_close(row_moments(q, k, torch.arange(4, 9)).mean.sum(-1), expected)


@pytest.mark.parametrize("offset", [1e3, 1e5])
def test_a_large_common_part_of_the_keys_does_not_hide_their_variance(offset):
    q, k = planes(20, 2), planes(20, 3)
    found = row_moments(q, k + offset, torch.tensor([19])).variance[:, 0]
    expected = (q[:, 19, None] * (k[:, 1:] + offset).conj()).real.var(1, correction=0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
