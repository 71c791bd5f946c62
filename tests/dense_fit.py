"""The three-axis fit by least squares on the explicit design matrix, in float64: what tests hold it against."""

import math

import numpy as np
import torch
from drawn import normal
from scipy.sparse import csr_array
from scipy.sparse.linalg import lsqr

from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.numbers.pair_moments import PairMoments, pair_moments, pair_moments_from_scores
from tl_posgen.position.decomposition.numbers.three_axis_fit import ThreeAxisFit, fit_three_axis

PAIRS = [
    *(CausalPairs(24, window) for window in (None, 7, 2, 1)),
    *(CausalPairs(24, window, first_token=False) for window in (None, 7)),
    *map(CausalPairs, (3, 2, 1)),
]


def mask_of(pairs: CausalPairs) -> torch.Tensor:
    everything = torch.arange(pairs.n_tokens)
    return pairs.mask(everything, everything)


def design(pairs: CausalPairs) -> csr_array:
    """One row a pair, one column a distance, a query or a key."""
    query, key = mask_of(pairs).nonzero().T.numpy()
    n, rows = pairs.n_tokens, np.arange(len(query))
    columns = np.stack([query - key, n + query, 2 * n + key], 1)
    return csr_array((np.ones(columns.size), (np.repeat(rows, 3), columns.ravel())), shape=(len(query), 3 * n))


def entries(scores: torch.Tensor, pairs: CausalPairs) -> np.ndarray:
    """[head, pair]: the scores of the pairs that count."""
    return scores[:, mask_of(pairs)].double().numpy()


def reference(scores: torch.Tensor, pairs: CausalPairs) -> tuple[np.ndarray, np.ndarray]:
    """Pearson's r with the lsqr fit of every head, and the fitted values."""
    x, w = design(pairs), entries(scores, pairs)
    solutions = [lsqr(x, row - row.mean(), atol=1e-13, btol=1e-13, conlim=0)[0] for row in w]
    fitted = np.stack([x @ solution + row.mean() for solution, row in zip(solutions, w, strict=True)])
    return np.array([np.corrcoef(*both)[0, 1] for both in zip(w, fitted, strict=True)]), fitted


def weighted_reference(
    scores: torch.Tensor, weights: torch.Tensor, pairs: CausalPairs, ridge: float = 0.0
) -> tuple[np.ndarray, float, float]:
    """Fitted values of one head by lstsq on the rows times sqrt(w), weighted r, and weighted r within rows."""
    x, (y,), (w,) = design(pairs).toarray(), entries(scores[None], pairs), entries(weights[None], pairs)
    mean = np.average(y, weights=w)
    rows = np.concatenate([np.sqrt(w)[:, None] * x, math.sqrt(ridge) * np.eye(x.shape[1])])
    right = np.concatenate([np.sqrt(w) * (y - mean), np.zeros(x.shape[1])])
    fitted = x @ np.linalg.lstsq(rows, right, rcond=1e-13)[0] + mean
    query = mask_of(pairs).nonzero()[:, 0].numpy()
    sums = np.bincount(query, w)

    def correlation(one: np.ndarray, other: np.ndarray) -> float:
        return float((w * one * other).sum() / math.sqrt((w * one**2).sum() * (w * other**2).sum()))

    centred = [values - np.average(values, weights=w) for values in (y, fitted)]
    within = [values - (np.bincount(query, w * values) / np.where(sums, sums, 1))[query] for values in (y, fitted)]
    return fitted, correlation(*centred), correlation(*within)


def dense_residual(scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """[head, query, key]: what least squares on a_{i-j} + b_i + c_j leaves of the visible scores."""
    query, key = visible.nonzero(as_tuple=True)
    eye = torch.eye(len(visible), dtype=torch.float64)
    x = torch.cat([eye[query - key], eye[query], eye[key]], 1)
    target = scores[:, query, key].mT
    left = torch.zeros_like(scores)
    left[:, query, key] = (target - x @ torch.linalg.lstsq(x, target, driver="gelsd").solution).mT
    return left


def random_qk(n: int, *, heads: int = 2, d_head: int = 6, seed: int = 0, constant: float = 5.0):
    """Float32 queries and keys whose scores have a large constant, a large query part and a large key part."""
    q, k = normal(2, heads, n, d_head, seed=seed, dtype=torch.float32)
    return q + constant * normal(heads, 1, d_head, seed=seed + 1, dtype=torch.float32), k + constant


def fit_of(moments: PairMoments, first_token: bool = True, **how) -> ThreeAxisFit:
    return fit_three_axis(moments if first_token else moments.without_first_token, **how)


def three_axis_from_qk(q, k, scale=1.0, *, window=None, first_token=True, **how) -> ThreeAxisFit:
    return fit_of(pair_moments(q, k, scale, window=window), first_token, **how)


def three_axis_from_scores(scores, *, window=None, first_token=True, **how) -> ThreeAxisFit:
    return fit_of(pair_moments_from_scores(scores, window=window), first_token, **how)


def options(pairs: CausalPairs) -> dict:
    return {"window": pairs.window, "first_token": pairs.first_token}


def fitted_entries(fit: ThreeAxisFit, pairs: CausalPairs) -> np.ndarray:
    everything = torch.arange(pairs.n_tokens)
    return entries(fit.fitted(everything, everything), pairs)
