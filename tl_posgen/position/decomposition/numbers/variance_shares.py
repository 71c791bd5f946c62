"""Variance of a head's score over every triple (query, key, distance), split among query, key and distance."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Complex, Float
from torch import Tensor
from torch.nn.functional import pad

from tl_posgen.arithmetic import DOUBLE, MOST_DISTANCES, double, summable
from tl_posgen.errors import InputError
from tl_posgen.rope.planes import SecondMoments, along_distances, turning_factors
from tl_posgen.rope.rotation import Rope, at_least_float32, complex_planes

COMPONENTS = ("q", "k", "d", "qk", "qd", "kd", "qkd")
PARTS = {"position": ("d", "qd"), "content": ("k", "qk"), "interaction": ("kd", "qkd")}  # of what softmax can see

DistanceWeights = Literal["uniform", "causal"]

BLOCK = 64  # tokens whose products are added in the dtype of q and k
NOTHING = 1e-24  # variance below this share of the squared mean is rounding: no shares


@dataclass(frozen=True)
class Spread:
    """Mean of complex vectors and second moments about it, float64. `a + b` is the spread of both samples together."""

    n: int
    mean: Complex[Tensor, "head plane"]
    about_mean: SecondMoments

    @property
    def energy(self) -> Float[Tensor, "head plane"]:
        """E|x_m - E x_m|^2."""
        return self.about_mean.conjugate.diagonal(dim1=-2, dim2=-1).real

    @property
    def mean_energy(self) -> Float[Tensor, " head"]:
        """|E x|^2 / E|x|^2: 1 for constant x, 0 where the mean vanishes."""
        of_mean = self.mean.abs().square().sum(-1)
        return of_mean / (of_mean + self.energy.sum(-1))

    @property
    def second_moments(self) -> SecondMoments:
        """Return the second moments about zero."""
        return self.about_mean + self.at_mean

    @property
    def at_mean(self) -> SecondMoments:
        """Return the second moments of the mean alone."""
        return SecondMoments.from_samples(self.mean[:, None])

    def __add__(self, other: "Spread") -> "Spread":
        step, share = other.mean - self.mean, other.n / (self.n + other.n)
        spreads = (self.about_mean, other.about_mean, SecondMoments.from_samples(step[:, None]))
        mine, theirs, gap = (torch.stack([spread.plain, spread.conjugate]) for spread in spreads)
        moments = SecondMoments(*((1 - share) * mine + share * theirs + share * (1 - share) * gap))
        return Spread(self.n + other.n, self.mean + share * step, moments)


@dataclass(frozen=True)
class TripleMoments:
    """Moments of q and k before RoPE, in the planes of `rotation.complex_planes`. Those of prompts add up: `a + b`."""

    q: Spread
    k: Spread

    @classmethod
    def from_qk(
        cls,
        q: Float[Tensor, "head pos d_head"],
        k: Float[Tensor, "head pos d_head"],
        rope: Rope,
        *,
        first_token: bool = True,
    ) -> "TripleMoments":
        """Return the moments of one prompt, with token 0 as query and as key or without."""
        first = 0 if first_token else 1
        if q.shape[1] <= first:
            raise InputError(f"no token is left of a prompt of {q.shape[1]}; give a longer one")
        mean, spread = _mean_and_spread(torch.stack([q, k])[:, :, first:])
        return _triple_moments([q.shape[1] - first], mean[None], spread[None], rope)[0]

    @classmethod
    def with_and_without_first(
        cls, q: Float[Tensor, "head pos d_head"], k: Float[Tensor, "head pos d_head"], rope: Rope
    ) -> "list[TripleMoments]":
        """Return the moments of one prompt of two tokens or more, of all tokens and without token 0."""
        x, n = torch.stack([q, k]), q.shape[1]
        mean, spread = _mean_and_spread(x[:, :, 1:])
        step = double(x[:, :, 0]) - mean
        of_all = (1 - 1 / n) * torch.addcmul(spread, step[..., None], step[..., None, :], value=1 / n)
        means, spreads = torch.stack([mean + step / n, mean]), torch.stack([of_all, spread])
        return _triple_moments([n, n - 1], means, spreads, rope)

    def __add__(self, other: "TripleMoments") -> "TripleMoments":
        return TripleMoments(self.q + other.q, self.k + other.k)


def _mean_and_spread(
    x: Float[Tensor, "side=2 head pos d_head"],
) -> tuple[Float[Tensor, "side=2 head d_head"], Float[Tensor, "side=2 head d_head d_head"]]:
    """Return mean and covariance over tokens, float64: products of float32 numbers, added in float64 block by block."""
    x = at_least_float32(summable(x))
    mean = x.mean(2, dtype=DOUBLE)
    near = mean.to(x.dtype)
    blocks = pad(x - near[:, :, None], (0, 0, 0, -x.shape[2] % BLOCK)).unflatten(2, (-1, BLOCK))
    about_near = (blocks.mT @ blocks).sum(2, dtype=DOUBLE) / x.shape[2]
    off = mean - near
    return mean, torch.addcmul(about_near, off[..., None], off[..., None, :], value=-1)


def _triple_moments(
    n: Sequence[int],
    mean: Float[Tensor, "tokens side=2 head d_head"],
    spread: Float[Tensor, "tokens side=2 head d_head d_head"],
    rope: Rope,
) -> list[TripleMoments]:
    moments = SecondMoments.from_gram(spread, rope)
    by_tokens = zip(complex_planes(mean, rope), moments.plain, moments.conjugate, strict=True)
    return [
        TripleMoments(*(Spread(size, centre, SecondMoments(*second)) for centre, *second in zip(*sides, strict=True)))
        for size, sides in zip(n, by_tokens, strict=True)
    ]


@dataclass(frozen=True)
class VarianceShares:
    """Shares of Var w(q_i, k_j, d) with d an independent distance; they add up to 1. NaN for a constant head.

    Attributes:
        shares: in the order of `COMPONENTS`: main effects of query, key and distance, interactions of two, and of all
            three.
        total: the variance, in squared score units.
        mean: mean score over all triples.
    """

    shares: Float[Tensor, "head component=7"]
    total: Float[Tensor, " head"]
    mean: Float[Tensor, " head"]

    def share(self, *components: str) -> Float[Tensor, " head"]:
        """Return the sum of the named shares."""
        return self.shares[:, [COMPONENTS.index(name) for name in components]].sum(-1)

    @property
    def interaction(self) -> Float[Tensor, " head"]:
        """kd + qkd: zero exactly where w = f(q, d) + g(q, k)."""
        return self.share("kd", "qkd")

    @property
    def additive_r(self) -> Float[Tensor, " head"]:
        """sqrt(1 - interaction): correlation of w with the best f(q, d) + g(q, k) over all triples."""
        return (1 - self.interaction).clamp(min=0).sqrt()

    @property
    def within_rows(self) -> "VarianceShares":
        """Return the shares within rows: without the query's own share, which does not affect softmax."""
        keep = self.shares.new_tensor([name != "q" for name in COMPONENTS])
        visible = 1 - self.share("q")
        shares = self.shares * keep / visible[:, None]
        return VarianceShares(shares.masked_fill((visible <= 0)[:, None], torch.nan), self.total * visible, self.mean)


