"""Three-axis fit: a head's scores as a function of distance plus one of the query plus one of the key."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE
from tl_posgen.errors import InputError
from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs, normal_blocks
from tl_posgen.position.decomposition.numbers.pair_moments import PairMoments

Gauge = Literal["flat_keys", "flat_queries", "flat_distance"]

LONGEST = 1024  # tokens: a matrix of 2 L x 2 L is factored for weights that are not all alike
MAX_ITERATIONS = 10_000
_LOOK_AFTER = 16  # steps between two looks at the residual on an accelerator, where a look makes the host wait
_FEW = 4  # indices of an axis: fewer leave three axes as many parameters as pairs


@dataclass(frozen=True)
class ThreeAxisFit:
    r"""Least-squares fit W_ij ~ a_{i-j} + b_i + c_j of every head, over the pairs that count.

    a, b, c are as long as the text and NaN where there is no pair. Their levels and slopes are a convention (`gauge`),
    since a_d + t d, b_i - t i, c_j + t j is the same fit for every t; r, fitted values and curvature do not depend on
    it.

    Attributes:
        r: Pearson's correlation between W and the fit, with the weights of the pairs; NaN where W is constant, or where
            the fit has as many parameters as pairs: up to 3 tokens, 4 without the first. In short
            texts r is high by chance: iid Gaussian scores reach 0.94 over 4 tokens, 0.69 over 10, 0.52 over 20, 0.24
            over 100, and more with weights (`iid_r`).
        r_within_rows: correlation within rows: each row less its mean, which does not affect softmax.
        a, b, c: float64.
        tss: weighted sum of (W - mean)^2.
        std_within_rows: standard deviation of W within rows, in logits: the size of what softmax sees.
        iid_r: r of iid Gaussian scores by chance on these pairs, with these weights; NaN for weights per pair, and for
            weights by distance beyond 1,024 tokens.
        pairs: the pairs that counted, and their weights.
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
            of more than 65,536 tokens, or weights as uneven.

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
    centred = pairs.consistent(moments.sums.addcmul(mean[:, None], counts, value=-1))
    if pairs.unweighted and pairs.width == pairs.size >= _FEW and not ridge:
        theta, fit_sums = solve_triangle(centred), centred
    else:
        rounding = 8 * torch.finfo(DOUBLE).eps * (moments.sums.abs() + mean.abs()[:, None] * counts)
        theta = solve(pairs, counts, centred, ridge, tolerance, rounding)
        fit_sums = pairs.normal(theta, counts)
    # Pearson's r between W and its fit, over all pairs and within rows, from sums of products and of squares
    sums, row_means = torch.stack([centred, fit_sums]), fit_sums[1] / counts[1]
    shared, of_fit = products = (theta * sums).sum((1, 3))
    within_rows = products - (sums[:, 1] * row_means).sum(-1)
    over_all = torch.stack([shared, of_fit - fit_sums[1].sum(-1).square() / pairs.total])
    shared, of_fit = torch.stack([over_all, within_rows], 1)
    r = (shared / (moments.squares * of_fit).sqrt()).nan_to_num().clamp(max=1)  # 0 where the fit is constant
    r, within = r.masked_fill(moments.is_constant | pairs.saturated, torch.nan)
    curves = pairs.spread(in_gauge(theta, pairs, mean, gauge))
    chance = torch.full_like(r, iid_r(pairs))
    std = (moments.within_rows / pairs.total).sqrt()
    return ThreeAxisFit(r, within, *curves, moments.tss, std, chance, pairs)


@lru_cache(maxsize=64)
def iid_r(pairs: CausalPairs) -> float:
    r"""sqrt(E ESS / E TSS): r of iid Gaussian scores by chance, for weights W and design matrix X.

        E ESS = tr((X'WX)^+ X'W^2 X) - sum w^2 / sum w,    E TSS = sum w - sum w^2 / sum w

    Without weights this is `pairs.iid_r`. With weights it takes matrices of two rows a token: NaN beyond LONGEST.
    """
    if pairs.unweighted or pairs.saturated:
        return pairs.iid_r
    if pairs.n_tokens > LONGEST:
        return math.nan
    index = torch.arange(pairs.size)
    distance = index[:, None] - index
    p = pairs.weights("cpu")[distance.clamp(min=0)].masked_fill_(distance < 0, 0)
    # the distances eliminated, as in `solve`; of the matrix of b and c as many eigenvalues as it has free parameters
    (at, mixed, tokens), (at_squares, mixed_squares, token_squares) = normal_blocks(p), normal_blocks(p.square())
    at_distance = (1 / at).masked_fill(at == 0, 0)
    means, scale = at_distance[:, None] * mixed, tokens.diagonal().rsqrt()
    crossed = mixed_squares.T @ means
    of_squares = token_squares - crossed - crossed.T + means.T @ (at_squares[:, None] * means)
    values, vectors = torch.linalg.eigh(scale[:, None] * (tokens - mixed.T @ means) * scale)
    n_kept = pairs.rank - pairs.width
    directions = scale[:, None] * vectors[:, -n_kept:]
    trace = (at_distance * at_squares).sum() + ((of_squares @ directions * directions).sum(0) / values[-n_kept:]).sum()
    mean_part = p.square().sum() / p.sum()
    return math.sqrt(min(max(float((trace - mean_part) / (p.sum() - mean_part)), 0.0), 1.0))


