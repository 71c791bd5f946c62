"""Cone of the attention inputs, whose axis W_Q and W_K amplify, so that Q and K are nearly of rank one."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.rope.spectra import rank_one_share, top_direction


@dataclass(frozen=True)
class ConeFit:
    """Cone of the rows h_i of H, with the axis u = argmax |H u|, signed so that sum_i <h_i, u> >= 0.

    Attributes:
        axis: u, of length one.
        cosine: <h_i, u> / |h_i| of each input.
        r1: s_1^2 / sum s^2 of H, not centred.
    """

    axis: Float[Tensor, " d_model"]
    cosine: Float[Tensor, " pos"]
    r1: Float[Tensor, ""]


@dataclass(frozen=True)
class AxisProjection:
    """Effect of a projection H W + b on the axis u of H, per head, and the part of its bias.

    Attributes:
        gain: of the axis over that of a random direction; 1 is no preference.
        r1_input: s_1^2 / sum s^2 of H W, not centred; its excess over r1 of H is due to the projection.
        bias_share: |b|^2 / (|H W|^2 + |b|^2), b in every row; 0 without a bias. A bias alone has rank one, so r1 of
            H W + b says nothing where b is large.
    """

    gain: Float[Tensor, " head"]
    r1_input: Float[Tensor, " head"]
    bias_share: Float[Tensor, " head"]


def fit_cone(inputs: Float[Tensor, "pos d_model"]) -> ConeFit:
    """cos_i = <h_i, u> / |h_i|, u the top right-singular vector of H, the inputs of W_Q and W_K; and r1(H) [ours]."""
    h = double(inputs)
    axis = top_direction(h)
    cosine = torch.nn.functional.normalize(h, dim=-1) @ axis
    return ConeFit(axis, cosine, (h @ axis).square().sum() / h.square().sum())


def axis_projection(
    inputs: Float[Tensor, "pos d_model"],
    axis: Float[Tensor, " d_model"],
    weight: Float[Tensor, "head d_model d_head"],
    bias: Float[Tensor, "head d_head"] | None = None,
) -> AxisProjection:
    r"""gain = |u'W| sqrt(d_model) / |W|_F, r1 of H W, and the share of b in the energy of H W + b [ours].

    H are the inputs, u their axis, W and b the weight and bias of W_Q or W_K.
    """
    h, w = double(inputs), double(weight)
    along = torch.einsum("m,hmd->hd", axis, w).norm(dim=-1)
    projected = h @ w
    constant = torch.zeros_like(projected) if bias is None else double(bias)[:, None].expand_as(projected)
    energy, free = (part.square().sum((-2, -1)) for part in (projected, constant))
    return AxisProjection(
        gain=along * w.shape[1] ** 0.5 / w.norm(dim=(-2, -1)),
        r1_input=rank_one_share(projected),
        bias_share=free / (energy + free),
    )
