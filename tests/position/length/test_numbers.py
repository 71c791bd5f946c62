"""Drift measures against samples, the definition, and cases with a known answer."""

import math

import pytest
import torch
from drawn import normal, visible
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.position.length.numbers import (
    OutputMoments,
    entropy_and_normaliser,
    frechet_distance,
    output_drift,
    output_plane,
    principal_axes,
)

D = 6


def outputs(n: int, seed: int, shift: float = 0.0, stretch: float = 1.0) -> torch.Tensor:
    """Two heads with unequal variances, as outputs of trained heads have."""
    return stretch * normal(2, n, D, seed=seed) * torch.tensor([4.0, 3, 2, 1, 0.1, 0.01]) + 1 + shift


def moments(seed: int, n: int = 4000, **change: float) -> OutputMoments:
    return OutputMoments.from_outputs(outputs(n, seed, **change))


def halves(n: int = 4000) -> tuple[OutputMoments, OutputMoments]:
    return moments(0, n), moments(1, n)


def in_halves(o: torch.Tensor) -> tuple[OutputMoments, OutputMoments]:
    return OutputMoments.from_outputs(o[:, ::2]), OutputMoments.from_outputs(o[:, 1::2])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999), rank=st.integers(1, D))
def test_frechet_distance_equals_the_root_of_the_product(seed, rank):
    """tr (C1^1/2 C2 C1^1/2)^1/2 is the sum of the roots of the eigenvalues of C1 C2, which no symmetric root is in."""
    a, b = normal(2, D, D, seed=seed)
    cov_1, cov_2 = a @ a.T, b[:, :rank] @ b[:, :rank].T
    mean_1, mean_2 = normal(2, D, seed=seed + 1)
    roots = torch.linalg.eigvals(cov_1 @ cov_2).real.clamp(min=0).sqrt().sum()
    expected = (mean_1 - mean_2).square().sum() + (cov_1 + cov_2).trace() - 2 * roots
    for pair in (((mean_1, cov_1), (mean_2, cov_2)), ((mean_2, cov_2), (mean_1, cov_1))):
        torch.testing.assert_close(frechet_distance(*pair[0], *pair[1]), expected, rtol=1e-5, atol=1e-5)
    assert frechet_distance(mean_1, cov_1, mean_1, cov_1) < 1e-6


def test_moments_of_prompts_add_up_to_those_of_their_outputs():
    one, other = outputs(20, 0), outputs(30, 1)
    total, joined = moments(0, 20) + moments(1, 30), torch.cat([one, other], 1)
    torch.testing.assert_close(total.mean, joined.mean(1))
    for head in range(2):
        torch.testing.assert_close(total.cov[head], torch.cov(joined[head].T, correction=0))
    torch.testing.assert_close(total.norm / total.n, joined.norm(dim=-1).mean(-1))


def test_axes_are_the_fewest_that_hold_the_share_of_variance_and_none_without_any():
    axes, along, kept = principal_axes(moments(0), 0.95)
    variance = torch.tensor([16.0, 9, 4, 1, 0.01, 1e-4])
    assert variance[:2].sum() < 0.95 * variance.sum() < variance[:3].sum()
    assert kept.tolist() == [3, 3]
    torch.testing.assert_close(along[:, :3], torch.tensor([[16.0, 9, 4]] * 2).double(), rtol=0.1, atol=0)
    assert not axes[..., 3:].any()
    o = outputs(100, 0)
    o[..., 3:] = 0
    assert principal_axes(OutputMoments.from_outputs(o), 1.0)[2].tolist() == [3, 3]


def test_no_drift_stays_at_the_noise_level_and_the_inside_is_at_none():
    drift, itself = (output_drift(halves(), beyond) for beyond in ((moments(2), moments(3)), halves()))
    assert (drift["frechet"] < 3 * drift["noise_level"]).all()
    for name, known in {"mahalanobis": 1.0, "norm_ratio": 1.0}.items():
        torch.testing.assert_close(drift[name], torch.full((2,), known).double(), rtol=0.05, atol=0)
        torch.testing.assert_close(itself[name], torch.full((2,), known).double())
    torch.testing.assert_close(itself["frechet"], itself["noise_level"])


