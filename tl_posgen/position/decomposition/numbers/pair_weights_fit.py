"""Three-axis fit with a weight for each pair, such as its attention, from the [query, key] matrix."""

import torch
from jaxtyping import Float, Real
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.errors import InputError
from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs, normal_blocks
from tl_posgen.position.decomposition.numbers.pair_moments import rounding_of
from tl_posgen.position.decomposition.numbers.three_axis_fit import LONGEST, Gauge, ThreeAxisFit, in_gauge
from tl_posgen.rope.bilinear_sums import sums_along_diagonals

_LEAST = 1e-12  # least weight of a pair, as a share of its head's largest
_SHIFT = 1e-13  # share added to the diagonal, which makes the free directions regular


def fit_pair_weights(
    scores: Float[Tensor, "head query key"],
    weights: Real[Tensor, "head query key"],
    pairs: CausalPairs,
    *,
    ridge: float = 0.0,
    gauge: Gauge | str = "flat_keys",
) -> ThreeAxisFit:
    r"""min over a, b, c of sum_ij w_ij (W_ij - mean W - a_{i-j} - b_i - c_j)^2 + ridge (|a|^2 + |b|^2 + |c|^2).

    Distances are eliminated exactly, and the matrix of b and c is factored head by head: O(L^3), up to LONGEST tokens.
    Means and correlations have the same weights. `iid_r` is NaN, since weights that depend on the scores change it. A
    pair has at least 1e-12 of its head's largest weight, so that every entry of a, b and c has a pair.

    Args:
        weights: not negative; entries at pairs that do not count are not read.
        pairs: the pairs that count, without distance weights.
        ridge, gauge: as in `fit_three_axis`.

    Raises:
        InputError: too many tokens, or a visible score or weight that is not finite, or a weight below 0.

    Source: three axes: Han & Ji 2025 (arXiv 2503.13305); weights by attention: ours.
    """
    refuse_long(pairs.n_tokens)
    fits = [_fit_head(*of_head, head, pairs, ridge) for head, of_head in enumerate(zip(scores, weights, strict=True))]
    theta, numbers = torch.stack([theta for theta, _ in fits], 1), torch.stack([x for _, x in fits], 1)
    r, within, mean, tss, std = numbers
    curves = pairs.spread(in_gauge(theta, pairs, mean, gauge))
    return ThreeAxisFit(r, within, *curves, tss, std, torch.full_like(r, torch.nan), pairs)


def refuse_long(n_tokens: int) -> None:
    if n_tokens > LONGEST:
        raise InputError(
            f"weights by attention form the [query, key] matrix of every head, and {n_tokens:,} tokens are more than "
            f"{LONGEST:,}; give shorter prompts, or weights by distance"
        )


def _fit_head(
    scores: Float[Tensor, "query key"], weights: Real[Tensor, "query key"], head: int, pairs: CausalPairs, ridge: float
) -> tuple[Float[Tensor, "axis=3 size"], Float[Tensor, " 5"]]:
    """Return a, b and c of one head in corner coordinates, and (r, r within rows, mean, TSS, std within rows)."""
    counted = slice(pairs.first, None)
    index = torch.arange(pairs.size, device=scores.device)
    distance = index[:, None] - index
    hidden = (distance < 0) | (distance >= pairs.width)
    w, p = (double(x[counted, counted]).masked_fill(hidden, 0) for x in (scores, weights))
    for what, x, wrong in (("score", w, ~w.isfinite()), ("weight", p, ~(p.isfinite() & (p >= 0)))):
        if wrong.any():
            query, key = wrong.nonzero()[0].tolist()
            raise InputError(
                f"a visible {what} of head {head} is {float(x[query, key])} at token {query + pairs.first}; "
                "give finite scores, and weights of 0 or more"
            )
    p = p.clamp(min=_LEAST * float(p.max())).masked_fill_(hidden, 0)
    total = p.sum()
    mean = (p * w).sum() / total
    w -= mean
    # (X'PX + ridge)^-1 X'P w: a, b and c in the order of tokens, the distances eliminated
    of_distances, mixed, tokens = normal_blocks(p)
    at_distance = (1 / (of_distances + ridge)).masked_fill(of_distances == 0, 0)
    means = at_distance[:, None] * mixed  # over the pairs at a distance
    matrix = tokens - mixed.T @ means
    matrix.diagonal().add_(ridge)
    scale = tokens.diagonal().add(ridge).rsqrt()
    scaled = scale[:, None] * matrix * scale
    scaled.diagonal().add_(_SHIFT)
    factor, weighted = torch.linalg.cholesky(scaled), p * w
    by_distance = sums_along_diagonals(weighted[None])[0]
    right = torch.cat([weighted.sum(1), weighted.sum(0)]) - means.T @ by_distance
    x = torch.zeros_like(right)
    for _ in range(2):  # the second step refines the first against the shift and rounding
        left = scale * (right - matrix @ x)
        x += scale * torch.cholesky_solve(left[:, None], factor)[:, 0]
    theta = torch.stack([at_distance * by_distance - means @ x, *x.view(2, -1)])
    theta[0, pairs.width :] = 0
    fitted = theta[0][distance.clamp_(min=0)] + theta[1][:, None] + theta[2]
    tss, r = (p * w.square()).sum(), [torch.full_like(mean, torch.nan)] * 2
    for number, dims in enumerate(() if pairs.saturated else ((0, 1), (1,))):
        centred, fit = (_centred(values, p, dims) for values in (w, fitted))
        shared, squares, of_fit = ((p * u * v).sum() for u, v in ((centred, fit), (centred, centred), (fit, fit)))
        if squares > rounding_of(tss, total, mean):
            r[number] = (shared / (squares * of_fit).sqrt()).nan_to_num().clamp(-1, 1)
    theta[1] = theta[1].flip(-1)
    within = (p * _centred(w, p, (1,)).square()).sum() / total
    return theta, torch.stack([*r, mean, tss, within.sqrt()])


def _centred(x: Tensor, p: Tensor, dims: tuple[int, ...]) -> Tensor:
    return x - (p * x).sum(dims, keepdim=True) / p.sum(dims, keepdim=True)
