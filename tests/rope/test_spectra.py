"""Measures of spectra against the singular values themselves."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.rope.spectra import rank_one, singular_values, spectrum, spectrum_of_values, top_direction


def random_matrix(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(deadline=None, max_examples=25)
@given(rows=st.integers(1, 12), columns=st.integers(1, 12), seed=st.integers(0, 99))
def test_singular_values_and_top_direction_are_those_of_a_full_decomposition(rows, columns, seed):
    x = random_matrix(3, rows, columns, seed=seed)
    _, values, vectors = torch.linalg.svd(x, full_matrices=False)
    torch.testing.assert_close(singular_values(x), values, rtol=1e-6, atol=1e-6)
    found = top_direction(x)
    torch.testing.assert_close((found * vectors[:, 0]).sum(-1).abs(), torch.ones(3, dtype=torch.float64))
    assert ((x @ found[..., None]).sum((-2, -1)) >= 0).all()


@pytest.mark.parametrize("squared", [True, False])
def test_measures_follow_their_definitions(squared):
    s = torch.linalg.svdvals(random_matrix(20, 6))
    p = s**2 / (s**2).sum() if squared else s / s.sum()
    found = spectrum_of_values(s, squared=squared)
    torch.testing.assert_close(found.r1, p[0])
    torch.testing.assert_close(found.effective_rank, (-(p * p.log()).sum()).exp())
    torch.testing.assert_close(found.participation_ratio, 1 / (p**2).sum())
    rank = found.rank.item()
    assert p[:rank].sum() >= 0.95 > p[: rank - 1].sum()


@pytest.mark.parametrize(("n", "rank"), [(1, 1), (3, 3), (7, 7), (20, 19)])  # 19 of 20 are 95 % but for rounding
def test_equal_singular_values_give_the_full_rank_in_every_measure(n, rank):
    found = spectrum(2 * torch.eye(n))
    assert (found.rank.item(), found.r1.item()) == (rank, pytest.approx(1 / n))
    assert found.effective_rank.item() == pytest.approx(n)
    assert found.participation_ratio.item() == pytest.approx(n)


def test_rank_one_matrix_has_rank_one_in_every_measure():
    found = spectrum(torch.outer(torch.arange(1.0, 5.0), torch.tensor([1.0, -2.0])))
    assert found.rank.item() == 1
    for value in (found.r1, found.effective_rank, found.participation_ratio):
        assert value.item() == pytest.approx(1)


def test_measures_of_a_zero_matrix_are_nan_and_its_rank_is_zero():
    found = spectrum(torch.zeros(3, 2))
    assert found.rank.item() == 0
    assert math.isnan(found.r1)
    assert math.isnan(found.effective_rank)


def test_every_matrix_of_a_batch_is_measured_by_itself():
    x = 1e-3 * random_matrix(3, 20, 6).float()
    together = spectrum(x)
    for n in range(3):
        for name, value in vars(spectrum(x[n])).items():
            torch.testing.assert_close(getattr(together, name)[n], value)


@pytest.mark.parametrize("shape", [(9, 4), (4, 9)])
def test_rank_one_is_the_best_approximation_of_rank_one(shape):
    x = random_matrix(*shape)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    best = s[0] * torch.outer(u[:, 0], vh[0])
    torch.testing.assert_close(rank_one(x), best)
    torch.testing.assert_close(rank_one(x.float()), best.float())
