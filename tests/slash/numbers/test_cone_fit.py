"""Cone measures against what a cone built by hand must give."""

import math

import pytest
import torch
from drawn import normal

from tl_posgen.rope.spectra import rank_one_share
from tl_posgen.slash.numbers.cone_fit import axis_gain, bias_share, fit_cone

D_MODEL = 24


def inputs_on_a_cone(angle=0.4, n=60):
    """Unit vectors at one angle from the first axis, in random directions around it."""
    around = torch.nn.functional.normalize(normal(n, D_MODEL - 1), dim=-1)
    around = torch.nn.functional.normalize(torch.cat([around, -around]), dim=-1)
    along = torch.full((2 * n, 1), math.cos(angle), dtype=torch.float64)
    return torch.cat([along, math.sin(angle) * around], dim=-1)


def test_a_cone_built_by_hand_is_found_and_inputs_in_random_directions_lie_on_none():
    found = fit_cone(inputs_on_a_cone(angle=0.4))
    torch.testing.assert_close(found.axis, torch.eye(D_MODEL, dtype=torch.float64)[0])
    assert found.cosine.mean().item() == pytest.approx(math.cos(0.4))
    assert found.cosine.std(correction=0).item() == pytest.approx(0, abs=1e-7)
    assert found.r1.item() == pytest.approx(math.cos(0.4) ** 2)
    found = fit_cone(normal(500, D_MODEL))
    assert found.cosine.mean() < 0.2
    assert found.r1 < 3 / D_MODEL
    inputs = normal(30, D_MODEL) + 0.5
    torch.testing.assert_close(fit_cone(inputs).r1, rank_one_share(inputs))


def test_gain_is_one_on_average_over_random_axes():
    weight = normal(4, D_MODEL, 8)
    gains = [axis_gain(axis, weight).square() for axis in torch.eye(D_MODEL).double()]
    torch.testing.assert_close(torch.stack(gains).mean(0), torch.ones(4, dtype=torch.float64))


def test_projection_onto_the_axis_gives_rank_one_whatever_the_inputs():
    inputs = normal(40, D_MODEL) + 0.3
    axis = fit_cone(inputs).axis
    weight = (axis[:, None] * normal(1, 8))[None]
    assert rank_one_share(inputs @ weight).item() == pytest.approx(1)
    assert axis_gain(axis, weight).item() == pytest.approx(D_MODEL**0.5)


def test_the_bias_share_is_of_the_energies_of_both_parts():
    inputs, weight, bias = normal(40, D_MODEL), normal(2, D_MODEL, 8, seed=1), normal(2, 8, seed=2)
    free, energy = bias.expand(40, 2, 8).square().sum((0, 2)), (inputs @ weight).square().sum((1, 2))
    torch.testing.assert_close(bias_share(inputs, weight, bias), free / (free + energy))
    assert bias_share(inputs, weight, None).tolist() == [0, 0]
