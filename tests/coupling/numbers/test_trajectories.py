"""Trajectories whose straightness, growth and plane are known."""

import math

import numpy as np
import pytest
import torch
from drawn import normal
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.coupling.numbers.trajectories import expodistance, growth_fit, line_shape_score, principal_trajectories


@given(steps=st.lists(st.floats(0.1, 10), min_size=1, max_size=12))
def test_a_straight_line_scores_one_whatever_its_step_sizes(steps):
    length = torch.tensor([0.0, *steps]).double().cumsum(0)
    path = normal(5) + length[:, None] * normal(5, seed=1)
    assert line_shape_score(path).item() == pytest.approx(1)


@given(sizes=st.lists(st.floats(0.1, 10), min_size=1, max_size=12))
def test_orthogonal_steps_score_the_root_of_their_number(sizes):
    path = torch.cat([torch.zeros(1, len(sizes)), torch.diag(torch.tensor(sizes))]).cumsum(0)
    assert line_shape_score(path).item() == pytest.approx(math.sqrt(len(sizes)))


@given(seed=st.integers(0, 1000), n=st.integers(1, 10))
@settings(deadline=None)
def test_the_line_shape_score_is_at_least_one(seed, n):
    assert line_shape_score(normal(n + 1, 4, seed=seed)) >= 1 - 1e-12


@given(rate=st.floats(0.01, 0.5), n=st.integers(2, 12))
def test_exponential_growth_has_expodistance_zero_and_fits_perfectly(rate, n):
    path = torch.exp(rate * torch.arange(n + 1).double())[:, None] * torch.ones(n + 1, 3)
    fit = growth_fit(path)
    assert expodistance(path).item() == pytest.approx(0, abs=1e-20)
    assert fit.slope.item() == pytest.approx(rate)
    assert fit.r2.item() == pytest.approx(1)
    assert fit.intercept.item() == pytest.approx(math.log(math.sqrt(3)))


def test_expodistance_is_of_the_variance_of_growth_rates_and_the_growth_fit_is_the_least_squares_line():
    path = normal(9, 4, seed=3)
    logs = path.norm(dim=-1).log().numpy()
    rates = np.diff(logs)
    assert expodistance(path).item() == pytest.approx(rates.var() / rates.mean() ** 2)
    slope, intercept = np.polyfit(np.arange(9), logs, 1)
    fit = growth_fit(path)
    assert fit.slope.item() == pytest.approx(slope)
    assert fit.intercept.item() == pytest.approx(intercept)
    assert fit.r2.item() == pytest.approx(np.corrcoef(np.arange(9), logs)[0, 1] ** 2)


@pytest.mark.parametrize(
    "measure", [line_shape_score, expodistance, lambda x: growth_fit(x).slope, lambda x: growth_fit(x).r2]
)
def test_scale_leaves_a_number_alone_and_a_batch_gives_that_of_each_path(measure):
    paths = normal(3, 6, 4)
    torch.testing.assert_close(measure(7 * paths), measure(paths))
    torch.testing.assert_close(measure(paths), torch.stack([measure(path) for path in paths]))


def test_principal_coordinates_keep_the_distances_of_a_planar_set():
    plane = torch.linalg.qr(normal(8, 2))[0]
    paths = normal(4, 5, 2, seed=1) @ plane.mT + normal(8, seed=2)
    found = principal_trajectories(paths)
    torch.testing.assert_close(
        torch.cdist(found.coordinates.flatten(0, 1), found.coordinates.flatten(0, 1)),
        torch.cdist(paths.flatten(0, 1), paths.flatten(0, 1)),
    )
    assert found.explained.sum().item() == pytest.approx(1)
