"""The closed form of the three-axis normal equations against a dense pseudo-inverse of the design matrix."""

import pytest
import torch
from dense_fit import design
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.numbers.three_axis_fit import solve_triangle


@settings(deadline=None)
@given(st.integers(4, 40), st.integers(0, 1000), st.booleans())
def test_solutions_leave_nothing_of_the_normal_equations(n, seed, as_pairs_without_first):
    pairs = CausalPairs(n + 1, first_token=False) if as_pairs_without_first else CausalPairs(n)
    x = torch.from_numpy(design(pairs).toarray())
    scores = torch.randn(2, len(x), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    best = scores @ torch.linalg.pinv(x).T @ x.T  # fitted scores by dense least squares
    sums = scores @ x
    starts = 0, pairs.first, pairs.first
    axes = [one[:, start : start + n] for one, start in zip(sums.view(2, 3, -1).unbind(1), starts, strict=True)]
    theta = solve_triangle(torch.stack([axes[0], axes[1].flip(-1), axes[2]]))
    a, b, c = (part.nan_to_num() for part in pairs.spread(theta))
    torch.testing.assert_close(torch.cat([a, b, c], -1) @ x.T, best, atol=1e-11, rtol=0)


@pytest.mark.parametrize("n", [512, 4096, 30_000])
def test_axes_come_back_at_any_length(n):
    """Of axes without what is free: means of zero, and no straight line in the keys."""
    pairs = CausalPairs(n)
    theta = torch.randn(3, 2, n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    theta[1] *= torch.linspace(1, 30, n, dtype=torch.float64)
    right = pairs.consistent(pairs.normal(theta, pairs.counts()))
    left = pairs.normal(solve_triangle(right), pairs.counts()) - right
    assert float((left / pairs.counts()).abs().max()) < 1e-13 * n
