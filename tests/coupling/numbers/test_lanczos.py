"""Block Golub-Kahan-Lanczos against LAPACK and SciPy's PROPACK."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.linalg import LinearOperator, svds

from tl_posgen.coupling.numbers.lanczos import dense_triplets, lanczos_triplets


def matrix_with(values, m, n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.linalg.qr(torch.randn(size, len(values), generator=generator).double())[0] for size in (m, n))
    return (left * values) @ right.mT


def lanczos(matrix, k, **options):
    return lanczos_triplets(lambda v: matrix @ v, lambda u: matrix.mT @ u, tuple(matrix.shape), k, **options)


def assert_triplets(found, matrix, tolerance=1e-9):
    scale = float(matrix.norm()) or 1.0
    identity = torch.eye(len(found.values), dtype=matrix.dtype)
    torch.testing.assert_close(found.values, torch.linalg.svdvals(matrix)[: len(found.values)], atol=1e-9, rtol=1e-9)
    for basis in (found.left, found.right):
        torch.testing.assert_close(basis.mT @ basis, identity, atol=1e-10, rtol=0)
    assert (matrix @ found.right - found.values * found.left).norm() < tolerance * scale
    assert (matrix.mT @ found.left - found.values * found.right).norm() < tolerance * scale


@given(m=st.integers(1, 40), n=st.integers(1, 40), rank=st.integers(0, 40), block=st.integers(1, 7), data=st.data())
@settings(max_examples=60, deadline=None)
def test_agrees_with_lapack_for_every_shape_rank_and_block(m, n, rank, block, data):
    k = data.draw(st.integers(1, min(m, n)))
    matrix = matrix_with(torch.linspace(1, 0.1, min(rank, m, n)).double(), m, n)
    assert_triplets(lanczos(matrix, k, block=block), matrix)


@pytest.mark.parametrize(
    "values",
    [torch.linspace(1, 0.5, 300), 0.9 ** torch.arange(300), torch.ones(300), torch.arange(300, 0, -1).float() ** -0.5],
    ids=["flat", "geometric", "degenerate", "power"],
)
def test_agrees_with_lapack_for_every_shape_of_spectrum(values):
    matrix = matrix_with(values.double(), 300, 300)
    assert_triplets(lanczos(matrix, 10), matrix)


def test_agrees_with_propack():
    matrix = matrix_with(torch.linspace(1, 0, 120).double(), 150, 120)
    operator = LinearOperator(matrix.shape, matvec=lambda v: matrix.numpy() @ v, rmatvec=lambda u: matrix.numpy().T @ u)
    left, values, right = svds(operator, k=6, solver="propack", maxiter=120, rng=np.random.default_rng(0))
    order = np.argsort(-values)
    found = lanczos(matrix, 6)
    np.testing.assert_allclose(found.values, values[order], rtol=1e-9)
    for mine, theirs in ((found.left.numpy(), left[:, order]), (found.right.numpy(), right[order].T)):
        np.testing.assert_allclose(np.abs(np.sum(mine * theirs, axis=0)), 1, atol=1e-8)


def test_a_decaying_spectrum_needs_fewer_products_than_dimensions():
    matrix = matrix_with(0.9 ** torch.arange(400).double(), 400, 400)
    counted = [0]

    def multiply(v):
        counted[0] += v.shape[1]
        return matrix @ v

    def multiply_back(u):
        counted[0] += u.shape[1]
        return matrix.mT @ u

    found = lanczos_triplets(multiply, multiply_back, (400, 400), 8)
    assert counted[0] < 400
    assert_triplets(found, matrix)


def test_dense_triplets_come_with_small_residuals():
    matrix = torch.randn(30, 20, generator=torch.Generator().manual_seed(0)).double()
    found = dense_triplets(matrix, 7)
    assert_triplets(found, matrix)
    assert torch.maximum(found.left_residual, found.right_residual).max() < 1e-12


def test_float32_converges_to_its_own_precision():
    matrix = matrix_with(torch.linspace(1, 0, 200).double(), 200, 200).float()
    found = lanczos(matrix, 5, dtype=torch.float32)
    assert found.values.dtype == torch.float32
    assert torch.maximum(found.left_residual, found.right_residual).max() < 2e-5


@pytest.mark.parametrize("k", [0, 6])
def test_a_number_of_triplets_that_does_not_exist_is_refused(k):
    with pytest.raises(ValueError, match=f"k = {k} triplets of a 5 x 8 matrix"):
        lanczos(torch.ones(5, 8).double(), k)
