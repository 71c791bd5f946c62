"""Drift of a head's output vectors from their distribution inside the training length; entropy of its attention."""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Real
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double

NOTHING = 1e-6  # a spread below this share of the outputs' size is rounding


@dataclass(frozen=True)
class OutputMoments:
    """Sums over output vectors o of every head, float64; the sums of prompts add up: `a + b`."""

    n: int
    total: Float[Tensor, "head d_head"]
    outer: Float[Tensor, "head d_head d_head"]
    norm: Float[Tensor, " head"]

    @classmethod
    def from_outputs(cls, o: Float[Tensor, "head sample d_head"]) -> "OutputMoments":
        o = double(o)
        return cls(o.shape[1], o.sum(1), o.mT @ o, o.norm(dim=-1).sum(-1))

    def __add__(self, other: "OutputMoments") -> "OutputMoments":
        return OutputMoments(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def mean(self) -> Float[Tensor, "head d_head"]:
        return self.total / self.n

    @property
    def cov(self) -> Float[Tensor, "head d_head d_head"]:
        return self.outer / self.n - self.mean[..., :, None] * self.mean[..., None, :]


def principal_axes(
    inside: OutputMoments, share: int | float = 0.95
) -> tuple[Float[Tensor, "head d_head axis"], Float[Tensor, "head axis"], Real[Tensor, " head"]]:
    """Return directions in which outputs vary inside, the largest variance first, the variance along each, and how many
    are kept: the fewest with `share` of the variance; the others are 0.

    Axes with less than 1e-10 of the largest variance are left out, since their variance is a divisor.
    """
    values, vectors = (x.flip(-1) for x in torch.linalg.eigh(inside.cov))
    values = values.clamp(min=0)
    before = values.cumsum(-1) - values
    keep = (before < share * values.sum(-1, keepdim=True)) & (values > 1e-10 * values[..., :1])
    return vectors * keep[:, None], values * keep, keep.sum(-1)


def frechet_distance(
    mean_1: Float[Tensor, "*batch d"],
    cov_1: Float[Tensor, "*batch d d"],
    mean_2: Float[Tensor, "*batch d"],
    cov_2: Float[Tensor, "*batch d d"],
) -> Float[Tensor, "*batch"]:
    r"""|m1 - m2|^2 + tr(C1 + C2 - 2 (C1^1/2 C2 C1^1/2)^1/2): the squared 2-Wasserstein distance of two Gaussians.

    Matrix roots are by eigendecomposition, which is exact for singular covariances too.

    Source: Dowson & Landau 1982; used for neural features by Heusel et al. 2017.

    Example:
        >>> one, eye = torch.zeros(2).double(), torch.eye(2).double()
        >>> round(frechet_distance(one, eye, one + 1, 4 * eye).item(), 9)  # 2 from the means, 2 (2 - 1)^2
        4.0
    """
    values, vectors = torch.linalg.eigh(cov_1)
    root = (vectors * values.clamp(min=0).sqrt()[..., None, :]) @ vectors.mT
    cross = torch.linalg.eigvalsh(root @ cov_2 @ root).clamp(min=0).sqrt().sum(-1)
    traces = (cov_1 + cov_2).diagonal(dim1=-2, dim2=-1).sum(-1)
    return ((mean_1 - mean_2).square().sum(-1) + traces - 2 * cross).clamp(min=0)


def output_drift(
    halves: tuple[OutputMoments, OutputMoments], beyond_halves: tuple[OutputMoments, OutputMoments]
) -> dict[str, Float[Tensor, " head"]]:
    """Return the drift of the outputs beyond from those inside, each as two halves of the prompts.

    frechet: Frechet distance between the Gaussian of one half beyond and that of the other half inside, over the
    variance inside, mean of both ways; noise_level: that between the two halves inside. mahalanobis: root mean square
    Mahalanobis distance beyond over that inside (the root of the number of axes), along the principal axes inside.
    norm_ratio: mean |o| beyond over that inside.

    A Frechet distance between samples grows as they shrink, and neighbouring positions of one prompt are similar: both
    distances compare as many prompts of one half with as many of the other, in all directions, so that without drift
    they are equal in expectation at any number of prompts.

    Source: Han & Ji 2025 for the claim that outputs stay in their training distribution; these measures are ours.
    """
    inside, beyond = halves[0] + halves[1], beyond_halves[0] + beyond_halves[1]
    axes, along, n_axes = principal_axes(inside)
    variance, away = inside.cov.diagonal(dim1=-2, dim2=-1).sum(-1), beyond.mean - inside.mean
    square = beyond.cov + away[..., :, None] * away[..., None, :]
    square_along = (axes.mT @ square @ axes).diagonal(dim1=-2, dim2=-1)
    inverse = torch.where(along > 0, 1 / along, 0.0)

    def between(first: OutputMoments, second: OutputMoments) -> Float[Tensor, " head"]:
        return frechet_distance(first.mean, first.cov, second.mean, second.cov) / variance

    return {
        "frechet": (between(halves[1], beyond_halves[0]) + between(halves[0], beyond_halves[1])) / 2,
        "noise_level": between(*halves),
        "mahalanobis": ((square_along * inverse).sum(-1) / n_axes).sqrt(),
        "norm_ratio": (beyond.norm / beyond.n) / (inside.norm / inside.n),
    }


def entropy_and_normaliser(
    scores: Float[Tensor, "head query key"], pattern: Float[Tensor, "head query key"]
) -> tuple[Float[Tensor, "head query"], Float[Tensor, "head query"]]:
    """H_i = -sum_j p_ij ln p_ij in nats and Z_i = ln sum_j exp(score_ij), for a block of queries and all their keys.

    Entries outside the mask are -inf in the scores and 0 in the pattern.

    Example:
        >>> entropy, normaliser = entropy_and_normaliser(torch.zeros(1, 1, 4), torch.full((1, 1, 4), 0.25))
        >>> round(entropy.exp().item(), 6), round(normaliser.exp().item(), 6)
        (4.0, 4.0)
    """
    entropy = torch.special.entr(pattern).sum(-1, dtype=DOUBLE)
    # p = exp(score - Z), so Z = max score - ln max p needs no further exponential
    return entropy, double(scores.amax(-1)) - double(pattern.amax(-1)).log()


@dataclass(frozen=True)
class OutputPlane:
    """First two principal components of outputs.

    Attributes:
        mean: mean output.
        axes: unit columns v_1, v_2, the largest variance first, the largest entry of each positive.
        spread: standard deviation along each axis; 0 where the outputs do not vary along it.
        share: share of the outputs' variance in the plane; NaN for outputs that do not vary.
    """

    mean: Float[Tensor, " d"]
    axes: Float[Tensor, "d axis=2"]
    spread: Float[Tensor, " axis=2"]
    share: float

    def coordinates(self, o: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch axis=2"]:
        """<o - mean, v_a> / spread_a in float64, in standard deviations inside; NaN along an axis without spread."""
        along = (double(o) - self.mean) @ self.axes
        return torch.where(self.spread > 0, along / self.spread, torch.nan)


def output_plane(inside: Float[Tensor, "sample d"]) -> OutputPlane:
    """sum_s (o_s - mean)(o_s - mean)' / n = V diag(variance) V', by singular values: memory grows with d, not d^2.

    Source: our reconstruction of a figure of Han & Ji 2025 (arXiv 2503.13305), whose choice of layers, positions and
    axes is not known.

    Example:
        >>> plane = output_plane(torch.tensor([[0.0, 1, 0], [0, 5, 0], [1, 3, 0], [-1, 3, 0]]))
        >>> plane.axes.abs().round(decimals=6).T.tolist(), plane.share
        ([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]], 1.0)
        >>> plane.coordinates(torch.tensor([0.0, 3 + 8**0.5, 9])).round(decimals=6).tolist()
        [2.0, 0.0]
    """
    inside = double(inside)
    mean = inside.mean(0)
    _, values, vectors = torch.linalg.svd(inside - mean, full_matrices=False)
    spread, axes = values.new_zeros(2), vectors.new_zeros(inside.shape[1], 2)
    components = vectors[:2]
    signs = components.gather(1, components.abs().argmax(1, keepdim=True)).sign()
    axes[:, : len(components)] = (signs * components).mT
    spread[: len(components)] = values[:2] / len(inside) ** 0.5
    spread = spread.masked_fill(spread <= NOTHING * inside.square().sum(1).mean().sqrt(), 0)
    variance = values.square()
    share = float(variance[:2].sum() / variance.sum()) if spread.any() else float("nan")
    return OutputPlane(mean, axes, spread, share)
