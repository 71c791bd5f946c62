"""The three-axis fit with a weight for each pair, against dense and Toeplitz weighted least squares."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.errors import InputError
from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.numbers.pair_moments import pair_moments_from_scores
from tl_posgen.position.decomposition.numbers.pair_weights_fit import LONGEST, fit_pair_weights
from tl_posgen.position.decomposition.numbers.three_axis_fit import fit_three_axis

SETS = [{}, {"window": 7}, {"first_token": False}, {"window": 9, "first_token": False, "diagonal": False}]


def scores_and_weights(n: int, seed: int = 0, heads: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores with their own attention as weights: from 1 down to some 1e-4."""
    generator = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(heads, n, n, generator=generator, dtype=torch.float64)
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    return scores, scores.masked_fill(hidden, -math.inf).softmax(-1)


def dense(scores: torch.Tensor, weights: torch.Tensor, pairs: CausalPairs, ridge: float = 0.0) -> np.ndarray:
    """Fitted values of one head on its pairs, by lstsq on the rows times sqrt(w) and rows of the ridge below them."""
    everything, n = torch.arange(pairs.n_tokens), pairs.n_tokens
    query, key = pairs.mask(everything, everything).nonzero().T.numpy()
    x = np.zeros((len(query), 3 * n))
    for axis, index in enumerate((query - key, query, key)):
        x[np.arange(len(query)), axis * n + index] = 1
    y, w = (values.numpy()[query, key] for values in (scores, weights))
    mean = np.average(y, weights=w)
    rows = np.concatenate([np.sqrt(w)[:, None] * x, math.sqrt(ridge) * np.eye(3 * n)])
    right = np.concatenate([np.sqrt(w) * (y - mean), np.zeros(3 * n)])
    return x @ np.linalg.lstsq(rows, right, rcond=1e-13)[0] + mean


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(n=st.integers(5, 26), kind=st.sampled_from(SETS), ridge=st.sampled_from([0.0, 0.5]), seed=st.integers(0, 2**31))
def test_fit_and_correlations_equal_dense_weighted_least_squares(n, kind, ridge, seed):
    pairs = CausalPairs(n, **kind)
    scores, weights = scores_and_weights(n, seed, heads=1)
    fit = fit_pair_weights(scores, weights, pairs, ridge=ridge)
    everything = torch.arange(n)
    mask = pairs.mask(everything, everything)
    expected = dense(scores[0], weights[0], pairs, ridge)
    np.testing.assert_allclose(fit.fitted(everything, everything)[0][mask].numpy(), expected, atol=1e-8)
    w, y = weights[0][mask].numpy(), scores[0][mask].numpy()
    if pairs.saturated:
        assert fit.r.isnan().all()
        return
    covariance = np.cov(y, expected, aweights=w)
    assert fit.r.item() == pytest.approx(covariance[0, 1] / math.sqrt(covariance[0, 0] * covariance[1, 1]), abs=1e-8)


@pytest.mark.parametrize("kind", SETS, ids=str)
@pytest.mark.parametrize("ridge", [0.0, 0.4])
def test_weights_by_distance_are_a_special_case(kind, ridge):
    given, n = (8.0, 5.0, 1.0, 0.02), 40
    scores, _ = scores_and_weights(n)
    index = torch.arange(n)
    weights = torch.tensor(given, dtype=torch.float64)[(index[:, None] - index).clamp(0, 3)].expand(2, -1, -1)
    how = {"window": kind.get("window"), "diagonal": kind.get("diagonal", True)}
    moments = pair_moments_from_scores(scores, **how, distance_weights=given)
    expected = fit_three_axis(moments if kind.get("first_token", True) else moments.without_first_token, ridge=ridge)
    found = fit_pair_weights(scores, weights, CausalPairs(n, **kind), ridge=ridge)
    for name in ("r", "r_within_rows", "a", "b", "c", "tss", "n_distance", "n_query", "n_key"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), atol=1e-8, rtol=1e-8, equal_nan=True)


def test_pairs_without_attention_count_next_to_nothing_and_leave_no_entry_open():
    scores, weights = scores_and_weights(30)
    torch.manual_seed(1)
    weights = weights.where(torch.rand(30, 30) < 0.5, 0)
    weights[:, :, 7] = 0  # a key that nobody attends to
    fit = fit_pair_weights(scores, weights, CausalPairs(30))
    assert fit.fitted(torch.arange(30), torch.arange(30))[:, torch.ones(30, 30).tril().bool()].isfinite().all()
    again = fit_pair_weights(scores, 5 * weights, CausalPairs(30))
    torch.testing.assert_close(again.r, fit.r)


def test_hidden_entries_are_not_read():
    scores, weights = scores_and_weights(12)
    hidden = torch.ones(12, 12).triu(1).bool()
    plain = fit_pair_weights(scores, weights, CausalPairs(12))
    other = fit_pair_weights(scores.masked_fill(hidden, -math.inf), weights.masked_fill(hidden, -1), CausalPairs(12))
    assert torch.equal(plain.r, other.r)


def test_what_cannot_be_fitted_is_refused_with_the_remedy():
    scores, weights = scores_and_weights(12)
    bad = weights.clone()
    bad[1, 5, 2] = -0.5
    with pytest.raises(InputError, match=r"visible weight of head 1 is -0.5 at token 5; .* 0 or more"):
        fit_pair_weights(scores, bad, CausalPairs(12))
    bad = scores.clone()
    bad[0, 3, 1] = math.nan
    with pytest.raises(InputError, match="visible score of head 0 is nan at token 3"):
        fit_pair_weights(bad, weights, CausalPairs(12))
    long = torch.zeros(1, 1, 1).expand(1, LONGEST + 1, LONGEST + 1)
    with pytest.raises(InputError, match=r"1,025 tokens are more than 1,024; give shorter prompts, or weights by dist"):
        fit_pair_weights(long, long, CausalPairs(LONGEST + 1))


def test_constant_scores_have_no_r():
    _, weights = scores_and_weights(12)
    fit = fit_pair_weights(torch.full((2, 12, 12), 3.0), weights, CausalPairs(12))
    assert fit.r.isnan().all()
    assert fit.r_within_rows.isnan().all()


@pytest.mark.parametrize(("mean", "size", "constant"), [(3.0, 1e-8, True), (3.0, 1e-5, False), (0.0, 1e-40, True)])
def test_what_rounding_leaves_has_no_r(mean, size, constant):
    """As in the fit of all pairs alike: float32 cannot tell such scores from a constant, or from zero."""
    scores, weights = scores_and_weights(12)
    fit = fit_pair_weights(mean + size * scores, weights, CausalPairs(12))
    assert fit.r.isnan().all() == constant
    alike = fit_three_axis(pair_moments_from_scores(mean + size * scores))
    assert torch.equal(fit.r.isnan(), alike.r.isnan())


def test_scores_constant_within_rows_have_r_but_no_r_within_rows():
    _, weights = scores_and_weights(12)
    scores = torch.randn(2, 12, 1, generator=torch.Generator().manual_seed(0)).expand(2, 12, 12)
    fit = fit_pair_weights(scores, weights, CausalPairs(12))
    np.testing.assert_allclose(fit.r, 1)
    assert fit.r_within_rows.isnan().all()


def test_a_bad_score_is_named_by_its_token_where_the_first_is_left_out():
    scores, weights = scores_and_weights(12)
    scores[1, 4, 2] = math.inf
    with pytest.raises(InputError, match="visible score of head 1 is inf at token 4"):
        fit_pair_weights(scores, weights, CausalPairs(12, first_token=False))
