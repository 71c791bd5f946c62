"""Second moments of scores as inner products with a query or key, so that sources of it have shares."""

from collections.abc import Mapping
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.position.decomposition.numbers.variance_shares import Spread, TripleMoments
from tl_posgen.rope.planes import SecondMoments
from tl_posgen.rope.rotation import Rope, complex_planes, from_complex_planes

Part = Literal["all", "mean", "rest"]


# the part of query, key and distance that a term of the score's variance has: all, the mean, or the rest
TERMS: Mapping[str, Mapping[str, Part]] = {
    "position": {"q": "all", "k": "mean", "d": "rest"},
    "content": {"q": "all", "k": "rest", "d": "mean"},
    "interaction": {"q": "all", "k": "rest", "d": "rest"},
    "key": {"q": "mean", "k": "rest", "d": "mean"},
}


def _moments_of_part(x: Spread, part: Part) -> SecondMoments:
    """Return the second moments of all of x, of its mean, or of its deviations from it."""
    if part == "mean":
        return SecondMoments.from_samples(x.mean[:, None])
    return x.second_moments if part == "all" else x.about_mean


def source_form(
    term: Mapping[str, Part], side: Literal["q", "k"], moments: TripleMoments, distance: Spread
) -> SecondMoments:
    """C, D with E[w_s w] = 1/2 Re E sum_mn conj(x_s)_m (C_mn conj(x_n) + D_mn x_n), without the squared scale.

    x is the query or key whose sources x_s are asked for, w the score that its part gives. C and D hold the moments of
    the other one and of u(d), in the parts that the term has of them.

    Args:
        distance: the spread of u(d), its `head` axis of length one.
    """
    turn = _moments_of_part(distance, term["d"])
    if side == "q":
        return _moments_of_part(moments.k, term["k"]).times(turn)
    return _moments_of_part(moments.q, term["q"]).times(SecondMoments(turn.plain.conj(), turn.conjugate.conj()))


def source_weights(
    form: SecondMoments, x: Float[Tensor, "head pos d_head"], rope: Rope
) -> Float[Tensor, "head pos d_head"]:
    """g with E[w_s w] = E <x_s, g>: linear in x, so sources that add up to x have values that add up to E w^2.

    Source: ours; the closed form is that of `variance_shares`.
    """
    z = complex_planes(double(x), rope)
    g = z.conj() @ form.plain.mT + z @ form.conjugate.mT
    return from_complex_planes(g / 2, rope, x.shape[-1])