def solve(
    pairs: CausalPairs,
    counts: Float[Tensor, "axis=3 1 size"],
    right: Float[Tensor, "axis=3 head size"],
    ridge: float,
    tolerance: float,
    rounding: Float[Tensor, "axis=3 head size"],
) -> Float[Tensor, "axis=3 head size"]:
    r"""theta = (X'WX + ridge)^-1 right, up to the rounding of the right side.

    The block of the distances is diagonal, so they are eliminated exactly: a_d is the mean over the pairs at d of what
    b and c leave. The system for b and c is solved by conjugate gradients with its diagonal as preconditioner; a full
    triangle without weights or a ridge needs no steps: see `solve_triangle`.

    A window, or weights on near distances, couple distant tokens weakly: waves along the text have small eigenvalues,
    and it takes about 4 n / width steps.

    Args:
        counts: `pairs.counts()`.
        right: right side, projected by `CausalPairs.consistent`; 0 at distances beyond the window.
        tolerance: of the residual in the norm of the preconditioner, relative to the right side.
        rounding: error of the right side, entry by entry.

    Raises:
        InputError: the tolerance is not reached in MAX_ITERATIONS.
    """
    weights, diagonal = pairs.weights(right.device), counts[1] + ridge
    at_distance = (1 / (counts[0] + ridge)).masked_fill(counts[0] == 0, 0)
    eliminated = weights.square() * at_distance
    left = right[1:] - _sum_over_pairs(weights * at_distance * right[0])
    errors = right.abs().mul_(4 * torch.finfo(right.dtype).eps) + rounding  # the difference above may cancel
    rounded = errors[1:] + _sum_over_pairs(weights * at_distance * errors[0])
    look_after = 1 if right.device.type == "cpu" else _LOOK_AFTER
    # conjugate gradients for b and c: x, what is left, and the direction of the next step
    x, inverse = torch.zeros_like(left), 1 / diagonal
    direction = inverse * left
    size = (left * direction).sum((0, 2))
    enough = (tolerance**2 * size).maximum((rounded.square() * inverse).sum((0, 2)))
    steps = 0
    while True:
        unfinished = size > enough
        if steps % look_after == 0 and not unfinished.any():
            break
        if steps == MAX_ITERATIONS:
            cause = f"a window of {pairs.width} ties" if pairs.unweighted else "these weights by distance tie"
            raise InputError(
                f"no fit within {steps} steps: {cause} {pairs.size} tokens too loosely together; give a ridge, or a "
                "shorter text"
            )
        steps += 1
        moved = pairs.over_band(direction).flip(0, -1)
        moved.sub_(_sum_over_pairs(eliminated * _sum_over_pairs(direction.sum(0)))).addcmul_(diagonal, direction)
        length = torch.where(unfinished, size / (direction * moved).sum((0, 2)), 0)[:, None]
        x.addcmul_(length, direction)
        left.addcmul_(length, moved, value=-1)
        preconditioned = inverse * left
        size, before = (left * preconditioned).sum((0, 2)), size
        direction = direction.mul_(torch.where(before > 0, size / before, 0)[:, None]).add_(preconditioned)
    a = at_distance * (right[0] - weights * _sum_over_pairs(x.sum(0)))
    return torch.cat([a[None], x])