def variance_shares(
    moments: TripleMoments,
    rope: Rope,
    scale: float,
    n_distances: int,
    *,
    weights: DistanceWeights | Float[Tensor, " distance"] = "uniform",
    bias: Float[Tensor, "head distance"] | None = None,
) -> VarianceShares:
    r"""Var of w(q_i, k_j, d) = scale Re sum_m z^q_im conj(z^k_jm) u_m(d) over ALL triples (i, j, d), split by factor.

    w is linear in each of its three factors. Each factor is its mean plus its deviation, so w expands into eight terms,
    the Hoeffding components: the component of a subset S of {q, k, d} has the deviations of the members of S and the
    means of the others. With P = E[x_l x_m] and H = E[x_l conj(x_m)] of each factor's deviation (or mean, outside S),
    its variance is

        1/2 Re sum_lm (P^q conj(P^k) P^d + H^q conj(H^k) H^d)_lm.

    Nothing is subtracted, so nothing cancels. O(L d_head^2) for the moments, then O(n_distances d_head^2).

    Args:
        moments: of q and k before RoPE, over any number of prompts.
        n_distances: distances 0 .. n_distances - 1 count.
        weights: "uniform"; "causal": n_distances - d, as often as in a text of n_distances tokens; or any.
        bias: added to w at each distance (ALiBi); it belongs to d.

    Source: functional ANOVA (Hoeffding 1948, Sobol 1993); the closed form for RoPE scores is ours. f(q, d) + g(q, k)
    is the split of Han & Ji 2025 (arXiv 2503.13305).
    """
    turn, p = turning(moments, rope, n_distances, weights)
    distance = weighted_spread(turn, p)
    factors = {"q": moments.q, "k": moments.k, "d": distance}
    of = {name: (factor.at_mean, factor.about_mean) for name, factor in factors.items()}
    squares = [mean_square(*(of[name][name in component] for name in factors)) for component in COMPONENTS]
    variances = scale**2 * torch.stack(squares, -1).clamp(min=0)
    products = moments.q.mean * moments.k.mean.conj()
    mean = scale * (products * distance.mean).sum(-1).real
    if bias is not None:
        of_distance = scale * along_distances(products, turn) + bias
        mean = of_distance @ p
        variances[:, COMPONENTS.index("d")] = (of_distance - mean[:, None]).square() @ p
    total = variances.sum(-1)
    shares = (variances / total[:, None]).masked_fill((total <= NOTHING * mean.square())[:, None], torch.nan)
    return VarianceShares(shares, total, mean)


