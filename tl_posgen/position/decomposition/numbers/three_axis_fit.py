"""Three-axis fit: a head's scores as a function of distance plus one of the query plus one of the key."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double
from tl_posgen.position.decomposition.numbers.causal_pairs import SPAN, CausalPairs
from tl_posgen.position.decomposition.numbers.normal_equations import solve
from tl_posgen.position.decomposition.numbers.pair_moments import PairMoments

Gauge = Literal["flat_keys", "flat_queries", "flat_distance"]

SIGNS = 2**14  # random signs drawn for a trace


@dataclass(frozen=True)
class ThreeAxisFit:
    r"""Least-squares fit W_ij ~ a_{i-j} + b_i + c_j of every head, over the pairs that count.

    a, b, c are as long as the text and NaN where there is no pair. Their levels and slopes are a convention (`gauge`),
    since a_d + t d, b_i - t i, c_j + t j is the same fit for every t; r, fitted values and curvature do not depend on
    it.

    Attributes:
        r: Pearson's correlation between W and the fit, with the weights of the pairs; NaN where W is constant, or where
            the fit has as many parameters as pairs: up to 3 tokens, 4 without the first token or the diagonal. In short
            texts r is high by chance: iid Gaussian scores reach .94 over 4 tokens, .69 over 10, .52 over 20, .24 over
            100, and more with weights (`iid_r`).
        r_within_rows: correlation within rows: each row less its mean, which does not affect softmax.
        a, b, c: float64.
        tss: weighted sum of (W - mean)^2.
        std_within_rows: standard deviation of W within rows, in logits: the size of what softmax sees.
        iid_r: r of iid Gaussian scores by chance on these pairs, with these weights; NaN for weights per pair.
        pairs: the pairs that counted, and their weights.
        iterations: number of conjugate-gradient steps.
    """

    r: Float[Tensor, " head"]
    r_within_rows: Float[Tensor, " head"]
    a: Float[Tensor, "head distance"]
    b: Float[Tensor, "head query"]
    c: Float[Tensor, "head key"]
    tss: Float[Tensor, " head"]
    std_within_rows: Float[Tensor, " head"]
    iid_r: Float[Tensor, " head"]
    pairs: CausalPairs
    iterations: int

    @property
    def n_distance(self) -> Int[Tensor, " distance"]:
        return self.pairs.n_at_distance(self.a.device)

    def of_heads(self, part: slice) -> "ThreeAxisFit":
        """Return the fits of some heads."""
        per_head = ("r", "r_within_rows", "a", "b", "c", "tss", "std_within_rows", "iid_r")
        return replace(self, **{name: getattr(self, name)[part] for name in per_head})

    def fitted(
        self, queries: Int[Tensor, " crop_query"], keys: Int[Tensor, " crop_key"]
    ) -> Float[Tensor, "head crop_query crop_key"]:
        """a_{i-j} + b_i + c_j for the given tokens; NaN at pairs that did not count."""
        counted = self.pairs.mask(queries, keys)
        distance = (queries[:, None] - keys).clamp(min=0)
        values = self.a[:, distance] + self.b[:, queries, None] + self.c[:, None, keys]
        return values.masked_fill(~counted, torch.nan)


def fit_three_axis(
    moments: PairMoments, *, ridge: float = 0.0, gauge: Gauge | str = "flat_keys", tolerance: float = 1e-10
) -> ThreeAxisFit:
    r"""min over a, b, c of sum_ij w_{i-j} (W_ij - mean W - a_{i-j} - b_i - c_j)^2 + ridge (|a|^2 + |b|^2 + |c|^2).

    w are the `distance_weights` of the moments; means and correlations have the same weights.

    The correlation needs no residual: with theta the solution and m the weighted sums of W - mean,
    r = theta.m / sqrt(TSS (theta' X'WX theta - n mean(fit)^2)), n the sum of the weights.

    Args:
        ridge: in units of pairs: an axis entry with pairs of weight N is shrunk by about N / (N + ridge).
        gauge: each has sum b = sum c = 0, with all levels in a, and no linear trend (by least squares over the entries)
            in c ("flat_keys"), in b ("flat_queries") or in a ("flat_distance").
        tolerance: of the residual in the norm of the preconditioner, relative to the right side.

    Raises:
        InputError: the tolerance cannot be reached, which happens with windows thousands of times shorter than a text
            of more than 65,536 tokens.

    Source: Han & Ji 2025 (arXiv 2503.13305) propose the three axes; the method of solution is ours.

    Example:
        >>> from tl_posgen.position.decomposition.numbers.pair_moments import pair_moments_from_scores
        >>> position = torch.arange(8.0)
        >>> scores = (position[:, None] + position)[None]  # W_ij = i + j
        >>> fit_three_axis(pair_moments_from_scores(scores)).r.round(decimals=6).tolist()
        [1.0]
    """
    pairs, mean = moments.pairs, moments.mean
    counts = pairs.counts(moments.sums.device)
    centred = pairs.consistent(moments.sums - mean[:, None] * counts, counts)
    rounding = 8 * torch.finfo(DOUBLE).eps * (moments.sums.abs() + mean.abs()[:, None] * counts)
    theta, iterations = solve(pairs, counts, centred, ridge, tolerance, rounding)
    r, within = _correlations(moments, counts, centred, theta)
    curves = pairs.spread(in_gauge(theta, pairs, mean, gauge))
    chance = torch.full_like(r, iid_r(pairs))
    std = (moments.within_rows / pairs.total).sqrt()
    return ThreeAxisFit(r, within, *curves, moments.tss, std, chance, pairs, iterations)


@lru_cache(maxsize=64)
def iid_r(pairs: CausalPairs) -> float:
    r"""sqrt(E ESS / E TSS): r of iid Gaussian scores by chance, for weights W and design matrix X.

        E ESS = tr((X'WX)^+ X'W^2 X) - sum w^2 / sum w,    E TSS = sum w - sum w^2 / sum w

    Without weights this is `pairs.iid_r`. With weights the trace is exact for short texts, else Hutchinson's estimate
    from random signs, SIGNS in all and the same in every call: accurate to about half a percent of r.
    """
    if pairs.unweighted or pairs.saturated:
        return pairs.iid_r
    top = max(pairs.distance_weights)  # a common factor of the weights changes nothing
    pairs = replace(pairs, distance_weights=tuple(weight / top for weight in pairs.distance_weights))
    squared = replace(pairs, distance_weights=tuple(max(weight**2, 1 / SPAN) for weight in pairs.distance_weights))
    n_probes = math.ceil(SIGNS / pairs.size)
    short = n_probes >= 3 * pairs.size
    trace = _exact_trace(pairs, squared) if short else _estimated_trace(pairs, squared, n_probes)
    mean_part = squared.total / pairs.total
    return math.sqrt(min(max((trace - mean_part) / (pairs.total - mean_part), 0.0), 1.0))


def _exact_trace(pairs: CausalPairs, squared: CausalPairs) -> float:
    """tr((X'WX)^+ X'W^2 X) of short texts, from as many eigenvalues as there are independent parameters."""
    units = torch.eye(3 * pairs.size, dtype=DOUBLE, device="cpu").unflatten(1, (3, -1)).transpose(0, 1)
    units[0, :, pairs.width :] = 0
    whole, of_squares = (one.normal(units, one.counts()).transpose(0, 1).flatten(1) for one in (pairs, squared))
    values, vectors = torch.linalg.eigh(whole)
    kept = vectors[:, -pairs.rank :]
    return float(((kept.T @ of_squares @ kept).diagonal() / values[-pairs.rank :]).sum())


def _estimated_trace(pairs: CausalPairs, squared: CausalPairs, n_probes: int) -> float:
    """tr((X'WX)^+ X'W^2 X) ~ mean of s' (X'WX)^+ X'W^2 X s over random sign vectors s (Hutchinson)."""
    generator = torch.Generator("cpu").manual_seed(0)
    probes = double(torch.randint(0, 2, (3, n_probes, pairs.size), generator=generator, device="cpu")) * 2 - 1
    probes[0, :, pairs.width :] = 0
    right = squared.normal(probes, squared.counts())
    solution, _ = solve(pairs, pairs.counts(), right, 0.0, 1e-6, torch.zeros_like(right))
    return float((probes * solution).sum()) / n_probes


def _correlations(
    moments: PairMoments, counts: Tensor, centred: Tensor, theta: Tensor
) -> tuple[Float[Tensor, " head"], Float[Tensor, " head"]]:
    """Return Pearson's r between W and its fit over all pairs, and within rows."""
    fit_sums = moments.pairs.normal(theta, counts)
    shared, fit_squares = (theta * centred).sum((0, 2)), (theta * fit_sums).sum((0, 2))
    fit_total = fit_sums[1].sum(-1)
    rows, fit_rows = centred[1], fit_sums[1] / counts[1]
    shared_within = shared - (rows * fit_rows).sum(-1)
    fit_within = fit_squares - (fit_sums[1] * fit_rows).sum(-1)

    over_all = _correlation(moments, shared, moments.tss, fit_squares - fit_total.square() / moments.pairs.total)
    return over_all, _correlation(moments, shared_within, moments.within_rows, fit_within)


def _correlation(moments: PairMoments, shared: Tensor, squares: Tensor, fit_squares: Tensor) -> Tensor:
    """Return Pearson's r from sums of products and of squares: 0 where the fit is constant, NaN without meaning."""
    r = (shared / (squares * fit_squares).sqrt()).nan_to_num().clamp(max=1)
    return r.masked_fill(moments.is_constant(squares) | moments.pairs.saturated, torch.nan)


def in_gauge(theta: Tensor, pairs: CausalPairs, mean: Tensor, gauge: str) -> Float[Tensor, "axis=3 head size"]:
    """Move along the three free directions until the gauge holds; the mean of W is added to a."""
    t = torch.arange(pairs.size, device=theta.device)
    theta = theta.clone()
    distance, query, key = theta[0, :, : pairs.width], theta[1], theta[2]
    # adding t to all three axes at index t adds n - 1 everywhere: the straight line that no data can place
    flat = {"flat_distance": distance, "flat_queries": query, "flat_keys": key}[gauge]
    slope = _slope(flat)
    distance -= slope * t[: pairs.width]
    query -= slope * t
    key -= slope * t
    level = slope * (pairs.size - 1) + mean[:, None]
    for axis in (query, key):
        axis_mean = axis.mean(-1, keepdim=True)
        axis -= axis_mean
        level = level + axis_mean
    distance += level
    return theta


def _slope(x: Float[Tensor, "head n"]) -> Float[Tensor, "head 1"]:
    """Return the slope of the least-squares line through each row."""
    t = torch.arange(x.shape[-1], dtype=x.dtype, device=x.device)
    t -= t.mean()
    return (x @ t / t.square().sum().clamp(min=0.5)).unsqueeze(-1)
