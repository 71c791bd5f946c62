"""Edits of complex planes against loops over tokens, in float64."""

import cmath
import math

import pytest
import torch
from drawn import normal
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.position.planes.numbers.plane_edits import EDITS, Draw, edit_planes, edited, random_rotation

ANY = {"deadline": None, "max_examples": 30}
sizes = st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 4))
seeds = st.integers(0, 10**6)
shares = st.floats(0, 1)


def random_planes(size, seed=0, dtype=torch.complex128):
    return normal(*size, seed=seed, dtype=dtype) + 0.4


def draw_for(size, seed=0):
    return Draw(normal(size[1], seed=seed).argsort(), normal(*size, 2, seed=seed + 1))


@settings(**ANY)
@given(n=st.integers(1, 12), share=shares, seed=seeds)
def test_a_cycle_moves_the_first_share_of_the_order_and_nothing_else(n, share, seed):
    draw = draw_for((1, n, 1), seed)
    source, chosen = draw.cycle(share), draw.order[: round(share * n)].tolist()
    assert sorted(source.tolist()) == list(range(n))
    moved = [t for t in range(n) if source[t] != t]
    assert sorted(moved) == (sorted(chosen) if len(chosen) > 1 else [])  # lower shares are among higher ones


@settings(**ANY)
@given(size=sizes, strength=shares, seed=seeds)
def test_every_edit_is_that_of_a_loop_over_tokens(size, strength, seed):
    z, draw = random_planes(size, seed), draw_for(size, seed)
    source, theta = draw.cycle(strength).tolist(), torch.rand(size[2], dtype=torch.float64)
    found = {edit: edited(z, edit, strength, theta, draw) for edit in EDITS}
    n = size[1]
    for head in range(size[0]):
        for m in range(size[2]):
            row = [complex(one) for one in z[head, :, m]]
            square = sum(abs(one) ** 2 for one in row) / n
            mean = sum(row) / n
            for t, one in enumerate(row):
                away = cmath.phase(one * mean.conjugate())
                turn = theta[m].item() * (source[t] - t)
                expected = {
                    "shuffle_magnitudes": cmath.rect(abs(row[source[t]]), cmath.phase(one)),
                    "shuffle_phases": cmath.rect(abs(one), cmath.phase(row[source[t]])),
                    "shuffle_positions": one * cmath.exp(1j * turn),
                    "mean_magnitude": one / abs(one) * math.sqrt((1 - strength) * abs(one) ** 2 + strength * square),
                    "mean_phase": cmath.rect(abs(one), cmath.phase(mean) + (1 - strength) * away),
                    "phase_noise": one * cmath.exp(1j * strength * draw.noise[head, t, m, 0].item()),
                }
                for edit, right in expected.items():
                    assert abs(complex(found[edit][head, t, m]) - right) < 1e-9, edit


@settings(**ANY)
@given(size=sizes, share=shares, seed=seeds)
def test_a_random_rotation_keeps_every_length_and_changes_as_much_energy_as_it_is_given(size, share, seed):
    z, draw = random_planes(size, seed), draw_for(size, seed)
    energy = 4 * share * z.abs().square().sum(-1).mean(1)
    turned = random_rotation(z, energy, draw.noise)
    torch.testing.assert_close(turned.abs().square().sum(-1), z.abs().square().sum(-1))
    torch.testing.assert_close((turned - z).abs().square().sum(-1).mean(1), energy, atol=1e-9, rtol=1e-9)


def test_a_rotation_of_every_edit_changes_as_much_energy():
    size, theta = (2, 20, 4), torch.tensor([1.0, 0.5, 0.1, 0.01], dtype=torch.float64)
    z, draw = random_planes(size), draw_for(size)
    for planes in (torch.ones(4, dtype=torch.bool), torch.tensor([False, True, False, False])):
        for edit in EDITS:
            how = (edit, 1.0, theta, draw, planes)
            edited, control = edit_planes(z, *how), edit_planes(z, *how, control=True)
            energies = [(one - z).abs().square().sum(-1).mean(1) for one in (edited, control)]
            assert energies[0].min() > 0
            torch.testing.assert_close(*energies)
            assert torch.equal(edited[..., ~planes], z[..., ~planes])
            assert (control != z).all()


@pytest.mark.parametrize("edit", EDITS)
def test_strength_zero_planes_none_and_no_token_change_nothing_at_all(edit):
    size = (2, 7, 3)
    z, draw, theta = random_planes(size, dtype=torch.complex64), draw_for(size), torch.ones(3)
    every = torch.ones(3, dtype=torch.bool)
    assert torch.equal(edit_planes(z, edit, 0.0, theta, draw, every), z)
    assert torch.equal(edit_planes(z, edit, 1.0, theta, draw, ~every), z)
    assert torch.equal(edit_planes(z, edit, 1.0, theta, draw, ~every, control=True), z)
    assert edit_planes(z[:, :0], edit, 1.0, theta, draw_for((2, 0, 3)), every).shape == (2, 0, 3)


@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize("edit", EDITS)
def test_vectors_of_zero_and_single_tokens_stay_finite(edit, control):
    size = (1, 5, 2)
    every = torch.ones(2, dtype=torch.bool)
    z = random_planes(size, dtype=torch.complex64)
    for one in (torch.zeros_like(z), z[:, :1], torch.cat([0 * z[:, :2], z[:, 2:]], 1)):
        draw = draw_for((1, one.shape[1], 2))
        found = edit_planes(one, edit, 1.0, torch.ones(2), draw, every, control=control)
        assert found.isfinite().all()
        assert found.dtype == one.dtype
