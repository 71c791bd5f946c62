"""The three-axis fit by dense least squares on the explicit design matrix, in float64: what tests hold it against."""

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.linalg import lsqr

from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.numbers.pair_moments import (
    pair_moments,
    pair_moments_from_scores,
)
from tl_posgen.position.decomposition.numbers.three_axis_fit import ThreeAxisFit, fit_three_axis

PAIRS = [
    CausalPairs(24),
    CausalPairs(24, first_token=False),
    CausalPairs(24, diagonal=False),
    CausalPairs(24, first_token=False, diagonal=False),
    CausalPairs(24, window=7),
    CausalPairs(24, window=7, first_token=False, diagonal=False),
    CausalPairs(24, window=2),
    CausalPairs(24, window=1),
    CausalPairs(3),
    CausalPairs(2),
    CausalPairs(1),
]


def listed(pairs: CausalPairs) -> list[tuple[int, int]]:
    everything = torch.arange(pairs.n_tokens)
    return pairs.mask(everything, everything).nonzero().tolist()


def design(pairs: CausalPairs) -> csr_array:
    """One row a pair, one column a distance, a query or a key."""
    query, key = np.array(listed(pairs)).T
    n, rows = pairs.n_tokens, np.arange(len(query))
    columns = np.stack([query - key, n + query, 2 * n + key], 1)
    return csr_array((np.ones(columns.size), (np.repeat(rows, 3), columns.ravel())), shape=(len(query), 3 * n))


def options(pairs: CausalPairs) -> dict:
    return {"window": pairs.window, "first_token": pairs.first_token, "diagonal": pairs.diagonal}


def three_axis_from_qk(q, k, scale=1.0, *, window=None, first_token=True, diagonal=True, **how) -> ThreeAxisFit:
    moments = pair_moments(q, k, scale, window=window, diagonal=diagonal)
    return fit_three_axis(moments if first_token else moments.without_first_token, **how)


def three_axis_from_scores(scores, *, window=None, first_token=True, diagonal=True, **how) -> ThreeAxisFit:
    moments = pair_moments_from_scores(scores, window=window, diagonal=diagonal)
    return fit_three_axis(moments if first_token else moments.without_first_token, **how)


def random_qk(n: int, *, heads: int = 2, d_head: int = 6, seed: int = 0, constant: float = 5.0):
    """Float32 queries and keys whose scores have a large constant, a large query part and a large key part."""
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, heads, n, d_head, generator=generator)
    return q + constant * torch.randn(heads, 1, d_head, generator=generator), k + constant


def entries(scores: torch.Tensor, pairs: CausalPairs) -> np.ndarray:
    query, key = torch.tensor(listed(pairs)).T
    return scores[:, query, key].double().numpy()


def reference(scores: torch.Tensor, pairs: CausalPairs) -> tuple[np.ndarray, np.ndarray]:
    """Pearson's r with the lsqr fit of every head, and the fitted values."""
    x, w = design(pairs), entries(scores, pairs)
    solutions = [lsqr(x, row - row.mean(), atol=1e-13, btol=1e-13, conlim=0)[0] for row in w]
    fitted = np.stack([x @ solution + row.mean() for solution, row in zip(solutions, w, strict=True)])
    return np.array([np.corrcoef(*both)[0, 1] for both in zip(w, fitted, strict=True)]), fitted


def fitted_entries(fit: ThreeAxisFit, pairs: CausalPairs) -> np.ndarray:
    everything = torch.arange(pairs.n_tokens)
    return entries(fit.fitted(everything, everything), pairs)


def within_rows(values: np.ndarray, pairs: CausalPairs) -> np.ndarray:
    query = np.array(listed(pairs))[:, 0]
    return values - np.stack([values[:, query == i].mean(1) for i in query], 1)


# Counts, rank and the normal equations
