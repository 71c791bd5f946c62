"""Use, longest plane and half-turn plane against their definitions, head by head."""

import cmath
import math

import pytest
import torch
from drawn import normal
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.frequencies.numbers.use import (
    first_negative_distance,
    half_turn_plane,
    longest_plane,
    plane_use,
    step_of,
)


@settings(deadline=None)
@given(
    base=st.floats(2, 1e7),
    n_planes=st.integers(1, 64),
    reach=st.floats(1, 1e6),
    still=st.booleans(),
    seed=st.integers(0, 9),
)
def test_the_half_turn_plane_is_the_fastest_of_those_that_make_at_most_half_a_turn(base, n_planes, reach, still, seed):
    theta = base ** (-torch.arange(n_planes, dtype=torch.float64) / n_planes)
    theta = theta[torch.randperm(n_planes, generator=torch.Generator().manual_seed(seed))]  # scaled RoPE may reorder
    theta = torch.cat([theta, torch.zeros(2)]) if still else theta
    slow = {plane: one for plane, one in enumerate(theta.tolist()) if one > 0 and one * reach <= math.pi}
    assert half_turn_plane(theta, reach) == (max(slow, key=lambda plane: slow[plane]) if slow else None)


@pytest.mark.parametrize(("base", "n_planes", "context", "plane"), [(1e4, 16, 512, 9), (1e5, 32, 8192, 22)])
def test_half_turn_planes_of_mini_and_of_smollm2(base, n_planes, context, plane):
    assert half_turn_plane(base ** (-torch.arange(n_planes) / n_planes), context) == plane


def test_use_is_each_planes_share_of_the_products_of_lengths():
    length = normal(2, 3, 5).abs()
    for head in range(3):
        product = [float(length[0, head, m] * length[1, head, m]) for m in range(5)]
        expected = [one / sum(product) for one in product]
        assert plane_use(length)[head].tolist() == pytest.approx(expected)


def test_the_longest_plane_turns_and_its_phase_is_that_of_the_mean_query_before_the_mean_key():
    z = torch.complex(*normal(2, 2, 3, 40, 5))
    z = z + torch.tensor([1, 2j])[:, None, None, None]  # q and k of each plane a quarter turn apart
    length, mean = z.abs().mean(2), z.mean(2)
    length[..., 4] *= 100  # of a plane that does not turn
    found = longest_plane(length, mean, torch.tensor([True] * 4 + [False]))
    for head in range(3):
        product = (length[0, head] * length[1, head])[:4]
        plane = int(product.argmax())
        assert found.plane[head] == plane
        q, k = mean[:, head, plane].tolist()
        assert found.phase[head].item() == pytest.approx(cmath.phase(q / k))
        assert found.alignment[head].item() == pytest.approx(abs(q) * abs(k) / product[plane].item())
        assert found.amplitude[head].item() == pytest.approx(abs(q) * abs(k))
    distances = torch.arange(6.0)  # the plane adds A cos(theta D + phi) to the mean score at distance D
    q, k = (one.gather(-1, found.plane[:, None])[..., 0] for one in mean)
    curve = (q[:, None] * k.conj()[:, None] * torch.exp(0.3j * distances)).real
    expected = found.amplitude[:, None] * torch.cos(0.3 * distances + found.phase[:, None])
    torch.testing.assert_close(curve, expected)


@settings(deadline=None)
@given(base=st.floats(2, 1e6), n_planes=st.integers(1, 16), reach=st.integers(1, 3000))
def test_the_first_negative_sum_of_cosines_is_that_of_a_loop(base, n_planes, reach):
    theta = [base ** (-m / n_planes) for m in range(n_planes)]
    sums = ((d, sum(math.cos(one * d) for one in theta)) for d in range(1, reach + 1))
    assert first_negative_distance(tuple(theta), reach) == next((d for d, one in sums if one < 0), reach)


def test_a_step_is_one_plane_in_32():
    assert [step_of(n) for n in (1, 16, 32, 63, 64, 128)] == [1, 1, 1, 1, 2, 4]
