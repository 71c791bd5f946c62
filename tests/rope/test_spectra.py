"""Measures of spectra against the singular values themselves."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.errors import InputError
from tl_posgen.rope.spectra import rank_one, singular_values, spectrum, spectrum_of_values, top_direction


def random_matrix(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(deadline=None, max_examples=25)
@given(rows=st.integers(1, 12), columns=st.integers(1, 12), seed=st.integers(0, 99), centred=st.booleans())
def test_singular_values_are_those_of_a_full_decomposition(rows, columns, seed, centred):
    x = random_matrix(2, rows, columns, seed=seed)
    expected = torch.linalg.svdvals(x - centred * x.mean(-2, keepdim=True))
    torch.testing.assert_close(singular_values(x, centred=centred), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("squared", [True, False])
def test_measures_follow_their_definitions(squared):
    x = random_matrix(20, 6)
    s = torch.linalg.svdvals(x)
    p = s**2 / (s**2).sum() if squared else s / s.sum()
    found = spectrum(x, squared=squared)
    torch.testing.assert_close(found.r1, p[0])
    torch.testing.assert_close(found.effective_rank, (-(p * p.log()).sum()).exp())
    torch.testing.assert_close(found.participation_ratio, 1 / (p**2).sum())
    rank = found.rank.item()
    assert p[:rank].sum() >= 0.95 > p[: rank - 1].sum()


@pytest.mark.parametrize("n", [1, 3, 7])
def test_equal_singular_values_give_the_full_rank_in_every_measure(n):
    found = spectrum(2 * torch.eye(n), share=1.0)
    assert (found.rank.item(), found.r1.item()) == (n, pytest.approx(1 / n))
    assert found.effective_rank.item() == pytest.approx(n)
    assert found.participation_ratio.item() == pytest.approx(n)


def test_rank_one_matrix_has_rank_one_in_every_measure():
    found = spectrum(torch.outer(torch.arange(1.0, 5.0), torch.tensor([1.0, -2.0])))
    assert found.rank.item() == 1
    for value in (found.r1, found.effective_rank, found.participation_ratio):
        assert value.item() == pytest.approx(1)


def test_constant_rows_vanish_only_when_centred():
    x = 100.0 + random_matrix(30, 4)
    assert spectrum(x).r1 > 0.999
    assert spectrum(x, centred=True).r1 < 0.6


def test_measures_of_a_zero_matrix_are_nan_and_its_rank_is_zero():
    found = spectrum(torch.zeros(3, 2))
    assert found.rank.item() == 0
    assert math.isnan(found.r1)
    assert math.isnan(found.effective_rank)


def test_spectrum_of_given_values_counts_the_share():
    values = torch.tensor([3.0, 1.0])  # 9 : 1
    assert spectrum_of_values(values, share=0.9).rank.item() == 1
    assert spectrum_of_values(values, share=0.91).rank.item() == 2


def test_every_matrix_of_a_batch_is_measured_by_itself():
    x = 1e-3 * random_matrix(3, 20, 6).float()
    together = spectrum(x)
    for n in range(3):
        alone = spectrum_of_values(singular_values(x[n]))
        for name, value in vars(alone).items():
            torch.testing.assert_close(getattr(together, name)[n], value)
        assert 1 < alone.rank <= 6


@pytest.mark.parametrize("share", [0.0, 1.1])
def test_share_that_is_no_share_is_refused(share):
    with pytest.raises(InputError, match="share"):
        spectrum(torch.eye(2), share=share)


@settings(deadline=None, max_examples=25)
@given(rows=st.integers(1, 12), columns=st.integers(1, 12), seed=st.integers(0, 99))
def test_top_direction_is_the_first_right_singular_vector(rows, columns, seed):
    x = random_matrix(3, rows, columns, seed=seed)
    found = top_direction(x)
    expected = torch.linalg.svd(x, full_matrices=False).Vh[:, 0]
    torch.testing.assert_close((found * expected).sum(-1).abs(), torch.ones(3, dtype=torch.float64))
    assert ((x @ found[..., None]).sum((-2, -1)) >= 0).all()


@pytest.mark.parametrize("shape", [(9, 4), (4, 9)])
def test_rank_one_is_the_best_approximation_of_rank_one(shape):
    x = random_matrix(*shape)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    best = s[0] * torch.outer(u[:, 0], vh[0])
    torch.testing.assert_close(rank_one(x), best)
    torch.testing.assert_close(rank_one(x.float()), best.float())
