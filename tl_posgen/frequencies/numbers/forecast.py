"""Scores at other frequencies, from the moments of queries and keys before RoPE: no further pass is needed.

A condition is a frequency for every plane and a number of distances. With u'_m(d) = scaling^2 e^{i theta'_m d} and u_m
the same of the layer's own frequencies, the change of a score is w' - w = scale Re sum_m q_m conj(k_m) (u' - u)_m(d).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE
from tl_posgen.position.decomposition.numbers.variance_shares import DistanceWeights, TripleMoments, weighted_spread
from tl_posgen.rope.planes import turning_factors
from tl_posgen.rope.rotation import Rope

PARTS = ("position", "content", "interaction")


@dataclass(frozen=True)
class Turns:
    """Moments over distances of turning factors u(d), a row a condition; complex128.

    Attributes:
        mean_plain, mean_conjugate: ubar_l ubar_m and ubar_l conj(ubar_m), with ubar = E_d u.
        plain, conjugate: E v_l v_m and E v_l conj(v_m) of v = u - ubar.
    """

    mean_plain: Complex[Tensor, "condition plane plane"]
    mean_conjugate: Complex[Tensor, "condition plane plane"]
    plain: Complex[Tensor, "condition plane plane"]
    conjugate: Complex[Tensor, "condition plane plane"]


def turns_of(factors: Sequence[Complex[Tensor, "_ plane"]], weights: DistanceWeights) -> Turns:
    """Return the moments of turning factors [distance, plane] of conditions; distances weigh as in `variance`."""
    found = []
    for u in factors:
        ones = torch.ones(len(u), dtype=DOUBLE, device=u.device)
        p = ones if weights == "uniform" else ones.cumsum(0).flip(0)
        spread = weighted_spread(u, p / p.sum())
        mean, about = spread.mean[0], spread.about_mean
        outer = mean[:, None] * mean, mean[:, None] * mean.conj()
        found.append((*outer, about.plain[0], about.conjugate[0]))
    return Turns(*(torch.stack(one) for one in zip(*found, strict=True)))


def visible_variances(moments: TripleMoments, turns: Turns, scale: float) -> Float[Tensor, "part=3 head condition"]:
    """Return the variance of position (d + qd), content (k + qk) and interaction (kd + qkd) under every condition.

    Their sum is the variance over all (query, key, distance) that softmax sees, as `variance_shares` has it; with
    u' - u in the place of u it is the mean square of the change of scores that softmax sees.
    """
    q, mean_key, e = moments.q.second_moments, moments.k.mean, moments.k.about_mean
    keys = mean_key[:, :, None] * mean_key[:, None], mean_key[:, :, None] * mean_key[:, None].conj()
    of_mean = q.plain * keys[0].conj(), q.conjugate * keys[1].conj()
    of_rest = q.plain * e.plain.conj(), q.conjugate * e.conjugate.conj()
    spread, mean = (turns.plain, turns.conjugate), (turns.mean_plain, turns.mean_conjugate)

    def mean_square(factors: tuple[Tensor, Tensor], of_turns: tuple[Tensor, Tensor]) -> Tensor:
        both = zip(factors, of_turns, strict=True)
        return sum((a.flatten(1) @ b.flatten(1).mT).real for a, b in both) / 2  # pyright: ignore[reportReturnType]

    pairs = ((of_mean, spread), (of_rest, mean), (of_rest, spread))
    return scale**2 * torch.stack([mean_square(*pair) for pair in pairs]).clamp(min=0)


def distortions(moments: TripleMoments, changes: Turns, own: Turns, scale: float) -> Float[Tensor, "head condition"]:
    """sqrt(E (w' - w)^2 / E w^2), both less what is the same for all keys and distances of a query.

    Args:
        changes: of u' - u.
        own: of u at the distances of the short prompt: one condition.
    """
    change, visible = (visible_variances(moments, turns, scale).sum(0) for turns in (changes, own))
    return (change / visible).sqrt()


def waves(moments: TripleMoments, scale: float) -> Complex[Tensor, "head plane_and_rest"]:
    """c_m = scale E q_m conj(E k_m): the score of the mean query and mean key is a(d) = Re sum_m c_m u_m(d)."""
    return scale * moments.q.mean * moments.k.mean.conj()


def mean_curves(
    waves: Complex[Tensor, "head plane_and_rest"], factors: Complex[Tensor, "distance plane_and_rest"]
) -> Float[Tensor, "head distance"]:
    """a(d) = Re sum_m c_m u_m(d)."""
    return (waves @ factors.mT).real


def factors_of(rope: Rope, n_distances: int, d_head: int) -> Complex[Tensor, "distance plane_and_rest"]:
    """Return u_m(d) for d = 0 .. n_distances - 1."""
    return turning_factors(torch.arange(n_distances, device=rope.inv_freq.device), rope, d_head)
