"""Variance of a head's scores over every (query, key, distance), split by what biases of queries and keys make."""

from dataclasses import dataclass
from itertools import product

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from tl_posgen.position.decomposition.numbers.variance_shares import (
    PARTS,
    DistanceWeights,
    TripleMoments,
    mean_square,
    turning,
    variance_shares,
    weighted_spread,
)
from tl_posgen.rope.planes import SecondMoments
from tl_posgen.rope.rotation import Rope, complex_planes

_SUMMANDS = ("bias", "rest")  # of a query or key before RoPE: b, and x W
PAIRS = tuple(f"{query}-{key}" for query, key in product(_SUMMANDS, repeat=2))


@dataclass(frozen=True)
class PairShares:
    """Shares of what softmax sees of w, by pair of summands of query and key, and by part of the variance.

    Attributes:
        share: cov(part of w_ab, part of w) / Var of what softmax sees; over pairs they add up to the share of the part,
            over everything to 1. Below 0 where a pair works against the others. NaN where nothing varies.
        alone: Var(part of w_ab) / Var of what softmax sees: what a pair would make without the others.
    """

    share: Float[Tensor, "head pair=4 part=3"]
    alone: Float[Tensor, "head pair=4 part=3"]


def bias_pair_shares(
    moments: TripleMoments,
    bias_q: Float[Tensor, "head d_head"],
    bias_k: Float[Tensor, "head d_head"],
    rope: Rope,
    scale: float,
    n_distances: int,
    *,
    weights: DistanceWeights | Float[Tensor, " distance"] = "uniform",
) -> PairShares:
    r"""Var of w = sum_ab w_ab, w_ab(q_i, k_j, d) = scale Re sum_m z^a_im conj(z^b_jm) u_m(d), over ALL (i, j, d).

    a is the bias of the query or the rest of it, b of the key. The components of w (see `variance_shares`) are linear
    in w, so each is the sum of those of the four pairs, and its variance the sum of their covariances with it. A bias
    has no deviation, the rest that of the whole; with P^a = E[z^a_l z_m] and H^a = E[z^a_l conj(z_m)] of the deviations
    of factors in the component, of the means of the others, the covariance is

        scale^2/2 Re sum_lm (P^a conj(P^b) P^d + H^a conj(H^b) H^d)_lm.

    So no more than the moments of q and k is needed. bias-bias has the component d alone, bias-rest k, d and kd,
    rest-bias q, d and qd.

    Args:
        moments: of q and k before RoPE, biases included, over any number of prompts.
        n_distances, weights: as in `variance_shares`.

    Source: ours; of the variance's own split, functional ANOVA (Hoeffding 1948, Sobol 1993).
    """
    turn, p = turning(moments, rope, n_distances, weights)
    distance = weighted_spread(turn, p)
    of_distance = {False: distance.at_mean, True: distance.about_mean}
    seen = variance_shares(moments, rope, scale, n_distances, weights=weights).within_rows.total
    factors = {}
    for side, spread, bias in (("q", moments.q, bias_q), ("k", moments.k, bias_k)):
        of_bias = complex_planes(bias, rope).to(spread.mean)
        factors[side] = spread, {"bias": of_bias, "rest": spread.mean - of_bias}

    def second_moments(side: str, summand: str, deviates: bool, with_whole: bool) -> SecondMoments | None:
        spread, means = factors[side]
        if deviates:
            return None if summand == "bias" else spread.about_mean
        return _products(means[summand], spread.mean if with_whole else means[summand])

    def of_pair(pair: str, part: str, with_whole: bool) -> Float[Tensor, " head"]:
        covariance = torch.zeros_like(seen)
        for component in PARTS[part]:
            q, k = (
                second_moments(side, summand, side in component, with_whole)
                for side, summand in zip("qk", pair.split("-"), strict=True)
            )
            if q is not None and k is not None:
                covariance = covariance + mean_square(q, k, of_distance["d" in component])
        return scale**2 * covariance / seen

    share, alone = (
        torch.stack([torch.stack([of_pair(pair, part, with_whole) for part in PARTS], -1) for pair in PAIRS], 1)
        for with_whole in (True, False)
    )
    return PairShares(share, alone)


def _products(x: Complex[Tensor, "head plane"], y: Complex[Tensor, "head plane"]) -> SecondMoments:
    """x_l y_m and x_l conj(y_m)."""
    return SecondMoments(x[:, :, None] * y[:, None], x[:, :, None] * y[:, None].conj())
