"""Plane in which a layer's outputs vary most inside the training length, and coordinates of outputs in it."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import double

NOTHING = 1e-6  # a spread below this share of the outputs' size is rounding


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
    found = vectors[:2]
    signs = found.gather(1, found.abs().argmax(1, keepdim=True)).sign()
    axes[:, : len(found)] = (signs * found).mT
    spread[: len(found)] = values[:2] / len(inside) ** 0.5
    spread = spread.masked_fill(spread <= NOTHING * inside.square().sum(1).mean().sqrt(), 0)
    variance = values.square()
    share = float(variance[:2].sum() / variance.sum()) if spread.any() else float("nan")
    return OutputPlane(mean, axes, spread, share)