def solve_triangle(right: Float[Tensor, "axis=3 head size"]) -> Float[Tensor, "axis=3 head size"]:
    r"""theta with w theta_k + w A (sum of the other two axes) = right_k, w_t = n - t the pairs at index t: O(n).

    A averages an axis over the pairs at each index of another: (A x)_t = (x_0 + .. + x_{n-1-t}) / w_t. It maps a
    polynomial of degree p to one of degree p, with the eigenvalue (-1)^p / (p + 1), and T = A^-2 - I is tridiagonal,

        w_t (T x)_t = kappa_{t-1} (x_t - x_{t-1}) - kappa_t (x_{t+1} - x_t),     kappa_t = (t + 1) (n - t) (n - 1 - t).

    So the sum sigma of the axes, and then each axis, need a pseudo-inverse of T - 3 and of T, which are two weighted
    cumulative sums each:

        (I + 2 A) sigma = sum_k right_k / w,          (I + 2 A)^+ = (I - 2 A) (I + 4 (T - 3)^+)
        (I - A) theta_k = right_k / w - A sigma,      (I - A)^+ = (I + A) (I + T^+)

    Constants and one straight line are free: what comes out along them is arbitrary.

    Args:
        right: sums over the pairs of every axis in the corner coordinates of `CausalPairs`, of one matrix: see
            `CausalPairs.consistent`. Four indices or more.

    Source: ours

    Example:
        >>> a, b, c = solve_triangle(torch.tensor([4.0, 3, 2, 1]).double().repeat(3, 1, 1))[:, 0]  # scores of 1
        >>> round(float(a[1] + b[2] + c[0]), 9)
        1.0
    """
    inverse, kappa, weighted, crossed = _triangle_tables(right.shape[-1], right.device)
    means = right * inverse
    total = means.sum(0)
    g = total.add((crossed * (weighted * total).cumsum(-1)).sum(0), alpha=4)
    sigma = g.addcmul(g.cumsum(-1).flip(-1), inverse, value=-2)
    theta = means.addcmul_(sigma.cumsum(-1).flip(-1), inverse, value=-1)
    steps = (theta / inverse).cumsum_(-1).mul_(kappa).cumsum_(-1)
    theta[..., 1:] -= steps[..., :-1]
    theta = theta.addcmul(theta.cumsum(-1).flip(-1), inverse)
    theta[0] += (sigma - theta.sum(0)).mean(-1, keepdim=True)
    return theta


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _triangle_tables(n: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return 1 / w, 1 / kappa with a last zero, and of T f = 3 f the two solutions: phi w and q w; -q and phi.

    phi_t = t - c, c = (n - 1) / 3. Of q_t = phi_t sum_{s < t} 1 / (kappa_s phi_s phi_{s+1}) the partial fractions are
    harmonic sums and telescoping ones, and any multiple of phi may be added; it is chosen to make q small about phi's
    zero, where digits would cancel.
    """
    t, c = torch.arange(n, dtype=DOUBLE, device="cpu"), (n - 1) / 3
    w, phi = n - t, t - c
    kappa = (t[:-1] + 1) * w[:-1] * (w[:-1] - 1)
    upward = torch.cat([t.new_zeros(1), (1 / (t + 1)).cumsum(0)])  # H_0 .. H_n
    down = upward.flip(0)  # H_n .. H_0
    harmonic = (
        upward[:n] / (n * (n + 1) * c * (c + 1))
        + down[:n] / ((n + 1) * (2 * c + 1) * (2 * c + 2))
        - down[1:] / (n * 2 * c * (2 * c + 1))
    )
    q = phi * (harmonic - harmonic[round(c)]) - 1 / ((c + 1) * (2 * c + 1) * 2 * c)
    crossed = torch.stack([-q, phi])[:, None]
    kappa = torch.cat([1 / kappa, t.new_zeros(1)])
    return tuple(x.to(device) for x in (1 / w, kappa, torch.stack([phi * w, q * w])[:, None], crossed))


def _sum_over_pairs(x: Tensor) -> Tensor:
    """Return the sum of one axis over the pairs of each index of another axis."""
    return x.cumsum(-1).flip(-1)


def in_gauge(theta: Tensor, pairs: CausalPairs, mean: Tensor, gauge: str) -> Float[Tensor, "axis=3 head size"]:
    """Move along the three free directions until the gauge holds; the mean of W is added to a."""
    line, trend = _gauge_tables(pairs.size, pairs.width, theta.device)
    axis = ("flat_distance", "flat_queries", "flat_keys").index(gauge)
    levels = theta[1:].mean(-1, keepdim=True)
    theta = torch.addcmul(theta, (theta[axis] @ trend[axis])[:, None], line, value=-1)
    theta[1:] -= levels
    theta[0] += levels.sum(0) + mean[:, None]
    return theta


@lru_cache(maxsize=32)
@torch.inference_mode(False)
def _gauge_tables(n: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the straight line that no data can place, t on all three axes at index t less n - 1 in all, with mean 0
    over queries and over keys; and by what an axis is multiplied for the slope of its least-squares line."""
    t = torch.arange(n, dtype=DOUBLE, device="cpu")
    of_tokens = t - t.mean()
    of_distances = (t - t[:width].mean()).masked_fill(t >= width, 0)
    trend = torch.stack([x / x.square().sum().clamp(min=0.5) for x in (of_distances, of_tokens, of_tokens)])
    return torch.stack([t, of_tokens, of_tokens])[:, None].to(device), trend.to(device)
