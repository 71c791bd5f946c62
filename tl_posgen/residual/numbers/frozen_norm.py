"""A normalisation as the affine map that it is at one input: its divisor frozen, all else read off its outputs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import double

SAME = 1e-2  # of the largest output: by how much a centring norm may move when a constant is added


@dataclass(frozen=True)
class FrozenNorm:
    """y_t = c_t gamma * (x_t - mean x_t, where centred) + beta, float64.

    Attributes:
        gamma, beta: weight and bias.
        centred: whether the mean over the last axis is taken away first, as by LayerNorm.
        factor: c_t, such as 1 / rms(x_t).
        error: max |y - this| / max |y| on the inputs that it was made of.
    """

    gamma: Float[Tensor, "*batch d"]
    beta: Float[Tensor, "*batch d"]
    centred: bool
    factor: Float[Tensor, "*batch pos"]
    error: float

    def linear(self, parts: Float[Tensor, "*source pos d"]) -> Float[Tensor, "*source pos d"]:
        """Return c_t gamma * (r_t - mean r_t) of parts that add up to x_t, of a norm without a batch; beta is a part of
        its own."""
        return self.factor[..., None] * scaled(parts, self.gamma, self.centred)


def scaled(x: Float[Tensor, "*any d"], gamma: Float[Tensor, "*some d"], centred: bool) -> Float[Tensor, "*both d"]:
    """gamma * (x - mean x), or gamma * x where nothing is centred."""
    x = double(x)
    return double(gamma) * (x - x.mean(-1, keepdim=True) if centred else x)


def freeze(
    norm: Callable[[Float[Tensor, "*batch row d"]], Float[Tensor, "*batch row d"]],
    x: Float[Tensor, "*batch pos d"],
    y: Float[Tensor, "*batch pos d"],
) -> FrozenNorm:
    """Return the frozen form of a norm at inputs x with outputs y = norm(x).

    beta = norm(0); gamma from norm(1, -1, 1, -1, ...); a norm centres if adding 1 to that changes nothing; c_t is the
    least-squares factor of y_t on gamma * x_t. So RMSNorm, LayerNorm, norms without weights and the identity are read
    in one way; `error` tells what is none of these.

    Example:
        >>> x = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> norm = torch.nn.LayerNorm(8, dtype=torch.float64)
        >>> frozen = freeze(norm, x, norm(x).detach())
        >>> frozen.centred, frozen.error < 1e-12
        (True, True)
    """
    d = x.shape[-1]
    signs = torch.ones(d, dtype=x.dtype, device=x.device)
    signs[1::2] = -1
    probes = torch.stack([torch.zeros_like(signs), signs, signs + 1])
    with torch.no_grad():
        beta, at_signs, raised = double(norm(probes.expand(*x.shape[:-2], 3, d))).unbind(-2)
    reach = (at_signs - beta).abs().max()
    centred = bool((raised - at_signs).abs().max() <= SAME * reach)
    signs = double(signs)
    gamma = (at_signs - beta) / (signs - signs.mean() if centred else signs)
    unscaled = scaled(x, gamma[..., None, :], centred)
    rest = double(y) - beta[..., None, :]
    factor = (unscaled * rest).sum(-1) / unscaled.square().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
    off = (factor[..., None] * unscaled - rest).abs().max() / double(y).abs().max().clamp(min=1e-30)
    return FrozenNorm(gamma, beta, centred, factor, float(off))
