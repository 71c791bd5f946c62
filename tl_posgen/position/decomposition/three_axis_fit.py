"""How far a head's scores are a function of distance plus one of the query plus one of the key."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.errors import InputError
from tl_posgen.position.decomposition.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.pair_moments import PairMoments

Gauge = Literal["flat_keys", "flat_queries", "flat_distance"]

MAX_ITERATIONS = 10_000


@dataclass(frozen=True)
class ThreeAxisFit:
    r"""The least-squares fit W_ij ~ a_{i-j} + b_i + c_j of every head, over the pairs that count.

    a, b, c are as long as the text and NaN where no pair is; their levels and slopes are a convention (`gauge`),
    since a_d + t d, b_i - t i, c_j + t j is the same fit for every t. r, fitted values and curvature are not.

    Attributes:
        r: Pearson's correlation between W and the fit; NaN where W is constant, or where the fit has as many parameters
            as pairs: 3 tokens or fewer, 4 without the first token or the diagonal. Even then chance has most of it:
            iid Gaussian scores reach .94 over 4 tokens, .69 over 10, .52 over 20, .24 over 100 (`pairs.iid_r`).
        r_within_rows: the same within rows, the mean of each row removed, which is all that softmax sees.
        a, b, c: float64.
        n_distance, n_query, n_key: number of pairs behind each entry of a, b and c.
        tss: sum of (W - mean)^2; `pooled_r` needs it.
        pairs: which pairs counted; `pairs.iid_r` is the r that iid Gaussian scores reach on them by chance.
        iterations: conjugate-gradient steps taken.
    """

    r: Float[Tensor, " head"]
    r_within_rows: Float[Tensor, " head"]
    a: Float[Tensor, "head distance"]
    b: Float[Tensor, "head query"]
    c: Float[Tensor, "head key"]
    n_distance: Int[Tensor, " distance"]
    n_query: Int[Tensor, " query"]
    n_key: Int[Tensor, " key"]
    tss: Float[Tensor, " head"]
    pairs: CausalPairs
    iterations: int

    def of_heads(self, part: slice) -> "ThreeAxisFit":
        """The fits of some heads."""
        per_head = ("r", "r_within_rows", "a", "b", "c", "tss")
        return replace(self, **{name: getattr(self, name)[part] for name in per_head})

    def fitted(
        self, queries: Int[Tensor, " crop_query"], keys: Int[Tensor, " crop_key"]
    ) -> Float[Tensor, "head crop_query crop_key"]:
        """a_{i-j} + b_i + c_j for the tokens asked for; NaN at pairs that did not count."""
        counted = self.pairs.mask(queries, keys)
        distance = (queries[:, None] - keys).clamp(min=0)
        values = self.a[:, distance] + self.b[:, queries, None] + self.c[:, None, keys]
        return values.masked_fill(~counted, torch.nan)


def fit_three_axis(
    moments: PairMoments, *, ridge: float = 0.0, gauge: Gauge | str = "flat_keys", tolerance: float = 1e-10
) -> ThreeAxisFit:
    r"""min over a, b, c of sum_ij (W_ij - mean W - a_{i-j} - b_i - c_j)^2 + ridge (|a|^2 + |b|^2 + |c|^2).

    The normal equations are solved for all heads at once by conjugate gradients with the counts as preconditioner.
    On a full triangle the preconditioned matrix has the eigenvalues 1 + 2 (-1)^p / (p + 1) (once) and
    1 - (-1)^p / (p + 1) (twice), p = 0 .. n - 1, because averaging over the indices that an index meets maps a
    polynomial of degree p to one of degree p [ours]. So three are zero, the others lie between 1/2 and 3 whatever the
    length, and about fifteen steps reach 1e-10. A window w much shorter than the text takes about 4 n / w steps.

    Goodness of fit needs no residual: with theta the solution and m the sums of W - mean,
    r = theta.m / sqrt(TSS (theta' X'X theta - n mean(fit)^2)).

    Args:
        moments: from `pair_moments` or `pair_moments_from_scores`.
        ridge: in units of pairs: an axis entry with N pairs is shrunk by about N / (N + ridge).
        gauge: all have sum b = sum c = 0, levels in a, and no linear trend (least squares over the entries, each
            counting once) in c ("flat_keys"), in b ("flat_queries") or in a ("flat_distance").
        tolerance: of the residual in the norm of the preconditioner, relative to the right side.

    Raises:
        InputError: where the tolerance cannot be reached, in a window thousands of times shorter than the text.

    Source: Han & Ji 2025 (arXiv 2503.13305) propose the three axes; the method of solution is ours.

    Example:
        >>> from tl_posgen.position.decomposition.pair_moments import pair_moments_from_scores
        >>> position = torch.arange(8.0)
        >>> scores = (position[:, None] + position)[None]  # W_ij = i + j
        >>> fit_three_axis(pair_moments_from_scores(scores)).r.round(decimals=6).tolist()
        [1.0]
    """
    pairs, mean = moments.pairs, moments.mean
    counts = pairs.counts(moments.sums.device)
    centred = pairs.consistent(moments.sums - mean[:, None] * counts, counts)
    rounding = 8 * torch.finfo(torch.float64).eps * (moments.sums.abs() + mean.abs()[:, None] * counts)
    theta, iterations = _conjugate_gradients(pairs, counts, centred, ridge, tolerance, rounding)
    r, within = _correlations(moments, counts, centred, theta)
    a, b, c = pairs.spread(_in_gauge(theta, pairs, mean, gauge))
    n_distance, n_query, n_key = (n[0].long() for n in pairs.spread(counts, fill=0))
    return ThreeAxisFit(r, within, a, b, c, n_distance, n_query, n_key, moments.tss, pairs, iterations)


def pooled_r(r: Float[Tensor, "*heads"], tss: Float[Tensor, "*heads"]) -> float:
    r"""sqrt(sum_h r_h^2 TSS_h / sum_h TSS_h): one correlation over the entries of all heads together, W against the
    fits, each head's own mean removed from both. Heads of constant scores (r NaN) count nothing.

    Example:
        >>> pooled_r(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 3.0]))
        0.5
    """
    known = ~r.isnan()
    r, tss = r[known].double(), tss[known].double()
    return float((r.square() @ tss / tss.sum()).sqrt())


def _conjugate_gradients(
    pairs: CausalPairs, counts: Tensor, right: Tensor, ridge: float, tolerance: float, rounding: Tensor
) -> tuple[Tensor, int]:
    """(X'X + ridge)^-1 right for all heads, no closer than the rounding of the right side makes sense; its steps."""
    inverse = (1 / (counts + ridge)).masked_fill(counts == 0, 0)
    theta, residual = torch.zeros_like(right), right.clone()
    direction = inverse * residual
    size = (residual * direction).sum((0, 2))
    enough = (tolerance**2 * size).maximum((inverse * rounding.square()).sum((0, 2)))
    steps = 0
    while (unfinished := size > enough).any():
        if steps == MAX_ITERATIONS:
            raise InputError(
                f"no fit within {steps} steps: a window of {pairs.width} ties {pairs.size} tokens too loosely "
                "together; give a ridge, or a shorter text"
            )
        steps += 1
        image = pairs.normal(direction, counts)
        if ridge:
            image.add_(direction, alpha=ridge)
        length = torch.where(unfinished, size / (direction * image).sum((0, 2)), 0)[:, None]
        theta.addcmul_(length, direction)
        residual.addcmul_(length, image, value=-1)
        preconditioned = inverse * residual
        size, before = (residual * preconditioned).sum((0, 2)), size
        direction = direction.mul_(torch.where(before > 0, size / before, 0)[:, None]).add_(preconditioned)
    return theta, steps


def _correlations(
    moments: PairMoments, counts: Tensor, centred: Tensor, theta: Tensor
) -> tuple[Float[Tensor, " head"], Float[Tensor, " head"]]:
    """Pearson's r between W and its fit over all pairs, and within rows."""
    fit_sums = moments.pairs.normal(theta, counts)
    shared, fit_squares = (theta * centred).sum((0, 2)), (theta * fit_sums).sum((0, 2))
    fit_total = fit_sums[1].sum(-1)
    rows, fit_rows = centred[1], fit_sums[1] / counts[1]
    r = _correlation(shared, moments.tss, fit_squares - fit_total.square() / moments.pairs.n_pairs)
    shared_within = shared - (rows * fit_rows).sum(-1)
    fit_within = fit_squares - (fit_sums[1] * fit_rows).sum(-1)
    if moments.pairs.saturated:
        return torch.full_like(shared, torch.nan), torch.full_like(shared, torch.nan)
    r_within_rows = _correlation(shared_within, moments.within_rows, fit_within)
    return (
        r.masked_fill(moments.is_constant(moments.tss), torch.nan),
        r_within_rows.masked_fill(moments.is_constant(moments.within_rows), torch.nan),
    )


def _correlation(shared: Tensor, squares: Tensor, fit_squares: Tensor) -> Float[Tensor, " head"]:
    """0 where the fit is constant."""
    return (shared / (squares * fit_squares).sqrt()).nan_to_num().clamp(max=1)


def _in_gauge(theta: Tensor, pairs: CausalPairs, mean: Tensor, gauge: str) -> Float[Tensor, "axis=3 head size"]:
    """Move along the three free directions until the gauge holds; the mean of W goes to a."""
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
    t = torch.arange(x.shape[-1], dtype=x.dtype, device=x.device)
    t -= t.mean()
    return (x @ t / t.square().sum().clamp(min=0.5)).unsqueeze(-1)
