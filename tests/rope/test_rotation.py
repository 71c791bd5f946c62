"""Rotations: their algebra, for both pairings, partial rotary heads and scaling."""

import pytest
import torch
from drawn import normal
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from tl_posgen.errors import InputError
from tl_posgen.rope.rotation import (
    Rope,
    complex_frequencies,
    complex_planes,
    from_planes,
    inverse_frequencies,
    rotate,
    to_planes,
)

PAIRINGS = ("half", "adjacent")
FORTY = settings(max_examples=40, deadline=None)


@st.composite
def heads(draw):
    """Draw a rope and two sets of vectors [head, pos, d_head] in float64."""
    n_planes, rest = draw(st.integers(0, 5)), draw(st.integers(0, 3))
    rope = Rope(
        inverse_frequencies(2 * n_planes, draw(st.sampled_from([10.0, 1e4, 5e5]))),
        draw(st.sampled_from(PAIRINGS)),
        draw(st.sampled_from([1.0, 1.0, 1.37])),
    )
    shape = (2, 2, draw(st.integers(1, 6)), max(1, 2 * n_planes + rest))
    x, y = normal(*shape, seed=draw(st.integers(0, 2**31)))
    return rope, x, y


def scaled(x: torch.Tensor, rope: Rope, power: int = 1) -> torch.Tensor:
    """Return x with its rotary coordinates multiplied by scaling^power: the effect of scaling without rotation."""
    return torch.cat([x[..., : rope.rotary_dim] * rope.scaling**power, x[..., rope.rotary_dim :]], -1)


def positions_of(x: torch.Tensor, start: float = 0.0) -> torch.Tensor:
    return start + torch.arange(x.shape[-2], dtype=torch.float64)


def explicit_rotation(x: torch.Tensor, position: float, rope: Rope) -> torch.Tensor:
    """Compare one vector at one position with the 2 x 2 rotation matrices, by pairs of coordinates."""
    turned, n = x.clone(), len(rope.inv_freq)
    for m, theta in enumerate(rope.inv_freq.tolist()):
        pair = [m, m + n] if rope.pairing == "half" else [2 * m, 2 * m + 1]
        angle = torch.tensor(theta * position, dtype=torch.float64)
        matrix = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
        turned[pair] = rope.scaling * matrix @ x[pair]
    return turned


@FORTY
@given(heads(), st.floats(-1000, 1000))
def test_rotation_is_the_two_by_two_matrices(case, start):
    rope, x, _ = case
    turned, positions = rotate(x, positions_of(x, start), rope), positions_of(x, start)
    expected = torch.stack(
        [torch.stack([explicit_rotation(v, float(p), rope) for v, p in zip(h, positions, strict=True)]) for h in x]
    )
    torch.testing.assert_close(turned, expected)
    assert torch.equal(turned[..., rope.rotary_dim :], x[..., rope.rotary_dim :])


@FORTY
@given(heads(), st.floats(-100, 100), st.floats(-100, 100))
def test_rotations_compose(case, first, second):
    rope, x, _ = case
    once = rotate(x, positions_of(x, first + second), rope)
    further = torch.full((x.shape[1],), second, dtype=torch.float64)
    twice = rotate(rotate(x, positions_of(x, first), rope), further, rope)
    torch.testing.assert_close(twice, scaled(once, rope))


@FORTY
@given(heads(), st.integers(-5000, 5000))
def test_only_relative_position_matters(case, shift):
    rope, x, y = case
    here = rotate(x, positions_of(x), rope) @ rotate(y, positions_of(y), rope).mT
    there = rotate(x, positions_of(x, shift), rope) @ rotate(y, positions_of(y, shift), rope).mT
    torch.testing.assert_close(there, here, atol=1e-9, rtol=1e-9)


@FORTY
@given(heads())
def test_scores_are_sums_over_planes_and_planes_put_together_the_vector(case):
    rope, x, y = case
    assert torch.equal(from_planes(to_planes(x, rope), x[..., rope.rotary_dim :], rope), x)
    zx, zy = complex_planes(x, rope), complex_planes(y, rope)
    distance = positions_of(x)[:, None] - positions_of(y)
    turn = torch.exp(1j * distance[..., None] * complex_frequencies(rope, x.shape[-1]))
    gain = torch.ones(zx.shape[-1], dtype=torch.float64)
    gain[: len(rope.inv_freq)] = rope.scaling**2
    by_planes = (zx[:, :, None] * zy[:, None].conj() * turn * gain).sum(-1).real
    scores = rotate(x, positions_of(x), rope) @ rotate(y, positions_of(y), rope).mT
    torch.testing.assert_close(by_planes, scores, atol=1e-9, rtol=1e-9)


def test_far_positions_in_float32_are_as_exact_as_near_ones():
    rope = Rope(inverse_frequencies(16))
    q, k = torch.randn(2, 1, 8, 16, generator=torch.Generator().manual_seed(1))
    near = rotate(q, torch.arange(8), rope) @ rotate(k, torch.arange(8), rope).mT
    far_positions = torch.arange(8) + 10_000_000
    far = rotate(q, far_positions, rope) @ rotate(k, far_positions, rope).mT
    torch.testing.assert_close(far, near, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("given", "returned"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)],
)
def test_low_precision_is_raised_and_high_precision_kept(given, returned):
    rope = Rope(inverse_frequencies(4))
    x = torch.ones(1, 3, 6, dtype=given)
    assert rotate(x, torch.arange(3), rope).dtype == returned
    assert Rope().inv_freq.dtype == torch.float64


def test_frequencies_that_are_no_tensor_are_refused():
    with pytest.raises((InputError, TypeCheckError), match="inv_freq"):  # the latter where shapes are checked
        Rope([1.0, 0.1])
