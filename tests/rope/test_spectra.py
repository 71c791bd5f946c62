"""Measures of spectra against the singular values themselves."""

import pytest
import torch
from drawn import normal
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.rope.spectra import rank_of_share, rank_one, rank_one_share, singular_values, top_direction


@settings(deadline=None, max_examples=25)
@given(rows=st.integers(1, 12), columns=st.integers(1, 12), seed=st.integers(0, 99))
def test_singular_values_and_top_direction_are_those_of_a_full_decomposition(rows, columns, seed):
    x = normal(3, rows, columns, seed=seed)
    _, values, vectors = torch.linalg.svd(x, full_matrices=False)
    torch.testing.assert_close(singular_values(x), values, rtol=1e-6, atol=1e-6)
    found = top_direction(x)
    torch.testing.assert_close((found * vectors[:, 0]).sum(-1).abs(), torch.ones(3, dtype=torch.float64))
    assert ((x @ found[..., None]).sum((-2, -1)) >= 0).all()


@settings(deadline=None, max_examples=10)
@given(rows=st.integers(1, 12), columns=st.integers(1, 12), seed=st.integers(0, 99))
def test_the_share_of_rank_one_is_that_of_the_first_singular_value(rows, columns, seed):
    x = normal(2, rows, columns, seed=seed)
    energies = torch.linalg.svdvals(x) ** 2
    torch.testing.assert_close(rank_one_share(x), energies[:, 0] / energies.sum(-1))
    for share in (0.3, 0.95):
        ranks = [min(k for k in range(1, len(e) + 1) if e[:k].sum() >= share * e.sum() * (1 - 1e-9)) for e in energies]
        assert rank_of_share(singular_values(x), share).tolist() == ranks


def test_zeros_have_no_share_of_rank_one():
    assert rank_one_share(torch.zeros(3, 2)).isnan()
    assert rank_of_share(torch.zeros(2)) == 0


@pytest.mark.parametrize("shape", [(9, 4), (4, 9)])
def test_rank_one_is_the_best_approximation_of_rank_one(shape):
    x = normal(*shape)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    best = s[0] * torch.outer(u[:, 0], vh[0])
    torch.testing.assert_close(rank_one(x), best)
    torch.testing.assert_close(rank_one(x.float()), best.float())
