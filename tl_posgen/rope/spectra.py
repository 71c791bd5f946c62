"""How near rank one a matrix is: shares of its first singular values, and its top right-singular vector."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double


class Spectrum(NamedTuple):
    """Singular values of a matrix, and where its largest points, of one decomposition; float64."""

    values: Float[Tensor, "*batch rank"]  # see `singular_values`
    top: Float[Tensor, "*batch column"]  # see `top_direction`


def spectrum(x: Float[Tensor, "*batch row column"]) -> Spectrum:
    """Return `singular_values` and `top_direction`.

    Example:
        >>> [one.tolist() for one in spectrum(torch.diag(torch.tensor([3.0, 4.0])))]
        [[4.0, 3.0], [0.0, 1.0]]
    """
    energies, directions = torch.linalg.eigh(_gram(x))
    return Spectrum(_roots(energies), _top(x, directions))


def rank_one_share(x: Float[Tensor, "*batch row column"]) -> Float[Tensor, "*batch"]:
    """r_1 = s_1^2 / sum s^2, s_1 >= s_2 >= .. the singular values: 1 for rank one, NaN of zeros.

    Example:
        >>> round(rank_one_share(torch.diag(torch.tensor([3.0, 4.0]))).item(), 6)
        0.64
    """
    return first_share(singular_values(x))


def first_share(s: Float[Tensor, "*batch rank"]) -> Float[Tensor, "*batch"]:
    """r_1 = s_1^2 / sum s^2 of singular values, the largest first."""
    energies = s**2
    return energies[..., 0] / energies.sum(-1)


def rank_of_share(s: Float[Tensor, "*batch rank"], share: float = 0.95) -> Int[Tensor, "*batch"]:
    """R_share = min{K: s_1^2 + .. + s_K^2 >= share * sum s^2} of singular values, the largest first; 0 of zeros.

    Example:
        >>> rank_of_share(torch.tensor([4.0, 3.0, 1.0])).item()
        2
    """
    energies = s**2
    total = energies.sum(-1, keepdim=True)
    short = energies.cumsum(-1) < share * (1 - 1e-12) * total  # a partial sum may round to just under the share
    return torch.where(total[..., 0] > 0, short.sum(-1) + 1, 0)


def singular_values(x: Float[Tensor, "*batch row column"]) -> Float[Tensor, "*batch rank"]:
    """s_1 >= s_2 >= ..., float64, by the eigenvalues of the smaller Gram matrix: s below about 1e-8 s_1 are noise."""
    return _roots(torch.linalg.eigvalsh(_gram(x)))


def top_direction(x: Float[Tensor, "*batch row column"]) -> Float[Tensor, "*batch column"]:
    r"""v_1 = argmax_{|v|=1} |X v|: the top right-singular vector, float64, signed so that sum_i (X v)_i >= 0."""
    return _top(x, torch.linalg.eigh(_gram(x)).eigenvectors)


def _roots(energies: Float[Tensor, "*batch rank"]) -> Float[Tensor, "*batch rank"]:
    """Return singular values, the largest first, of the eigenvalues of a Gram matrix."""
    return energies.clamp_min(0).sqrt().flip(-1)


def _top(
    x: Float[Tensor, "*batch row column"], directions: Float[Tensor, "*batch rank rank"]
) -> Float[Tensor, "*batch column"]:
    """Return the top right-singular vector of x, signed, of the eigenvectors of its Gram matrix."""
    x, top = double(x), directions[..., -1]
    if x.shape[-2] < x.shape[-1]:  # the smaller Gram matrix was X X', whose eigenvector is the left one
        top = (x.mT @ top[..., None])[..., 0]
    v = torch.nn.functional.normalize(top, dim=-1)
    along = (x @ v[..., None]).sum((-2, -1))
    return v * torch.where(along < 0, -1.0, 1.0)[..., None]


def rank_one(
    x: Float[Tensor, "*batch row column"], top: Float[Tensor, "*batch column"] | None = None
) -> Float[Tensor, "*batch row column"]:
    r"""X v_1 v_1': the best approximation of rank one, in the dtype of x; each row becomes its projection on v_1.

    Args:
        top: v_1, where it is known.
    """
    v = (top_direction(x) if top is None else top)[..., None]
    return (double(x) @ v @ v.mT).to(x.dtype)


def _gram(x: Tensor) -> Tensor:
    """Return X'X or XX', whichever is smaller."""
    x = double(x)
    return x.mT @ x if x.shape[-2] >= x.shape[-1] else x @ x.mT
