"""Effective number of directions of a matrix: measures of its singular values, and its top right-singular vector."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double

SHARE = 0.95  # of the sum, which the rank holds


@dataclass(frozen=True)
class Spectrum:
    """Rank measures of the singular values s_1 >= s_2 >= ... of a matrix. A zero matrix has NaN (and rank 0).

    Attributes:
        r1: share of the first, s_1^2 / sum s^2 (or s_1 / sum s), in (0, 1]; 1 for rank one.
        rank: R_95, the least number of leading values that hold 95 % of the sum.
        effective_rank: exp of the entropy of the shares.
        participation_ratio: 1 / sum of the squared shares.
    """

    r1: Float[Tensor, "*batch"]
    rank: Int[Tensor, "*batch"]
    effective_rank: Float[Tensor, "*batch"]
    participation_ratio: Float[Tensor, "*batch"]


def spectrum(x: Float[Tensor, "*batch row column"]) -> Spectrum:
    """Return the rank measures of each matrix, of its energy: rows, such as one per token, and any leading axes.

    Example:
        >>> found = spectrum(torch.diag(torch.tensor([3.0, 4.0])))
        >>> round(found.r1.item(), 6), found.rank.item()
        (0.64, 2)
    """
    return spectrum_of_values(singular_values(x))


def spectrum_of_values(values: Float[Tensor, "*batch rank"], *, squared: bool = True) -> Spectrum:
    r"""r1 = p_1, R_95 = min{K: p_1 + .. + p_K >= .95}, effective rank exp(-sum p ln p), participation 1 / sum p^2.

    p_k = s_k^2 / sum s^2 (energy) of singular values s_k given largest first; or s_k / sum s, as in the effective rank
    of Roy & Vetterli (2007).
    """
    weights = double(values) ** 2 if squared else double(values)
    total = weights.sum(-1, keepdim=True)
    p = weights / total
    short = p.cumsum(-1) < SHARE * (1 - 1e-12)  # a partial sum may round to just under the share
    return Spectrum(
        r1=p[..., 0],
        rank=torch.where(total[..., 0] > 0, short.sum(-1) + 1, 0),
        effective_rank=torch.special.entr(p).sum(-1).exp(),
        participation_ratio=1 / (p**2).sum(-1),
    )


def singular_values(x: Float[Tensor, "*batch row column"]) -> Float[Tensor, "*batch rank"]:
    """s_1 >= s_2 >= ..., float64, by the eigenvalues of the smaller Gram matrix: s below about 1e-8 s_1 are noise."""
    return torch.linalg.eigvalsh(_gram(x)).clamp_min(0).sqrt().flip(-1)


def top_direction(x: Float[Tensor, "*batch row column"]) -> Float[Tensor, "*batch column"]:
    r"""v_1 = argmax_{|v|=1} |X v|: the top right-singular vector, float64, signed so that sum_i (X v)_i >= 0."""
    x = double(x)
    top = torch.linalg.eigh(_gram(x)).eigenvectors[..., -1]
    if x.shape[-2] < x.shape[-1]:  # the smaller Gram matrix was X X', whose eigenvector is the left one
        top = (x.mT @ top[..., None])[..., 0]
    v = torch.nn.functional.normalize(top, dim=-1)
    along = (x @ v[..., None]).sum((-2, -1))
    return v * torch.where(along < 0, -1.0, 1.0)[..., None]


def rank_one(x: Float[Tensor, "*batch row column"]) -> Float[Tensor, "*batch row column"]:
    r"""X v_1 v_1': the best approximation of rank one, in the dtype of x; each row becomes its projection on v_1."""
    v = top_direction(x)[..., None]
    return (double(x) @ v @ v.mT).to(x.dtype)


def _gram(x: Tensor) -> Tensor:
    """Return X'X or XX', whichever is smaller."""
    x = double(x)
    return x.mT @ x if x.shape[-2] >= x.shape[-1] else x @ x.mT
