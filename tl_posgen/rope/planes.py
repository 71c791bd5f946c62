"""Sums over RoPE planes: the factor by which each plane rotates with distance, and mean squares of such sums."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Complex, Float, Int, Real
from torch import Tensor
from torch.nn.functional import pad

from tl_posgen.arithmetic import DOUBLE, double
from tl_posgen.rope.rotation import Pairing, Rope, complex_frequencies, complex_planes, real_coordinates


def turning_factors(
    distances: Real[Tensor, " distance"], rope: Rope, d_head: int
) -> Complex[Tensor, "distance plane_and_rest"]:
    """u_m(d) = scaling^2 e^{i theta_m d} for the rotary planes and 1 for the unrotated remainder, complex128.

    For any d, <R_d q, R_0 k> = Re sum_m u_m(d) z^q_m conj(z^k_m), with z from `rotation.complex_planes`.
    """
    theta = complex_frequencies(rope, d_head).to(distances.device)
    gain = torch.ones_like(theta)
    gain[: len(rope.inv_freq)] = rope.scaling**2
    angles = double(distances)[:, None] * theta
    return torch.polar(gain.expand_as(angles).contiguous(), angles)


def along_distances(
    products: Complex[Tensor, "*batch plane"], turn: Complex[Tensor, "distance plane"]
) -> Float[Tensor, "*batch distance"]:
    """a(d) = Re sum_m c_m u_m(d): with c = z^q conj(z^k) and `turning_factors`, <R_d q, R_0 k>."""
    return (products @ turn.to(products).mT).real


def mean_curves(
    products: Complex[Tensor, "*batch plane_and_rest"], rope: Rope, n_distances: int, d_head: int
) -> Float[Tensor, "*batch distance"]:
    """a(d) = Re sum_m c_m u_m(d), d = 0 .. n_distances - 1; of mean query and mean key with c = qbar conj(kbar)."""
    return along_distances(products, turning_factors(torch.arange(n_distances, device=products.device), rope, d_head))


@dataclass(frozen=True)
class SecondMoments:
    """plain_lm = E[x_l x_m] and conjugate_lm = E[x_l conj(x_m)], which determine every E (Re sum_m z_m x_m)^2."""

    plain: Complex[Tensor, "*batch plane plane"]
    conjugate: Complex[Tensor, "*batch plane plane"]

    @classmethod
    def from_samples(cls, x: Complex[Tensor, "*batch sample plane"]) -> "SecondMoments":
        coordinates = real_coordinates(x)  # one real product for two complex ones
        return cls._from_parts(coordinates.mT @ coordinates / x.shape[-2])

    @classmethod
    def from_gram(cls, gram: Float[Tensor, "*batch d_head d_head"], rope: Rope) -> "SecondMoments":
        """Return the moments of `rotation.complex_planes` of real vectors x from E[x x^T]."""
        d_head = gram.shape[-1]
        places = _places_in_planes(d_head, rope.rotary_dim, rope.pairing, gram.device)
        odd = d_head % 2
        return cls._from_parts((pad(gram, (0, odd, 0, odd)) if odd else gram)[..., places[:, None], places])

    @classmethod
    def _from_parts(cls, gram: Float[Tensor, "*batch two_planes two_planes"]) -> "SecondMoments":
        """Return the moments from those of real and imaginary parts."""
        (real, cross), (crossed, imag) = gram.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2)).movedim((-3, -1), (0, 1))
        return cls(torch.complex(real - imag, cross + crossed), torch.complex(real + imag, crossed - cross))

    def __add__(self, other: "SecondMoments") -> "SecondMoments":
        return SecondMoments(self.plain + other.plain, self.conjugate + other.conjugate)

    def __sub__(self, other: "SecondMoments") -> "SecondMoments":
        return SecondMoments(self.plain - other.plain, self.conjugate - other.conjugate)

    def __truediv__(self, number: int | float) -> "SecondMoments":
        return SecondMoments(self.plain / number, self.conjugate / number)

    def times(self, other: "SecondMoments") -> "SecondMoments":
        """Return the moments of x_m conj(y_m) for independent x (self) and y (other)."""
        return SecondMoments(self.plain * other.plain.conj(), self.conjugate * other.conjugate.conj())

    @classmethod
    def from_mean_and_spread(cls, x: Complex[Tensor, "*batch sample plane"]) -> "tuple[SecondMoments, SecondMoments]":
        """Return the moments of the mean of x over samples, and those of x - mean. They add up to the moments of x."""
        mean = x.mean(dim=-2, keepdim=True)
        return cls.from_samples(mean), cls.from_samples(x - mean)

    def mean_square(self, z: Complex[Tensor, "*batch query plane"]) -> Float[Tensor, "*batch query"]:
        """E (Re sum_m z_m x_m)^2 for each fixed z: 1/2 Re sum_lm (z_l z_m E[x_l x_m] + z_l z_m* E[x_l x_m*])."""
        plain = ((z @ self.plain) * z).sum(-1)
        conjugate = ((z @ self.conjugate) * z.conj()).sum(-1)
        return ((plain + conjugate).real / 2).clamp(min=0)


@lru_cache(maxsize=32)
@torch.inference_mode(False)
def _places_in_planes(
    d_head: int, rotary_dim: int, pairing: Pairing, device: torch.device
) -> Int[Tensor, " two_planes"]:
    """Return which coordinate each real and imaginary part is; d_head for the one that an odd d_head lacks."""
    numbered = torch.arange(1.0, d_head + 1, dtype=DOUBLE, device="cpu")
    rope = Rope(torch.zeros(rotary_dim // 2, device="cpu"), pairing)
    of_parts = real_coordinates(complex_planes(numbered, rope)).long()
    return ((of_parts - 1) % (d_head + 1)).to(device)
