"""Coupling of Jacobians: how nearly the top singular vectors of one diagonalise another, and the effect of width."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double
from tl_posgen.coupling.numbers.lanczos import Product, SingularTriplets, dense_triplets
from tl_posgen.errors import InputError
from tl_posgen.stats.correlations import pearson

Norm = Literal["frobenius", "trace"]
Side = Literal["aligned", "swapped", "chance"]
NORMS: dict[Norm, int] = {"frobenius": 2, "trace": 1}


def alignment(left: Float[Tensor, "*batch d k"], image: Float[Tensor, "*batch d k"]) -> Float[Tensor, "*batch k k"]:
    r"""A = U2' (J1 V2): the first Jacobian in the top-K singular bases of the second; for V2' J1 U2 give V2 and J1 U2.

    Source: Aubry, Meng, Sugolov and Papyan, arXiv 2407.07810 (definition).

    Example:
        >>> jacobian = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
        >>> basis = torch.eye(3)[:, :2]
        >>> alignment(basis, jacobian @ basis).tolist()
        [[3.0, 0.0], [0.0, 2.0]]
    """
    return left.mT @ image


def misalignment(
    aligned: Float[Tensor, "*batch k k"],
    values: Float[Tensor, "*#batch k"],
    norm: Norm = "frobenius",
    *,
    signed: bool = False,
) -> Float[Tensor, "*batch"]:
    r"""m_K = || |A| - diag(s) ||_F / ||s||_p with |A| elementwise; with `signed`, A instead of |A|.

    The signs of a left and a right singular vector are free only together, which leaves the diagonal of A unchanged.
    So |A| discards information: J2 = -J1 has a coupling 1 - m_K of 1 with |A| and of -1 with A.

    A is the first Jacobian in the bases of the second, s are the top singular values of the FIRST. "frobenius" is
    p = 2; "trace" is p = 1, for comparison with published figures only, as it falls with K like 1 / sqrt(K) for
    independent Jacobians. Zero where both share their top bases; not symmetric; NaN where the first Jacobian is zero.

    Source: arXiv 2407.07810: its printed formula is signed, the authors' code takes |A|. The warning is ours.

    Example:
        >>> values = torch.tensor([3.0, 2.0])
        >>> negative = -torch.diag(values)
        >>> misalignment(negative, values).item(), misalignment(negative, values, signed=True).item()
        (0.0, 2.0)
        >>> round(misalignment(torch.zeros(2, 2), values, "trace").item(), 3)  # sqrt(13) / 5
        0.721
    """
    difference = (aligned if signed else aligned.abs()) - torch.diag_embed(values)
    return difference.flatten(-2).norm(dim=-1) / values.norm(p=NORMS[norm], dim=-1)


def random_bases(
    d: int, k: int, count: int, generator: torch.Generator, dtype: torch.dtype = DOUBLE
) -> tuple[Float[Tensor, "count d k"], Float[Tensor, "count d k"]]:
    """Return pairs (U, V) of independent, uniformly distributed orthonormal k-frames of R^d.

    U' J V is distributed like the alignment of J with a Jacobian of independent singular bases and any spectrum: the
    chance level of J's coupling.
    """
    gaussian = torch.randn(2, count, d, k, generator=generator, dtype=DOUBLE)
    frames = torch.linalg.qr(gaussian)[0].to(dtype)
    return frames[0], frames[1]


@dataclass(frozen=True)
class Pairs:
    """Alignments of Jacobians J_a, a = first, in the top singular bases of every J_b, b = second."""

    aligned: Float[Tensor, "first second k k"]  # U_b' J_a V_b
    swapped: Float[Tensor, "first second k k"]  # V_b' J_a U_b
    chance: Float[Tensor, "first sample k k"]  # U' J_a V for random orthonormal U and V
    values: Float[Tensor, "first k"]  # top singular values of J_a

    def coupling(
        self, k: int, norm: Norm = "frobenius", side: Side = "aligned", *, signed: bool = False
    ) -> Float[Tensor, "first other"]:
        """1 - m_k of every pair, first k vectors: 1 for shared bases, about 0 (Frobenius) for independent ones."""
        return 1 - misalignment(getattr(self, side)[..., :k, :k], self.values[:, None, :k], norm, signed=signed)

    def negative_share(self, k: int) -> Float[Tensor, "first second"]:
        """Return the share of negative entries among the first k diagonal entries of A: 1/2 for independent bases."""
        return double(self.aligned.diagonal(dim1=-2, dim2=-1)[..., :k] < 0).mean(-1)


def every_pair(
    jacobians: Sequence[Product], triplets: Sequence[SingularTriplets], samples: int, generator: torch.Generator
) -> Pairs:
    """U_b' J_a V_b for all a and b, from one product per Jacobian: J_a [V_1 .. V_n, U_1 .. U_n, random frames].

    Jacobians are functions X -> J_a X; triplets are the k top ones of each.
    """
    left, right = (torch.stack([getattr(svd, side) for svd in triplets]) for side in ("left", "right"))
    n, d, k = left.shape
    random_left, random_right = (x.to(left.device) for x in random_bases(d, k, samples, generator, left.dtype))
    columns = rearrange(torch.cat([right, left, random_right]), "member d k -> d (member k)")
    left_of_columns, rows = torch.cat([left, right, random_left]), []
    for jacobian in jacobians:
        images = rearrange(jacobian(columns), "d (member k) -> member d k", k=k)
        rows.append(alignment(left_of_columns, images))
    aligned, swapped, chance = torch.stack(rows).split([n, n, samples], dim=1)
    return Pairs(aligned, swapped, chance, torch.stack([svd.values for svd in triplets]))


def off_diagonal_mean(matrix: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch"]:
    """Return the mean over ordered pairs of different members: the coupling of n Jacobians. NaN for n = 1."""
    n = matrix.shape[-1]
    return (matrix.sum(dim=(-2, -1)) - matrix.diagonal(dim1=-2, dim2=-1).sum(-1)) / (n * (n - 1) or torch.nan)


@dataclass(frozen=True)
class WidthAlone:
    """Coupling of independent Gaussian Jacobians of growing width, and R^2 of its line against 1 / sqrt(width).

    Norms are in the order of `NORMS`; R^2 is NaN for fewer than three widths.
    """

    coupling: Float[Tensor, "norm width"]
    k: Int[Tensor, " width"]
    r2: Float[Tensor, " norm"]


def width_alone(
    widths: Sequence[int], *, width_per_k: int = 8, members: int = 3, chance_samples: int = 5, seed: int = 0
) -> WidthAlone:
    """Return the coupling of `members` independent Gaussian Jacobians at each width d, with K = d / width_per_k.

    With trace normalisation it rises like 1 - 1/sqrt(K) towards 1; with Frobenius normalisation it stays near 0.

    Example:
        >>> frobenius, trace = width_alone([64, 256]).coupling
        >>> [round(one, 1) for one in trace.tolist()]
        [0.7, 0.8]
        >>> bool(frobenius.abs().max() < 0.06)
        True
    """
    generator = torch.Generator().manual_seed(seed)
    ks, by_width = [width // width_per_k for width in widths], []
    for width, k in zip(widths, ks, strict=True):
        if k < 1:
            raise InputError(f"width {width} with width_per_k {width_per_k} leaves no singular vector; give wider ones")
        jacobians = torch.randn(members, width, width, generator=generator)
        triplets = [dense_triplets(jacobian, k) for jacobian in jacobians]
        pairs = every_pair([jacobian.matmul for jacobian in jacobians], triplets, chance_samples, generator)
        by_width.append(torch.stack([double(off_diagonal_mean(pairs.coupling(k, norm))) for norm in NORMS]))
    couplings, inverse_root = torch.stack(by_width, 1), torch.tensor(widths, dtype=DOUBLE) ** -0.5
    r2 = pearson(inverse_root.expand_as(couplings), couplings) ** 2 if len(widths) > 2 else couplings[:, 0] * torch.nan
    return WidthAlone(couplings, torch.tensor(ks), r2)
