"""Why Q and K are almost of rank one: attention inputs lie on a cone, and W_Q, W_K project onto its axis."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.rope.spectra import rank_one, spectrum, top_direction


@dataclass(frozen=True)
class ConeFit:
    """The cone that the rows h_i of H lie on: u = argmax |H u|, signed so that sum_i <h_i, u> >= 0.

    Attributes:
        axis: u, of length one.
        cosine: <h_i, u> / |h_i| of each input.
        cosine_mean, cosine_std: its mean and spread over the inputs.
        r1: s_1^2 / sum s^2 of H, not centred.
    """

    axis: Float[Tensor, " d_model"]
    cosine: Float[Tensor, " pos"]
    cosine_mean: Float[Tensor, ""]
    cosine_std: Float[Tensor, ""]
    r1: Float[Tensor, ""]


@dataclass(frozen=True)
class AxisProjection:
    """What a projection Q = H W does with the axis u of H, per head.

    Attributes:
        gain: |u' W| / (|W|_F / sqrt(d_model)): the axis' gain over that of a random direction. 1 = no preference.
        axis_share: |H u u' W|^2 / |H W|^2, the share of Q's energy from the axis part; the two parts are orthogonal.
        r1: s_1^2 / sum s^2 of Q, not centred; beside r1 of H it says how much the projection adds.
    """

    gain: Float[Tensor, " head"]
    axis_share: Float[Tensor, " head"]
    r1: Float[Tensor, " head"]


@dataclass(frozen=True)
class ProjectionParts:
    """Q = input + bias, row by row. A bias alone is of rank one: where it is large, the sum's low rank says little.

    Attributes:
        input: H W.
        bias: the same bias in each row; zero where the projection has none.
        total: their sum.
        bias_share: |bias|^2 / (|input|^2 + |bias|^2), per head.
    """

    input: Float[Tensor, "head pos d_head"]
    bias: Float[Tensor, "head pos d_head"]
    total: Float[Tensor, "head pos d_head"]
    bias_share: Float[Tensor, " head"]


def fit_cone(inputs: Float[Tensor, "pos d_model"]) -> ConeFit:
    r"""cos_i = <h_i, u> / |h_i| with u the top right-singular vector of H, and r1(H). These measures are ours.

    Args:
        inputs: H, what enters W_Q and W_K: the residual stream after the layer's norm.

    Example:
        >>> found = fit_cone(torch.tensor([[2.0, 0.1], [1.0, -0.1], [3.0, 0.0]]))
        >>> bool(found.cosine_mean > 0.99), bool(found.r1 > 0.99)
        (True, True)
    """
    h = inputs.double()
    axis = top_direction(h)
    cosine = torch.nn.functional.normalize(h, dim=-1) @ axis
    r1 = (h @ axis).square().sum() / h.square().sum()
    return ConeFit(axis, cosine, cosine.mean(), cosine.std(correction=0), r1)


def axis_projection(
    inputs: Float[Tensor, "pos d_model"],
    axis: Float[Tensor, " d_model"],
    weight: Float[Tensor, "head d_model d_head"],
) -> AxisProjection:
    r"""gain = |u'W| sqrt(d_model) / |W|_F, axis share = |H u u'W|^2 / |H W|^2, r1(HW), without any bias [ours].

    Args:
        inputs: H.
        axis: u = `fit_cone(inputs).axis`.
        weight: W_Q or W_K.

    Example:
        >>> inputs = torch.tensor([[1.0, 0.1], [1.0, -0.1]])
        >>> found = axis_projection(inputs, fit_cone(inputs).axis, weight=torch.tensor([[[1.0], [0.0]]]))
        >>> round(found.axis_share.item(), 6), round(found.gain.item(), 3)
        (1.0, 1.414)
    """
    h, w = inputs.double(), weight.double()
    along = torch.einsum("m,hmd->hd", axis, w).norm(dim=-1)
    projected = h @ w
    share = along**2 * (h @ axis).norm() ** 2 / projected.square().sum((-2, -1))
    return AxisProjection(along * w.shape[1] ** 0.5 / w.norm(dim=(-2, -1)), share, spectrum(projected).r1)


def projection_parts(
    inputs: Float[Tensor, "pos d_model"],
    weight: Float[Tensor, "head d_model d_head"],
    bias: Float[Tensor, "head d_head"] | None = None,
) -> ProjectionParts:
    """H W, the bias in every row, and their sum: take `spectrum` of each to see what the bias gives for free."""
    part = (inputs.to(weight.dtype) @ weight).double()
    constant = torch.zeros_like(part) if bias is None else bias.double()[:, None].expand_as(part)
    energy, free = part.square().sum((-2, -1)), constant.square().sum((-2, -1))
    return ProjectionParts(part, constant, part + constant, free / (energy + free))


def axis_only(inputs: Float[Tensor, "pos d_model"]) -> Float[Tensor, "pos d_model"]:
    r"""h_i -> <h_i, u> u: only what lies along the axis of the cone, for the counterfactual [ours]."""
    return rank_one(inputs)