def turning(
    moments: TripleMoments, rope: Rope, n_distances: int, weights: DistanceWeights | Float[Tensor, " distance"]
) -> tuple[Complex[Tensor, "distance plane"], Float[Tensor, " distance"]]:
    """Return u_m(d) of the distances that count, and their weights, which add up to 1."""
    d_head = 2 * moments.q.mean.shape[-1]
    turn = turning_factors(torch.arange(n_distances, device=moments.q.mean.device), rope, d_head)
    ones = torch.ones(n_distances, dtype=DOUBLE, device=turn.device)
    named = {"uniform": ones, "causal": ones.cumsum(0).flip(0)}
    unnormalised = named[weights] if isinstance(weights, str) else double(weights)
    return turn, (unnormalised / unnormalised.sum()).to(turn.device)


def mean_square(q: SecondMoments, k: SecondMoments, d: SecondMoments) -> Float[Tensor, " head"]:
    """E (Re sum_m q_m conj(k_m) d_m)^2 for independent q, k, d."""
    plain = q.plain * k.plain.conj() * d.plain
    conjugate = q.conjugate * k.conjugate.conj() * d.conjugate
    return (plain + conjugate).sum((-2, -1)).real / 2


def weighted_spread(x: Complex[Tensor, "sample plane"], weights: Float[Tensor, " sample"]) -> Spread:
    """Return the spread of samples with weights that add up to 1; its `head` axis has length one.

    Planes that do not vary have the spread 0 exactly: nothing of a plane that does not turn is interaction.
    """
    mean = x[0] + weights.to(x) @ (x - x[0])  # weights add up to 1 but for rounding
    x = x - mean
    weighted = (weights[:, None] * x).mT
    return Spread(len(x), mean[None], SecondMoments((weighted @ x)[None], (weighted @ x.conj())[None]))


def interaction_share(
    q: Float[Tensor, "*batch pos d_head"],
    k: Float[Tensor, "*key_batch key d_head"],
    rope: Rope,
    *,
    n_distances: int | None = None,
    weights: DistanceWeights = "uniform",
    first_token: bool = False,
) -> Float[Tensor, "*batch"]:
    """(kd + qkd) / (1 - q), the `interaction` of `Variance`, of each batch of queries and keys before RoPE.

    Zero exactly where scores are f(q, d) + g(q, k). Gradients reach q and k: moments and the closed form are in
    float64, on the host where the device has none, and the share has the device of q and its dtype, float32 at least.
    It depends neither on the attention's scale nor on a soft cap.

    Args:
        q, k: after qk-norm; k repeated for grouped heads; of hook_q, [batch, pos, head, d_head], give
            `q.transpose(1, 2)`. For shares over several prompts put them one after the other along pos, without their
            first tokens, and give first_token=True and n_distances=tokens of one prompt.
        rope: the layer's, `LayerGeometry.rope`, or `Rope(inverse_frequencies(d_head))`.
        n_distances: distances 0 .. n_distances - 1; as many as positions if left out. In a layer with a window, no more
            than that.
        weights: of distances: "uniform", or "causal" (as often as they occur in a text that long).
        first_token: whether the first token counts.

    Returns:
        0 to 1; NaN, and so are the gradients, where softmax can see nothing vary.

    Raises:
        InputError: q and k of different shapes, fewer components than the rope rotates, fewer than two tokens that
            count, wrong options.

    Source: closed form: ours

    Example:
        >>> from tl_posgen.rope.rotation import inverse_frequencies
        >>> q = torch.randn(4, 50, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        >>> share = interaction_share(q, q.detach(), Rope(inverse_frequencies(8)))
        >>> share.sum().backward()
        >>> share.shape, bool((share < 1).all()), q.grad.shape
        (torch.Size([4]), True, torch.Size([4, 50, 8]))
    """
    if n_distances is not None and (type(n_distances) is not int or not 1 <= n_distances <= MOST_DISTANCES):
        raise InputError(f"n_distances {n_distances!r}: give a whole number, 1 to {MOST_DISTANCES}")
    if not all(isinstance(x, Tensor) and x.ndim > 1 and x.is_floating_point() for x in (q, k)):
        raise InputError("q and k: give tensors of real numbers [.., pos, d_head]")
    if weights not in get_args(DistanceWeights):
        raise InputError(f"weights {weights!r}: choose from {', '.join(get_args(DistanceWeights))}")
    if q.shape != k.shape:
        raise InputError(f"q {list(q.shape)} and k {list(k.shape)} differ in shape; repeat keys of grouped heads")
    if q.shape[-1] < rope.rotary_dim:
        raise InputError(
            f"vectors of {q.shape[-1]} components and a rope that rotates {rope.rotary_dim}: give the layer's"
        )
    if q.shape[-2] < (2 if first_token else 3):
        raise InputError(f"{q.shape[-2]} tokens: too few for anything to vary; give more")
    queries, keys = (x.reshape(-1, *x.shape[-2:]) for x in (q, k))
    moments = TripleMoments.from_qk(queries, keys, rope, first_token=first_token)
    shares = variance_shares(moments, rope, 1.0, q.shape[-2] if n_distances is None else n_distances, weights=weights)
    dtype = torch.promote_types(q.dtype, torch.float32)
    return shares.within_rows.interaction.reshape(q.shape[:-2]).to(q.device, dtype)
