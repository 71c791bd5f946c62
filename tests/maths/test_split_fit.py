"""The mean-key split's correlation without the score matrix, against the matrices themselves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.maths.rope import Rope, inverse_frequencies, rotate
from tl_posgen.maths.split_fit import split_fit
from tl_posgen.maths.splits import point_mass, split_scores, triangle, uniform


def head(seed: int, n: int, d_head: int = 6, rotary_dim: int = 4):
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 2, n, d_head, dtype=torch.float64, generator=generator)
    return q + 0.5, k + torch.randn(2, 1, d_head, dtype=torch.float64, generator=generator), rotary_dim


def brute_force(q, k, rope, law, window, start):
    n = q.shape[1]
    position = torch.arange(n)
    distance = position[:, None] - position
    visible = (distance >= 0) & (distance < (window or n)) & (position >= start)
    w = rotate(q, position, rope) @ rotate(k, position, rope).mT
    f = split_scores(q, k, rope, 1.0, law).scores
    overall, within = [], []
    for x, y in zip(w, f, strict=True):
        overall.append(torch.corrcoef(torch.stack([x[visible], y[visible]]))[0, 1])
        counts = visible.sum(-1, keepdim=True).clamp(min=1)
        x, y = (z - (z * visible).sum(-1, keepdim=True) / counts for z in (x, y))
        within.append((x * y)[visible].sum() / (x[visible].square().sum() * y[visible].square().sum()).sqrt())
    return torch.stack(overall), torch.stack(within)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("law", [point_mass(0), point_mass(1000), triangle(3), uniform(9)])
def test_it_equals_the_correlation_of_the_matrices(law, window):
    q, k, rotary_dim = head(0, 13)
    rope = Rope(inverse_frequencies(rotary_dim, 30.0), scaling=1.2)
    fit = split_fit(q, k, rope, law, window=window)
    for start, r, r_visible in ((0, fit.r, fit.r_visible), (1, fit.r_no_first, fit.r_visible_no_first)):
        overall, within = brute_force(q, k, rope, law, window, start)
        torch.testing.assert_close(r, overall)
        torch.testing.assert_close(r_visible, within)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1000), st.integers(3, 40), st.integers(0, 64))
def test_it_is_a_correlation(seed, n, d0):
    q, k, rotary_dim = head(seed, n)
    fit = split_fit(q, k, Rope(inverse_frequencies(rotary_dim)), point_mass(d0))
    assert (fit.r.abs() <= 1).all()


def test_without_rope_the_split_is_exact():
    q, k, _ = head(1, 10)
    fit = split_fit(q, k, Rope(), point_mass(5))
    torch.testing.assert_close(fit.r, torch.ones(2).double())


def test_constant_scores_have_no_correlation():
    q = k = torch.ones(1, 5, 4)
    assert split_fit(q, k, Rope(), point_mass(0)).r.isnan().all()
