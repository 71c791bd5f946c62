"""Sums of the residual against dense linear algebra, with a three-axis least-squares residual."""

import pytest
import torch
from dense_fit import dense_residual
from drawn import normal, visible
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen import arithmetic
from tl_posgen.position.decomposition.numbers import pair_moments, residual_sums
from tl_posgen.position.decomposition.numbers.three_axis_fit import fit_three_axis

N = 11


@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, N), window=st.none() | st.integers(3, N), crop=st.integers(1, N), seed=st.integers(0, 99))
def test_sums_over_blocks_of_rows_are_those_of_dense_least_squares(rows, window, crop, seed):
    scores = normal(2, N, N, seed=seed).masked_fill(~visible(N, window), -torch.inf)
    fit = fit_three_axis(pair_moments.pair_moments_from_scores(scores, window=window), tolerance=1e-13)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arithmetic, "SCORES_AT_ONCE", 2 * N * rows)
        found = residual_sums.residual_sums(lambda start, stop: scores[:, start:stop, :stop], fit, crop=crop)
    for first, sums in enumerate(found):
        seen = visible(N, window)
        seen[:, :first] = False
        left = dense_residual(scores, seen)
        torch.testing.assert_close(sums.corner, left[:, :crop, :crop])
        torch.testing.assert_close(sums.energy, left.square().sum((1, 2)))
        shown = scores.masked_fill(~seen, 0)
        within = (shown - shown.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1)) * seen
        torch.testing.assert_close(sums.within, within.square().sum((1, 2)))
        torch.testing.assert_close(sums.squares, shown.square().sum((1, 2)))
