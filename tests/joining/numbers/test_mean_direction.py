"""Keys along a direction and the rest: energies, and the control of equal energy."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.joining.numbers.mean_direction import mean_direction, rest_energy, share_of_equal_energy, shrink_rest


def keys(n, d, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, n, d, dtype=torch.float64, generator=generator) + torch.randn(
        2, 1, d, dtype=torch.float64, generator=generator
    )


@settings(max_examples=40, deadline=None)
@given(n=st.integers(2, 12), d=st.integers(2, 6), share=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_the_control_takes_the_same_energy(n, d, share, seed):
    k = keys(n, d, seed)
    own = mean_direction(k)
    other = torch.nn.functional.normalize(keys(1, d, seed + 1)[:, 0], dim=-1)
    taken = (shrink_rest(k, own, share) - k).square().sum(-1).mean(1)
    torch.testing.assert_close(taken, (1 - share) ** 2 * rest_energy(k, own))
    mu = share_of_equal_energy(k, own, other, share)
    torch.testing.assert_close((shrink_rest(k, other, mu) - k).square().sum(-1).mean(1), taken)


def test_at_no_rest_keys_are_of_rank_one_along_their_mean_and_at_all_of_it_unchanged():
    k = keys(9, 5, 0)
    own = mean_direction(k)
    cut = shrink_rest(k, own, 0.0)
    assert float(torch.linalg.svdvals(cut)[:, 1].max()) < 1e-12
    torch.testing.assert_close(cut.mean(1), k.mean(1))  # the mean itself lies along u
    torch.testing.assert_close(shrink_rest(k, own, 1.0), k)
    half = shrink_rest(k, own, 0.5)
    torch.testing.assert_close(half - cut, (k - cut) / 2)


def test_keys_without_a_rest_lose_nothing():
    k = torch.tensor([[[1.0, 0.0], [3.0, 0.0]]], dtype=torch.float64)
    own, other = torch.tensor([[1.0, 0.0]]).double(), torch.tensor([[0.6, 0.8]]).double()
    assert share_of_equal_energy(k, own, other, 0.0).item() == pytest.approx(1)
    assert share_of_equal_energy(k, other, own, 1.0).item() == pytest.approx(1)
