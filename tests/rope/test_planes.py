"""Sums over planes against the vectors that they summarise."""

import torch
from drawn import normal
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.rope.planes import SecondMoments, turning_factors
from tl_posgen.rope.rotation import Rope, complex_planes, inverse_frequencies, rotate


def complex_normal(*shape: int, seed: int) -> torch.Tensor:
    return normal(*shape, seed=seed, dtype=torch.complex128)


@settings(max_examples=20, deadline=None)
@given(
    rotary=st.sampled_from([0, 2, 4, 8]),
    pairing=st.sampled_from(["half", "adjacent"]),
    scaling=st.sampled_from([1.0, 1.3]),
    distance=st.floats(0, 1e4),
)
def test_turning_factors_turn_the_score_of_every_head_layout(rotary, pairing, scaling, distance):
    rope = Rope(inverse_frequencies(rotary), pairing, scaling) if rotary else Rope()
    q, k = normal(2, 1, 9, seed=rotary)
    product = complex_planes(q, rope) * complex_planes(k, rope).conj()
    found = (turning_factors(torch.tensor([distance]), rope, 9) * product).sum().real
    expected = (rotate(q, torch.tensor([distance]), rope) * rotate(k, torch.zeros(1), rope)).sum()
    torch.testing.assert_close(found, expected)


def test_moments_give_mean_squares_and_products_those_of_all_pairs():
    x, z = complex_normal(3, 50, 4, seed=0), complex_normal(3, 5, 4, seed=1)
    expected = (z @ x.mT).real.square().mean(-1)
    torch.testing.assert_close(SecondMoments.from_samples(x).mean_square(z), expected)
    x, y = complex_normal(7, 4, seed=0), complex_normal(6, 4, seed=1)
    every = (x[:, None] * y.conj()).flatten(0, 1)
    found = SecondMoments.from_samples(x).times(SecondMoments.from_samples(y))
    expected = SecondMoments.from_samples(every)
    torch.testing.assert_close(found.plain, expected.plain)
    torch.testing.assert_close(found.conjugate, expected.conjugate)


def test_mean_and_spread_add_up_to_the_whole():
    x = complex_normal(9, 4, seed=0)
    mean, spread = SecondMoments.from_mean_and_spread(x)
    torch.testing.assert_close(mean.plain + spread.plain, SecondMoments.from_samples(x).plain)
    torch.testing.assert_close(mean.conjugate + spread.conjugate, SecondMoments.from_samples(x).conjugate)
