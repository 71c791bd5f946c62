"""Coupling: identical blocks, sign flips, random bases, and the batched pairs against a loop."""

import numpy as np
import pytest
import torch
from drawn import normal
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.coupling.numbers.lanczos import dense_triplets
from tl_posgen.coupling.numbers.overlap import (
    alignment,
    every_pair,
    misalignment,
    off_diagonal_mean,
    random_bases,
    width_alone,
)
from tl_posgen.errors import InputError


def pairs_of(jacobians, k, samples=4):
    triplets = [dense_triplets(jacobian, k) for jacobian in jacobians]
    return every_pair([j.matmul for j in jacobians], triplets, samples, torch.Generator().manual_seed(0))


@given(seed=st.integers(0, 100), k=st.integers(1, 6))
@settings(max_examples=15, deadline=None)
def test_identical_jacobians_have_no_misalignment(seed, k):
    jacobian = normal(6, 6, seed=seed)
    pairs = pairs_of([jacobian, jacobian], k)
    for norm in ("frobenius", "trace"):
        torch.testing.assert_close(pairs.coupling(k, norm), torch.ones(2, 2, dtype=torch.float64))


@given(seed=st.integers(0, 100), signs=st.lists(st.sampled_from([-1.0, 1.0]), min_size=4, max_size=4))
@settings(max_examples=15, deadline=None)
def test_joint_sign_flips_of_singular_vectors_leave_misalignment_unchanged(seed, signs):
    first, second = normal(2, 7, 7, seed=seed)
    found, flip = dense_triplets(second, 4), torch.tensor(signs, dtype=torch.float64)
    values = dense_triplets(first, 4).values
    for signed in (False, True):
        plain = misalignment(alignment(found.left, first @ found.right), values, signed=signed)
        flipped = misalignment(alignment(found.left * flip, first @ (found.right * flip)), values, signed=signed)
        torch.testing.assert_close(plain, flipped)


def test_the_chance_line_agrees_with_independent_jacobians_of_the_same_spectrum():
    spectrum = torch.diag(0.9 ** torch.arange(64, dtype=torch.float64))
    left, right = random_bases(64, 64, 12, torch.Generator().manual_seed(3))
    pairs = pairs_of(left @ spectrum @ right.mT, k=5, samples=40)
    independent = off_diagonal_mean(pairs.coupling(5))
    assert pairs.coupling(5, side="chance").mean().item() == pytest.approx(independent.item(), abs=0.01)


def test_pairs_equal_the_formula_pair_by_pair():
    jacobians = normal(3, 9, 9)
    pairs = pairs_of(jacobians, k=4)
    for a, first in enumerate(jacobians):
        values = torch.linalg.svdvals(first)[:2]
        for b, second in enumerate(jacobians):
            u, _, vh = torch.linalg.svd(second)
            aligned, swapped = u[:, :2].mT @ first @ vh[:2].mT, vh[:2] @ first @ u[:, :2]
            for of, matrix in (("aligned", aligned), ("swapped", swapped)):
                distance = torch.linalg.matrix_norm(matrix.abs() - torch.diag(values))
                signed = torch.linalg.matrix_norm(matrix - torch.diag(values)) / values.norm()
                torch.testing.assert_close(pairs.coupling(2, side=of, signed=True)[a, b], 1 - signed)
                for norm, size in (("frobenius", values.square().sum().sqrt()), ("trace", values.sum())):
                    torch.testing.assert_close(pairs.coupling(2, norm, of)[a, b], 1 - distance / size)


def test_swapped_and_plain_coupling_differ_but_for_symmetric_jacobians():
    square = normal(2, 8, 8)
    pairs, found = pairs_of(square @ square.mT, k=3), pairs_of(square, k=3).coupling(3)
    torch.testing.assert_close(pairs.coupling(3), pairs.coupling(3, side="swapped"))
    assert (found[0, 1] - found[1, 0]).abs() > 1e-3


def test_random_bases_are_orthonormal_and_leave_the_global_generator_alone():
    state = torch.random.get_rng_state()
    for frames in random_bases(10, 4, 3, torch.Generator().manual_seed(0)):
        torch.testing.assert_close(frames.mT @ frames, torch.eye(4, dtype=torch.float64).expand(3, 4, 4))
    assert torch.equal(state, torch.random.get_rng_state())


def test_the_mean_over_different_members_leaves_the_diagonal_out():
    assert off_diagonal_mean(torch.tensor([[9.0, 1.0], [3.0, 9.0]])) == 2
    assert off_diagonal_mean(torch.ones(1, 1)).isnan()


def test_random_jacobians_alone_make_the_trace_version_rise_with_width():
    """Like 1 - 1/sqrt(K), and leave the Frobenius version near zero."""
    found = width_alone([64, 128, 256], members=2)
    frobenius, trace = found.coupling.numpy()
    assert found.r2[1] > 0.99
    lines = [np.corrcoef(np.array([64.0, 128, 256]) ** -0.5, row)[0, 1] ** 2 for row in (frobenius, trace)]
    np.testing.assert_allclose(found.r2, lines, rtol=1e-12)
    assert found.k.tolist() == [8, 16, 32]
    np.testing.assert_allclose(trace, 1 - (np.array([64, 128, 256]) / 8) ** -0.5, atol=0.03)
    assert np.abs(frobenius).max() < 0.06


def test_random_jacobians_are_those_of_their_seed_and_their_line_needs_three_widths():
    first, again, other = (width_alone([16, 24], **seed) for seed in ({}, {"seed": 0}, {"seed": 1}))
    assert torch.equal(first.coupling, again.coupling)
    assert not torch.equal(first.coupling, other.coupling)
    assert first.r2.isnan().all()
    with pytest.raises(InputError, match="width 4 with width_per_k 8"):
        width_alone([4])
