"""The principal plane of outputs against eigenvectors of their covariance, and outputs that do not vary."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.position.length.numbers.output_plane import output_plane


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), n=st.integers(3, 40), d=st.integers(2, 9))
def test_it_is_that_of_the_two_largest_eigenvalues_of_the_covariance(seed, n, d):
    generator = torch.Generator().manual_seed(seed)
    stretch = 3 / torch.arange(1, d + 1, dtype=torch.float64)
    inside, beyond = 5 + stretch * torch.randn(2, n, d, generator=generator, dtype=torch.float64)
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
