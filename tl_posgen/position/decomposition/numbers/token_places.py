"""Place of a token in its queries and keys: their covariance that prompts share, and the shares it has in w."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.errors import InputError
from tl_posgen.position.decomposition.numbers.variance_shares import (
    COMPONENTS,
    DistanceWeights,
    TripleMoments,
    VarianceShares,
    mean_square,
    turning,
    weighted_spread,
)
from tl_posgen.rope.planes import SecondMoments
from tl_posgen.rope.rotation import Rope, complex_planes

PLACES = {"none": "", "query": "q", "key": "k", "both": "qk"}  # whose place a share takes -> the factors that it is of

BY_KEY = {"part": ["k", "qk", "kd", "qkd"], "place": ["key", "both"]}  # what takes the key's place
# component -> the place whose share is what places of query and key determine
PLACES_ALONE = {"d": "none", "k": "key", "qk": "both", "qd": "query", "kd": "key", "qkd": "both"}


@dataclass(frozen=True)
class PlaceSums:
    """Sums over prompts of one length of vectors at each position, and of each prompt's own covariance: `a + b`.

    Attributes:
        n: prompts.
        total: sum_p x_t^p, queries or keys before RoPE.
        within: sum_p 1/T sum_t y_t^p (y_t^p)^H, y = x less its mean in this prompt: of all tokens, and without the
            first.
    """

    n: int
    total: Float[Tensor, "head pos d_head"]
    within: list[SecondMoments]

    def __add__(self, other: "PlaceSums") -> "PlaceSums":
        if self.total.shape[1] != other.total.shape[1]:
            raise InputError(
                f"prompts of {self.total.shape[1]} and {other.total.shape[1]} tokens share no positions; cut them to "
                "one length"
            )
        within = [mine + theirs for mine, theirs in zip(self.within, other.within, strict=True)]
        return replace(self, n=self.n + other.n, total=self.total + other.total, within=within)

    def shared(self, rope: Rope, first: int = 0) -> SecondMoments:
        r"""G = 1/T sum_t [(sum_p y_t^p)(sum_p y_t^p)^H - sum_p y_t^p (y_t^p)^H] / (n (n - 1)), and without conjugation.

        The products of y of two different prompts at the same position: unbiased for the covariance of E y_t over
        positions from two prompts on, whatever a prompt adds to all its tokens, if prompts are independent. Not always
        positive definite.

        Args:
            first: 1 to leave out the first token.

        Source: ours
        """
        x = complex_planes(double(self.total[:, first:]), rope)
        of_sums = SecondMoments.from_samples(x - x.mean(1, keepdim=True))
        return (of_sums - self.within[first]) / (self.n * (self.n - 1))


def shares_by_place(
    shares: VarianceShares,
    moments: TripleMoments,
    shared: Mapping[str, SecondMoments],
    rope: Rope,
    scale: float,
    n_distances: int,
    weights: DistanceWeights | Float[Tensor, " distance"] = "uniform",
) -> Float[Tensor, "head component=7 place=4"]:
    """Split each share of `variance_shares` by whose place it takes, in the order of `PLACES`; they add up to it.

    The covariance H of the deviations of q or k is G, that of where the token stands, plus H - G, that of what it is.
    The closed form is linear in each, so G and H - G in the place of H split it. "none" has what takes no place: what
    query and key are, and distance alone.

    Args:
        shares: of the same moments, distances and weights.
        shared: G of "q" and of "k", see `PlaceSums.shared`.
    """
    factors = {"q": moments.q, "k": moments.k, "d": weighted_spread(*turning(moments, rope, n_distances, weights))}
    at_mean = {name: factor.at_mean for name, factor in factors.items()}
    of_what = {side: factors[side].about_mean - shared[side] for side in shared} | {"d": factors["d"].about_mean}
    by_place = torch.zeros_like(shares.shares)[..., None].repeat(1, 1, len(PLACES))
    for row, component in enumerate(COMPONENTS):
        for column, sides in enumerate(PLACES.values()):
            if sides and set(sides) <= set(component):
                varying = {name: shared[name] if name in sides else of_what[name] for name in component}
                by_place[:, row, column] = scale**2 * mean_square(*((at_mean | varying)[name] for name in factors))
    by_place = (by_place / shares.total[:, None, None]).masked_fill(shares.shares.isnan()[..., None], torch.nan)
    by_place[..., 0] = shares.shares - by_place.sum(-1)
    return by_place
