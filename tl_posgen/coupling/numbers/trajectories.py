"""Path of a token through the residual stream: its straightness, the growth of its norm, its principal plane."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import double


def line_shape_score(streams: Float[Tensor, "*batch state d_model"]) -> Float[Tensor, "*batch"]:
    """LSS = L / || sum_l unit(x^l - x^{l-1}) ||: 1 for a straight line, sqrt(L) for steps at right angles.

    In float64; infinite for a closed loop of equal steps, NaN where a step is zero.

    Source: Aubry, Meng, Sugolov and Papyan, arXiv 2407.07810.
    """
    steps = double(streams).diff(dim=-2)
    return steps.shape[-2] / (steps / steps.norm(dim=-1, keepdim=True)).sum(dim=-2).norm(dim=-1)


def expodistance(streams: Float[Tensor, "*batch state d_model"]) -> Float[Tensor, "*batch"]:
    """ED = Var_l(alpha) / mean_l(alpha)^2 with alpha^l = ln(|x^l| / |x^{l-1}|): 0 for exactly exponential growth.

    Large where the norm hardly grows, as the mean is then near 0; `growth_fit` does not have that weakness.

    Source: arXiv 2407.07810, the formula from memory of the authors' code.
    """
    rates = double(streams).norm(dim=-1).log().diff(dim=-1)
    return rates.var(dim=-1, unbiased=False) / rates.mean(dim=-1) ** 2


@dataclass(frozen=True)
class GrowthFit:
    """ln |x^l| ~ intercept + slope l, by least squares; r2 is NaN where the norm is constant."""

    slope: Float[Tensor, "*batch"]
    intercept: Float[Tensor, "*batch"]
    r2: Float[Tensor, "*batch"]


def growth_fit(streams: Float[Tensor, "*batch state d_model"]) -> GrowthFit:
    """slope = Cov_l(l, ln |x^l|) / Var_l(l) over l = 0 .. L, and R^2, in float64."""
    logs = double(streams).norm(dim=-1).log()
    layer = torch.arange(logs.shape[-1], dtype=logs.dtype, device=logs.device)
    centred_layer, mean = layer - layer.mean(), logs.mean(dim=-1)
    centred = logs - mean[..., None]
    slope = centred @ centred_layer / centred_layer.square().sum()
    r2 = slope.square() * centred_layer.square().sum() / centred.square().sum(dim=-1)
    return GrowthFit(slope, mean - slope * layer.mean(), r2)


@dataclass(frozen=True)
class Principal:
    """Residual streams in the plane that explains most of their variance, the origin at their mean."""

    coordinates: Float[Tensor, "token state component"]
    explained: Float[Tensor, " component"]


def principal_trajectories(streams: Float[Tensor, "token state d_model"]) -> Principal:
    """x = mean + V c: coordinates c along the two top right singular vectors of all states of all tokens, mean removed.

    The sign of each component makes its largest |coordinate| positive. In float64.
    """
    states = double(streams).flatten(0, 1)
    left, values, _ = torch.linalg.svd(states - states.mean(dim=0), full_matrices=False)
    coordinates = left[:, :2] * values[:2]
    largest = coordinates.gather(0, coordinates.abs().argmax(dim=0, keepdim=True))
    coordinates = coordinates * torch.where(largest < 0, -1.0, 1.0)
    return Principal(coordinates.reshape(*streams.shape[:2], -1), values[:2] ** 2 / values.square().sum())
