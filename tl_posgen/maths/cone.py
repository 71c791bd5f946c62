"""Why Q and K are almost of rank one: attention inputs lie on a cone, and W_Q, W_K project onto its axis."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.maths.rope import Rope, rotate
from tl_posgen.maths.slash import SlashStatistics, slash_statistics_from_qk
from tl_posgen.maths.spectra import rank_one, spectrum, top_direction


@dataclass(frozen=True)
class Cone:
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


def cone(inputs: Float[Tensor, "pos d_model"]) -> Cone:
    r"""cos_i = <h_i, u> / |h_i| with u the top right-singular vector of H, and r1(H). These measures are ours.

    Args:
        inputs: H, what enters W_Q and W_K: the residual stream after the layer's norm.

    Example:
        >>> found = cone(torch.tensor([[2.0, 0.1], [1.0, -0.1], [3.0, 0.0]]))
        >>> bool(found.cosine_mean > 0.99), bool(found.r1 > 0.99)
        (True, True)
    """
    h = inputs.double()
    axis = top_direction(h)
    cosine = torch.nn.functional.normalize(h, dim=-1) @ axis
    r1 = (h @ axis).square().sum() / h.square().sum()
    return Cone(axis, cosine, cosine.mean(), cosine.std(correction=0), r1)


def axis_projection(
    inputs: Float[Tensor, "pos d_model"],
    axis: Float[Tensor, " d_model"],
    weight: Float[Tensor, "head d_model d_head"],
) -> AxisProjection:
    r"""gain = |u'W| sqrt(d_model) / |W|_F, axis share = |H u u'W|^2 / |H W|^2, r1(HW), without any bias [ours].

    Args:
        inputs: H.
        axis: u = `cone(inputs).axis`.
        weight: W_Q or W_K.

    Example:
        >>> inputs = torch.tensor([[1.0, 0.1], [1.0, -0.1]])
        >>> found = axis_projection(inputs, cone(inputs).axis, weight=torch.tensor([[[1.0], [0.0]]]))
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


def slash_of_inputs(
    inputs: Float[Tensor, "pos d_model"],
    w_q: Float[Tensor, "head d_model d_head"],
    w_k: Float[Tensor, "key_head d_model d_head"],
    rope: Rope,
    scale: float,
    *,
    b_q: Float[Tensor, "head d_head"] | None = None,
    b_k: Float[Tensor, "key_head d_head"] | None = None,
    window: int | None = None,
) -> SlashStatistics:
    r"""Slash statistics of softmax(scale <R_i (W_Q' h_i + b_Q), R_j (W_K' h_j + b_K)>): give it H, then `axis_only(H)`.

    Query head h reads key head h // (heads / key heads). For a layer without qk-norm; with one, norm the projections
    yourself and call `slash_statistics_from_qk`.

    Example:
        >>> rope, w = Rope(torch.tensor([1.0], dtype=torch.float64)), torch.eye(2)[None]
        >>> h = torch.tensor([[1.0, 0.2], [1.0, -0.2], [1.0, 0.1]])
        >>> slash_of_inputs(axis_only(h), w, w, rope, scale=20.0).score[0].argmax().item()
        0
    """
    positions = torch.arange(len(inputs), device=inputs.device)
    q = rotate(projection_parts(inputs, w_q, b_q).total, positions, rope)
    k = rotate(projection_parts(inputs, w_k, b_k).total, positions, rope)
    k = k.repeat_interleave(len(w_q) // len(w_k), dim=0)
    return slash_statistics_from_qk(q, k, scale, window=window)
