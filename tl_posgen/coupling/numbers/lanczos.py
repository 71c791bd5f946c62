"""Largest singular triplets of a matrix that is given only by its products with vectors."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class SingularTriplets:
    """J v_i = s_i u_i and J' u_i = s_i v_i, s descending."""

    left: Float[Tensor, "m k"]  # orthonormal columns u_i
    values: Float[Tensor, " k"]
    right: Float[Tensor, "n k"]  # orthonormal columns v_i
    left_residual: Float[Tensor, " k"]  # |J v_i - s_i u_i|, in the units of s
    right_residual: Float[Tensor, " k"]  # |J' u_i - s_i v_i|


def dense_triplets(matrix: Float[Tensor, "m n"], k: int) -> SingularTriplets:
    """J = U S V', cut to the k largest s, by LAPACK's singular value decomposition, with its residuals."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    left, values, right = left[:, :k], values[:k], right.mT[:, :k]
    left_residual = (matrix @ right - values * left).norm(dim=0)
    return SingularTriplets(left, values, right, left_residual, (matrix.mT @ left - values * right).norm(dim=0))


def lanczos_triplets(
    matvec: Product,
    rmatvec: Product,
    shape: tuple[int, int],
    k: int,
    *,
    block: int = 16,
    tolerance: float | None = None,
    seed: int = 0,
    dtype: torch.dtype = DOUBLE,
    device: torch.device | str = "cpu",
) -> SingularTriplets:
    r"""J V_j = U_j B_j, J' U_j = V_{j+1} C_j: block Golub-Kahan-Lanczos with full reorthogonalisation.

    V_1 = orth(J' Omega) with Omega Gaussian; U_j = orth(J V_j against all earlier U); V_{j+1} = orth(J' U_j against all
    earlier V). The small matrix U' J V is decomposed, and its triplets are mapped back by U and V. Power iteration with
    as many products is far from converged on flat spectra.

    Args:
        matvec, rmatvec: V [n, b] -> J V [m, b] and U [m, b] -> J' U [n, b], with block columns b.
        shape: (m, n).
        tolerance: stop when every residual of the k triplets is at most tolerance * s_1; 100 machine epsilons of
            dtype when not given. At the latest it stops when the basis spans the whole space.

    Source: Golub, Luk and Overton 1981 for the block method; full reorthogonalisation and the residuals taken from
    the stored products (no further product is needed) are ours.
    """
    m, n = shape
    if not 1 <= k <= min(m, n):
        raise ValueError(f"k = {k} triplets of a {m} x {n} matrix; choose 1 to {min(m, n)}")
    block = min(block, m, n)
    tolerance = tolerance or 100 * torch.finfo(dtype).eps
    omega = torch.randn(m, block, generator=torch.Generator().manual_seed(seed), dtype=dtype).to(device)
    left, right = omega.new_zeros(m, 0), omega.new_zeros(n, 0)
    images, back_images, start = left, right, rmatvec(omega)
    new, next_look = _orthonormal_against(start, right), k
    while True:
        image = matvec(new)
        new_left = _orthonormal_against(image, left)
        back_image = rmatvec(new_left)
        right, images = torch.cat([right, new], dim=1), torch.cat([images, image], dim=1)
        left, back_images = torch.cat([left, new_left], dim=1), torch.cat([back_images, back_image], dim=1)
        space_left = min(m, n) - right.shape[1]
        if not space_left or right.shape[1] >= next_look:
            # the triplets of the projection U (U' J V) V', with residuals from the stored J V and J' U
            p, values, q = torch.linalg.svd(left.mT @ images)
            p, values, q = p[:, :k], values[:k], q.mT[:, :k]
            u, v = left @ p, right @ q
            residuals = (images @ q - values * u).norm(dim=0), (back_images @ p - values * v).norm(dim=0)
            triplets = SingularTriplets(u, values, v, *residuals)
            worst = torch.maximum(triplets.left_residual, triplets.right_residual).max()
            if not space_left or bool(worst <= tolerance * triplets.values[0]):
                return triplets
            next_look = int(1.1 * right.shape[1])  # the small decomposition costs the cube of the basis
        new = _orthonormal_against(back_image, right)[:, :space_left]


def _orthonormal_against(columns: Tensor, basis: Tensor) -> Tensor:
    """Return orthonormal columns outside span(basis) that together with the basis span `columns`.

    Columns that lie inside span(basis), because the Krylov space is exhausted, are replaced by random directions.
    """
    scale = columns.norm(dim=0).max()
    columns = columns - basis @ (basis.mT @ columns)
    columns, triangle = torch.linalg.qr(columns)
    exhausted = triangle.diagonal().abs() <= 10 * torch.finfo(columns.dtype).eps * scale
    random = torch.randn(columns.shape, generator=torch.Generator().manual_seed(basis.shape[1]), dtype=columns.dtype)
    columns = torch.where(exhausted, random.to(columns.device), columns)
    for _ in range(2):  # one round of projection loses digits when little is left; two are enough
        columns = torch.linalg.qr(columns - basis @ (basis.mT @ columns))[0]
    return columns
