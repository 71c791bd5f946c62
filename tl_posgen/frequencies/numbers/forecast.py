"""Scores at other frequencies, from the moments of queries and keys before RoPE: no further pass is needed.

With u'_m(d) = gain'_m e^{i theta'_m d}, and u_m the same of a layer's own frequencies, scores are w' = scale Re sum_m
q_m conj(k_m) u'_m(d), and their change has u' - u in the place of u'.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from tl_posgen.position.decomposition.numbers.variance_shares import TripleMoments
from tl_posgen.rope.planes import SecondMoments
from tl_posgen.rope.rotation import Rope, complex_frequencies

PARTS = ("position", "content", "interaction")


@dataclass(frozen=True)
class Turning:
    """Moments of u(d) over distances 0 .. n - 1, each as likely, a row a condition; complex128.

    Attributes:
        mean: E u_m.
        moments: E u_l u_m and E u_l conj(u_m).
    """

    mean: Complex[Tensor, "condition plane"]
    moments: SecondMoments

    @classmethod
    def joined(cls, parts: Sequence["Turning"]) -> "Turning":
        """Return the conditions of several, one after the other."""
        every = ((one.mean, one.moments.plain, one.moments.conjugate) for one in parts)
        mean, plain, conjugate = (torch.cat(one) for one in zip(*every, strict=True))
        return cls(mean, SecondMoments(plain, conjugate))

    def to(self, device: torch.device) -> "Turning":
        """Return these moments on a device."""
        if self.mean.device == device:
            return self
        plain, conjugate = self.moments.plain.to(device), self.moments.conjugate.to(device)
        return Turning(self.mean.to(device), SecondMoments(plain, conjugate))

    @cached_property
    def of_mean(self) -> SecondMoments:
        return SecondMoments.from_samples(self.mean[:, None])

    @cached_property
    def about_mean(self) -> SecondMoments:
        of_mean = self.of_mean
        return SecondMoments(self.moments.plain - of_mean.plain, self.moments.conjugate - of_mean.conjugate)


@dataclass(frozen=True)
class Waves:
    """u_m(d) = gain_m e^{i theta_m d} of several conditions, the unrotated remainder as planes with theta = 0.

    Attributes:
        n: distances 0 .. n - 1 count.
    """

    theta: Float[Tensor, "condition plane"]
    gain: Float[Tensor, "condition plane"]
    n: Float[Tensor, " condition"]

    @classmethod
    def of_ropes(cls, ropes: Sequence[Rope], n_distances: Sequence[int], d_head: int, device: torch.device) -> "Waves":
        """Return every rope at every number of distances, the latter changing first."""
        theta = torch.stack([complex_frequencies(rope, d_head).to(device) for rope in ropes])
        gain = torch.ones_like(theta)
        for row, rope in zip(gain, ropes, strict=True):
            row[: len(rope.inv_freq)] = rope.scaling**2
        n = torch.tensor(n_distances, dtype=theta.dtype, device=device)
        times = len(n_distances)
        return cls(theta.repeat_interleave(times, 0), gain.repeat_interleave(times, 0), n.repeat(len(ropes)))

    def products(self, other: "Waves") -> SecondMoments:
        """E u_l w_m and E u_l conj(w_m), w the other's; condition by condition, over this one's distances."""
        gain, n = self.gain[:, :, None] * other.gain[:, None], self.n[:, None, None]
        both = (self.theta[:, :, None] + sign * other.theta[:, None] for sign in (1, -1))
        return SecondMoments(*(gain * mean_turn(angle, n) for angle in both))

    def turning(self) -> Turning:
        """Return the moments of u."""
        return Turning(self.gain * mean_turn(self.theta, self.n[:, None]), self.products(self))

    def change_from(self, own: "Waves") -> Turning:
        """Return the moments of u - u_own, condition by condition over the distances of both."""
        whole, before = self.turning(), own.turning()
        mixed, turned = self.products(own), own.products(self)
        parts = ((one.moments.plain, one.moments.conjugate) for one in (whole, before))
        crossed = (mixed.plain + turned.plain, mixed.conjugate + turned.conjugate)
        moments = SecondMoments(*(a + b - c for a, b, c in zip(*parts, crossed, strict=True)))
        return Turning(whole.mean - before.mean, moments)


def mean_turn(angle: Float[Tensor, "*place"], n: Float[Tensor, "*#place"]) -> Complex[Tensor, "*place"]:
    """1/n sum_{d < n} e^{i angle d} = e^{i angle (n - 1) / 2} sin(n angle / 2) / (n sin(angle / 2)).

    Example:
        >>> angles = torch.tensor([0.0, torch.pi], dtype=torch.float64)
        >>> mean_turn(angles, torch.tensor(2.0)).abs().round(decimals=9).tolist()
        [1.0, 0.0]
    """
    half = angle / 2
    still = half.sin().abs() < 1e-12  # a whole number of circles a token
    size = (n * half).sin() / (n * half.sin().masked_fill(still, 1))
    turn = torch.polar(torch.ones_like(size), (n - 1) * half)
    return torch.where(still, torch.ones_like(turn), size * turn)


def visible_variances(moments: TripleMoments, turning: Turning, scale: float) -> Float[Tensor, "part=3 head condition"]:
    """Return the variance of position (d + qd), content (k + qk) and interaction (kd + qkd) under every condition.

    Their sum is the variance over all (query, key, distance) that softmax sees, as `variance_shares` has it; of u' - u
    it is the mean square of the change of scores, less what is the same for all keys and distances of a query.
    """
    q, k = moments.q.second_moments, moments.k
    of_mean, of_rest = (q.times(one) for one in (SecondMoments.from_samples(k.mean[:, None]), k.about_mean))
    pairs = ((of_mean, turning.about_mean), (of_rest, turning.of_mean), (of_rest, turning.about_mean))

    def mean_square(factors: SecondMoments, turns: SecondMoments) -> Tensor:
        plain = factors.plain.flatten(1) @ turns.plain.flatten(1).mT
        conjugate = factors.conjugate.flatten(1) @ turns.conjugate.flatten(1).mT
        return (plain + conjugate).real / 2

    return scale**2 * torch.stack([mean_square(*pair) for pair in pairs]).clamp(min=0)


def mean_waves(moments: TripleMoments, scale: float) -> Complex[Tensor, "head plane"]:
    """c_m = scale E q_m conj(E k_m): the score of the mean query and the mean key is a(d) = Re sum_m c_m u_m(d)."""
    return scale * moments.q.mean * moments.k.mean.conj()


def overshoot(curves: Float[Tensor, "head distance"], inside: Float[Tensor, "head known"]) -> Float[Tensor, " head"]:
    """Return how far a curve leaves the range of another at most, both less their means: 0 where it does not.

    Softmax does not see the means.

    Example:
        >>> overshoot(torch.tensor([[3.0, -3.0]]), torch.tensor([[1.0, -1.0]])).tolist()
        [2.0]
    """
    curves, inside = (one - one.mean(-1, keepdim=True) for one in (curves, inside))
    above = curves.amax(-1) - inside.amax(-1)
    return torch.maximum(above, inside.amin(-1) - curves.amin(-1)).clamp(min=0)
