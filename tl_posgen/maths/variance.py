"""How much of a head's score variance is due to the query, the key, the distance, and to their interactions."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from tl_posgen.maths.planes import turning_factors
from tl_posgen.maths.rope import Rope, complex_planes

COMPONENTS = ("q", "k", "d", "qk", "qd", "kd", "qkd")
Weights = Literal["uniform", "causal"]
ROUNDING = 1e-24  # a total variance below this share of the mean square is rounding, and no share is defined


@dataclass(frozen=True)
class FactorMoments:
    r"""Mean and covariances of the complex plane vectors x of one factor (queries, keys, or turns by distance).

    `of` one prompt, then add prompts: `a + b` are exactly the moments of both together.

    Attributes:
        n: number of samples.
        mean: E[x].
        plain: E[(x - mean)_l (x - mean)_m].
        conjugate: E[(x - mean)_l conj((x - mean)_m)].
    """

    n: int
    mean: Complex[Tensor, "*head plane"]
    plain: Complex[Tensor, "*head plane plane"]
    conjugate: Complex[Tensor, "*head plane plane"]

    @classmethod
    def of(cls, x: Complex[Tensor, "*head sample plane"]) -> "FactorMoments":
        """Moments of samples; complex128. One real product of size (2 planes)^2 gives both covariances."""
        weights = torch.full((x.shape[-2],), 1 / x.shape[-2], dtype=torch.float64, device=x.device)
        return cls.weighted(x, weights)

    @classmethod
    def weighted(cls, x: Complex[Tensor, "*head sample plane"], weights: Float[Tensor, " sample"]) -> "FactorMoments":
        """The same under weights that sum to 1."""
        x = x.to(torch.complex128)
        mean = (weights[:, None] * x).sum(-2, keepdim=True)
        parts = torch.view_as_real(x - mean).transpose(-1, -2).flatten(-2)  # all real parts, then all imaginary ones
        n_planes = x.shape[-1]
        second = (parts * weights[:, None]).mT @ parts
        (rr, ri), (ir, ii) = (half.split(n_planes, -1) for half in second.split(n_planes, -2))
        return cls(x.shape[-2], mean.squeeze(-2), torch.complex(rr - ii, ri + ir), torch.complex(rr + ii, ir - ri))

    def __add__(self, other: "FactorMoments") -> "FactorMoments":
        n, share = self.n + other.n, other.n / (self.n + other.n)
        gap = other.mean - self.mean
        between = share * (1 - share) * gap[..., :, None]
        plain = (1 - share) * self.plain + share * other.plain + between * gap[..., None, :]
        conjugate = (1 - share) * self.conjugate + share * other.conjugate + between * gap.conj()[..., None, :]
        return FactorMoments(n, self.mean + share * gap, plain, conjugate)


@dataclass(frozen=True)
class QueryKeyMoments:
    """Moments of a head's queries and keys before RoPE: all that the decomposition needs of a corpus."""

    q: FactorMoments
    k: FactorMoments

    @classmethod
    def of(
        cls, q: Float[Tensor, "head pos d_head"], k: Float[Tensor, "head pos d_head"], rope: Rope
    ) -> "QueryKeyMoments":
        return cls(
            FactorMoments.of(complex_planes(q.double(), rope)), FactorMoments.of(complex_planes(k.double(), rope))
        )

    def __add__(self, other: "QueryKeyMoments") -> "QueryKeyMoments":
        return QueryKeyMoments(self.q + other.q, self.k + other.k)


@dataclass(frozen=True)
class VarianceShares:
    """The decomposition of every head's score variance.

    Attributes:
        total: variance of w over all triples (query, key, distance).
        shares: share of each of `COMPONENTS`, summing to 1; NaN for a head of constant scores.
    """

    total: Float[Tensor, " head"]
    shares: Float[Tensor, "component=7 head"]

    def __getitem__(self, component: str) -> Float[Tensor, " head"]:
        return self.shares[COMPONENTS.index(component)]

    @property
    def additive_r(self) -> Float[Tensor, " head"]:
        """sqrt(1 - kd - qkd): correlation of w with the best f(q, d) + g(q, k)."""
        return (1 - self["kd"] - self["qkd"]).clamp(min=0).sqrt()

    @property
    def three_axis(self) -> Float[Tensor, " head"]:
        """q + k + d: the share that one number per query, key and distance explains."""
        return self["q"] + self["k"] + self["d"]

    def visible(self, *components: str) -> Float[Tensor, " head"]:
        """The components' share of what softmax can see: q moves whole rows and is left out of the denominator."""
        return sum(self[component] for component in components) / self.shares[1:].sum(0)


