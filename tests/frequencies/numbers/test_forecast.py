"""Forecasts against brute force over every query, key and distance, in float64."""

import pytest
import torch

from tl_posgen.frequencies.numbers.forecast import PARTS, Waves, mean_turn, mean_waves, overshoot, visible_variances
from tl_posgen.position.decomposition.numbers.variance_shares import TripleMoments, variance_shares
from tl_posgen.rope.planes import mean_curves, turning_factors
from tl_posgen.rope.rotation import Rope, complex_planes, inverse_frequencies

N, D_HEAD, SCALE, DISTANCES = 7, 10, 0.3, [5, 12]
OWN = Rope(inverse_frequencies(8))  # a remainder of two coordinates does not turn
ROPES = [OWN, Rope(OWN.inv_freq / 3, scaling=1.2), Rope(torch.tensor([-0.4, 2 * torch.pi, 0.0, 0.1]).double())]


@pytest.fixture(scope="module")
def vectors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, N, D_HEAD, generator=generator).double() + torch.randn(2, 1, D_HEAD) for _ in "qk"]


@pytest.fixture(scope="module")
def moments(vectors):
    return TripleMoments.from_qk(*vectors, OWN)


def brute(vectors, u):
    """Variance over all triples less that of the mean over keys and distances of a query."""
    q, k = (complex_planes(x, OWN) for x in vectors)
    w = SCALE * torch.einsum("him,hjm,dm->hijd", q, k.conj(), u.to(q)).real
    return (w - w.mean((2, 3), keepdim=True)).square().mean((1, 2, 3))


def factors(rope, n):
    return turning_factors(torch.arange(n), rope, D_HEAD)


def test_variances_are_those_of_every_triple(vectors, moments):
    waves = Waves.of_ropes(ROPES, DISTANCES, D_HEAD, torch.device("cpu"))
    found = visible_variances(moments, waves.turning(), SCALE)
    expected = [brute(vectors, factors(rope, n)) for rope in ROPES for n in DISTANCES]
    torch.testing.assert_close(found.sum(0), torch.stack(expected, 1))


def test_parts_are_those_of_the_variance_decomposition(moments):
    waves = Waves.of_ropes(ROPES, DISTANCES, D_HEAD, torch.device("cpu"))
    found = iter(visible_variances(moments, waves.turning(), SCALE).unbind(-1))
    for rope in ROPES:
        for n in DISTANCES:
            shares, one = variance_shares(moments, rope, SCALE, n), next(found)
            named = {"position": ("d", "qd"), "content": ("k", "qk"), "interaction": ("kd", "qkd")}
            expected = torch.stack([shares.share(*named[part]) for part in PARTS]) * shares.total
            torch.testing.assert_close(one, expected)


def test_changes_are_those_of_every_triple(vectors, moments):
    waves = Waves.of_ropes(ROPES, DISTANCES, D_HEAD, torch.device("cpu"))
    own = Waves.of_ropes([OWN] * len(ROPES), DISTANCES, D_HEAD, torch.device("cpu"))
    found = visible_variances(moments, waves.change_from(own), SCALE).sum(0)
    expected = [brute(vectors, factors(rope, n) - factors(OWN, n)) for rope in ROPES for n in DISTANCES]
    torch.testing.assert_close(found, torch.stack(expected, 1), atol=1e-12, rtol=1e-7)
    assert (found[:, :2] < 1e-12).all()  # its own frequencies


def test_the_mean_curve_is_the_mean_score_at_a_distance(vectors, moments):
    q, k = (complex_planes(x, OWN) for x in vectors)
    for rope in ROPES:
        scores = SCALE * torch.einsum("him,hjm,dm->hijd", q, k.conj(), factors(rope, 9)).real
        found = mean_curves(mean_waves(moments, SCALE), rope, 9, D_HEAD)
        torch.testing.assert_close(found, scores.mean((1, 2)))


@pytest.mark.parametrize("angle", [0.0, 1e-9, 0.3, torch.pi, 2 * torch.pi, -4 * torch.pi])
def test_mean_turns(angle):
    for n in (1, 6, 1000):
        expected = torch.polar(torch.ones(n).double(), angle * torch.arange(n).double()).mean()
        torch.testing.assert_close(
            mean_turn(torch.tensor(angle, dtype=torch.float64), torch.tensor(float(n))), expected
        )


def test_overshoot_is_on_either_side_and_blind_to_constants():
    inside = torch.tensor([[0.0, 2.0], [0.0, 2.0], [0.0, 2.0]])
    curves = torch.tensor([[5.0, 6.0, 5.0, 6.0], [1.0, 1.0, 1.0, 5.0], [1.0, 1.0, 1.0, -3.0]])
    assert overshoot(curves, inside).tolist() == [0, 2, 2]