@pytest.mark.parametrize("n", [12, 100])
def test_without_drift_distance_and_noise_are_equal_in_the_mean_at_any_sample_size(n):
    drawn = [[moments(4 * draw + half, n) for half in range(4)] for draw in range(200)]
    drifts = [output_drift((one, other), (beyond, further)) for one, other, beyond, further in drawn]
    frechet, noise = (torch.stack([one[name] for one in drifts]).mean(0) for name in ("frechet", "noise_level"))
    torch.testing.assert_close(frechet, noise, rtol=0.15, atol=0)


@pytest.mark.parametrize("change", [{"shift": 2.0}, {"stretch": 2.0}])
def test_a_shift_or_a_stretch_leaves_the_noise_level_far_behind(change):
    drift = output_drift(halves(), (moments(2, **change), moments(3, **change)))
    assert (drift["frechet"] > 50 * drift["noise_level"]).all()
    assert (drift["mahalanobis"] > 1.2).all()
    assert (drift["norm_ratio"] > 1.1).all()


def test_mahalanobis_is_the_root_mean_square_over_the_outputs():
    inside, beyond = halves(50), outputs(40, 3, shift=1.0)
    axes, along, _ = principal_axes(inside[0] + inside[1])
    away = (beyond - (inside[0] + inside[1]).mean[:, None]) @ axes[..., :3]
    expected = (away.square() / along[:, None, :3]).sum(-1).mean(-1)
    found = output_drift(inside, in_halves(beyond))
    torch.testing.assert_close(found["mahalanobis"], (expected / 3).sqrt())


def test_frechet_is_between_one_half_beyond_and_the_other_inside():
    inside, beyond = halves(60), outputs(40, 3, shift=1.0)
    variance = (inside[0] + inside[1]).cov[0].trace()

    def distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        stats = [x for o in (one, other) for x in (o[0].mean(0), torch.cov(o[0].T, correction=0))]
        return frechet_distance(*stats) / variance

    found = output_drift(inside, in_halves(beyond))
    expected = distance(outputs(60, 0), beyond[:, 1::2]), distance(outputs(60, 1), beyond[:, ::2])
    torch.testing.assert_close(found["frechet"][0], sum(expected) / 2)
    torch.testing.assert_close(found["noise_level"][0], distance(outputs(60, 0), outputs(60, 1)))


def test_entropy_and_normaliser_are_those_of_the_softmax_in_blocks_of_rows_too():
    scores = normal(2, 5, 5).masked_fill(~visible(5), -torch.inf)
    entropy, normaliser = entropy_and_normaliser(scores[:, 2:], scores.softmax(-1)[:, 2:])
    row = scores[1, 3, :4]
    torch.testing.assert_close(entropy[1, 1], torch.distributions.Categorical(logits=row).entropy())
    torch.testing.assert_close(normaliser[1, 1], row.exp().sum().log())


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), n=st.integers(3, 40), d=st.integers(2, 9))
def test_it_is_that_of_the_two_largest_eigenvalues_of_the_covariance(seed, n, d):
    inside, beyond = 5 + 3 / torch.arange(1, d + 1, dtype=torch.float64) * normal(2, n, d, seed=seed)
    values, vectors = torch.linalg.eigh(inside.T.cov(correction=0))
    plane = output_plane(inside)
    for axis in (0, 1):
        vector = vectors[:, -1 - axis]
        vector = vector * vector[vector.abs().argmax()].sign()
        expected = (beyond - inside.mean(0)) @ vector / values[-1 - axis].sqrt()
        torch.testing.assert_close(plane.coordinates(beyond)[:, axis], expected, rtol=1e-6, atol=1e-6)
    assert plane.share == pytest.approx(float(values[-2:].sum() / values.sum()))
    own = plane.coordinates(inside)
    torch.testing.assert_close(own.T.cov(correction=0), torch.eye(2).double(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(own.mean(0), torch.zeros(2).double(), rtol=0, atol=1e-9)


def test_outputs_on_a_line_have_one_coordinate():
    line = torch.tensor([[1.0, 2], [2, 4], [3, 6]])
    for outputs in (line, line[:, :1]):
        plane = output_plane(outputs)
        assert plane.share == pytest.approx(1)
        assert plane.coordinates(outputs)[:, 0].tolist() == pytest.approx([-math.sqrt(1.5), 0, math.sqrt(1.5)])
        assert plane.coordinates(outputs)[:, 1].isnan().all()


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6])
def test_outputs_that_do_not_vary_have_none(value):
    plane = output_plane(torch.full((7, 3), value))
    assert math.isnan(plane.share)
    assert plane.coordinates(torch.ones(2, 3)).isnan().all()
