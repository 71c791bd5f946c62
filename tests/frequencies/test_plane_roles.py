"""Roles of planes: against the scores and the pattern of the pass, and in layers that see few keys."""

from dataclasses import replace

import pytest
import torch
from captures import collected, run

from tl_posgen.frequencies import PlaneRoles
from tl_posgen.frequencies.plane_roles import NEAR
from tl_posgen.frequencies.plane_use import SETTLED

N = 40


@pytest.fixture(scope="module")
def captures(mini):
    tokens = torch.randint(2, 2000, (1, N), generator=torch.Generator().manual_seed(0))
    return run(mini, tokens)


def test_diagonals_and_their_lifts_are_those_of_the_scores_and_of_the_pattern(captures):
    data = collected(PlaneRoles(), *captures)
    for capture in captures:
        scores, pattern = capture.scores().double(), capture.pattern.double()

        def diagonal(x, distance):
            return x.diagonal(-distance, 1, 2)[:, SETTLED - distance :].mean(1)

        for near in NEAR:
            of_layer = data.sel(layer=capture.layer, near=near)
            torch.testing.assert_close(
                torch.tensor(of_layer["diagonal"].values), diagonal(pattern, near), rtol=1e-5, atol=1e-6
            )
            behind = torch.stack([diagonal(scores, near + more) for more in (1, 2, 3)]).mean(0)
            lift = torch.tensor(of_layer["contrast"].sum("plane").values)
            torch.testing.assert_close(lift, diagonal(scores, near) - behind, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("window", "is_there"), [(1, False), (4, False), (5, True), (6, True)])
def test_a_layer_that_sees_too_few_keys_has_no_numbers(captures, window, is_there):
    """The lift of the previous token needs the three tokens before it."""
    values = PlaneRoles().of_layer(replace(captures[0], geometry=replace(captures[0].geometry, window=window)))
    assert bool(values) == is_there
    assert not values or values["contrast"].isfinite().all()