def variance_shares(
    moments: QueryKeyMoments,
    rope: Rope,
    d_head: int,
    scale: float = 1.0,
    *,
    n_distances: int,
    weights: Weights = "uniform",
    bias: Float[Tensor, "head distance"] | None = None,
) -> VarianceShares:
    r"""Var w = sum over S of Var_S, S in {q, k, d, qk, qd, kd, qkd}, for w(q, k, d) = s Re sum_m z^q_m conj(z^k_m) u_m(d)

    with q, k and d independent (every query meets every key at every distance) and u_m(d) = scaling^2 e^{i theta_m d}.
    w is a product over factors, so each factor's second moment is its mean's (A) plus its covariance (C), and

        Var_S = s^2 / 2 Re sum_lm [ prod_x (C^x_lm if x in S else A^x_lm) ]      for E[x_l x_m] and E[x_l conj(x_m)],

    a sum of products in which nothing cancels. O(L d_head^2) for the moments, O(d_head^2) after them.

    Args:
        moments: of queries and keys before RoPE.
        rope, d_head: the head's planes; unrotated coordinates count as planes that never turn.
        scale: the attention scale s.
        n_distances: distances 0 .. n_distances - 1.
        weights: of the distances; "causal" weighs d by n_distances - d, as often as it occurs in a text that long.
        bias: added to w at each distance (ALiBi).

    Source: functional ANOVA (Hoeffding 1948, Sobol 1993); applied to attention scores in closed form by us.

    Example:
        >>> rope = Rope(torch.tensor([1.0], dtype=torch.float64))
        >>> q, k = torch.ones(1, 4, 2), torch.tensor([[[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [4.0, 0.0]]])
        >>> shares = variance_shares(QueryKeyMoments.of(q, k, rope), rope, 2, n_distances=1)
        >>> shares["k"].tolist(), shares.total.tolist()
        ([1.0], [1.25])
    """
    if weights not in get_args(Weights):
        raise ValueError(f"weights {weights!r} is not one of {', '.join(get_args(Weights))}")
    if n_distances < 1:
        raise ValueError(f"n_distances must be at least 1; got {n_distances}")
    device = moments.q.mean.device
    distances = torch.arange(n_distances, dtype=torch.float64, device=device)
    p = torch.ones_like(distances) if weights == "uniform" else n_distances - distances
    p = p / p.sum()
    turns = turning_factors(distances, rope, d_head)
    factors = {"q": moments.q, "k": moments.k, "d": FactorMoments.weighted(turns, p)}
    parts = torch.stack([_component(component, factors) for component in COMPONENTS]) * scale**2
    if bias is not None:
        mean_of_distance = scale * ((moments.q.mean * moments.k.mean.conj()) @ turns.mT).real + bias
        parts[COMPONENTS.index("d")] = _variance(mean_of_distance, p)
    total = parts.sum(0)
    shares = (parts / total).masked_fill(total <= ROUNDING * _mean_square(factors, scale), torch.nan)
    return VarianceShares(total, shares)


def _component(component: str, factors: dict[str, FactorMoments]) -> Float[Tensor, " head"]:
    """1/2 Re sum_lm of the products of covariances (inside the component) and of means (outside it)."""
    plain, conjugate = None, None
    for name, factor in factors.items():
        mean = factor.mean
        inside = name in component
        x_plain = factor.plain if inside else mean[..., :, None] * mean[..., None, :]
        x_conjugate = factor.conjugate if inside else mean[..., :, None] * mean.conj()[..., None, :]
        if name == "k":
            x_plain, x_conjugate = x_plain.conj(), x_conjugate.conj()
        plain = x_plain if plain is None else plain * x_plain
        conjugate = x_conjugate if conjugate is None else conjugate * x_conjugate
    assert plain is not None
    assert conjugate is not None
    return ((plain + conjugate).sum((-2, -1)).real / 2).clamp(min=0)


def _mean_square(factors: dict[str, FactorMoments], scale: float) -> Float[Tensor, " head"]:
    """An upper bound on E[w^2], the yardstick for rounding: (s sum_m |E z^q||E z^k||E u|)^2 and the variances' parts."""
    size = torch.ones(())
    for factor in factors.values():
        spread = factor.conjugate.diagonal(dim1=-2, dim2=-1).real
        size = size * (factor.mean.abs().square() + spread).sqrt()
    return (scale * size.sum(-1)).square()


def _variance(values: Float[Tensor, "head distance"], p: Float[Tensor, " distance"]) -> Float[Tensor, " head"]:
    mean = (values * p).sum(-1, keepdim=True)
    return ((values - mean).square() * p).sum(-1)
