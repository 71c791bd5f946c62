"""Cone of the attention inputs, whose axis W_Q and W_K amplify, so that Q and K are nearly of rank one."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double
from tl_posgen.rope.spectra import top_direction


class ConeFit(NamedTuple):
    """Cone of the rows h_i of H [ours]."""

    axis: Float[Tensor, " d_model"]  # u = argmax |H u|, of length one, signed so that sum_i <h_i, u> >= 0
    cosine: Float[Tensor, " pos"]  # <h_i, u> / |h_i|
    r1: Float[Tensor, ""]  # s_1^2 / sum s^2 of H, not centred


def fit_cone(inputs: Float[Tensor, "pos d_model"]) -> ConeFit:
    """cos_i = <h_i, u> / |h_i|, u the top right-singular vector of H, the inputs of W_Q and W_K; and r1(H)."""
    h = double(inputs)
    axis = top_direction(h)
    cosine = torch.nn.functional.normalize(h, dim=-1) @ axis
    return ConeFit(axis, cosine, (h @ axis).square().sum() / h.square().sum())


def axis_gain(axis: Float[Tensor, " d_model"], weight: Float[Tensor, "head d_model d_head"]) -> Float[Tensor, " head"]:
    r"""gain = |u'W| sqrt(d_model) / |W|_F, that of the axis over that of a random direction; 1 is no preference [ours].

    W is the weight of W_Q or W_K.
    """
    w = double(weight)
    along = torch.einsum("m,hmd->hd", double(axis), w).norm(dim=-1)
    return along * w.shape[1] ** 0.5 / w.norm(dim=(-2, -1))


def bias_share(
    inputs: Float[Tensor, "pos d_model"],
    weight: Float[Tensor, "head d_model d_head"],
    bias: Float[Tensor, "head d_head"] | None,
) -> Float[Tensor, " head"]:
    r"""|b|^2 / (|H W|^2 + |b|^2), b in every row; 0 without a bias [ours].

    A bias alone has rank one, so r1 of H W + b says nothing where b is large.
    """
    if bias is None:
        return torch.zeros(len(weight), dtype=DOUBLE, device=weight.device)
    energy = (double(inputs) @ double(weight)).square().sum((-2, -1))
    bias_energy = len(inputs) * double(bias).square().sum(-1)
    return bias_energy / (energy + bias_energy)
