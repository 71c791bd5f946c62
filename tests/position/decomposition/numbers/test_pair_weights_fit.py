"""The three-axis fit with a weight for each pair, against dense and Toeplitz weighted least squares."""

import math

import numpy as np
import pytest
import torch
from dense_fit import fit_of, fitted_entries, mask_of, weighted_reference
from drawn import normal
from hypothesis import given, settings
from hypothesis import strategies as st
from rotated_heads import true_distances

from tl_posgen.errors import InputError
from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.numbers.pair_moments import pair_moments_from_scores
from tl_posgen.position.decomposition.numbers.pair_weights_fit import fit_pair_weights
from tl_posgen.position.decomposition.numbers.three_axis_fit import LONGEST, fit_three_axis

SETS = [{}, {"window": 7}, {"first_token": False}, {"window": 9, "first_token": False}]
PAIRS = CausalPairs(12)


def scores_and_weights(n: int = 12, seed: int = 0, heads: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores with their own attention as weights: from 1 down to some 1e-4."""
    scores = 2 * normal(heads, n, n, seed=seed)
    return scores, scores.masked_fill(~mask_of(CausalPairs(n)), -math.inf).softmax(-1)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(n=st.integers(5, 26), kind=st.sampled_from(SETS), ridge=st.sampled_from([0.0, 0.5]), seed=st.integers(0, 2**31))
def test_fit_and_correlations_equal_dense_weighted_least_squares(n, kind, ridge, seed):
    pairs = CausalPairs(n, **kind)
    scores, weights = scores_and_weights(n, seed, heads=1)
    fit = fit_pair_weights(scores, weights, pairs, ridge=ridge)
    fitted, r, within = weighted_reference(scores[0], weights[0], pairs, ridge)
    np.testing.assert_allclose(fitted_entries(fit, pairs)[0], fitted, atol=1e-8)
    expected = [math.nan] * 2 if pairs.saturated else [r, within]
    assert [fit.r.item(), fit.r_within_rows.item()] == pytest.approx(expected, abs=1e-8, nan_ok=True)


@pytest.mark.parametrize("kind", SETS, ids=str)
@pytest.mark.parametrize("ridge", [0.0, 0.4])
def test_weights_by_distance_are_a_special_case(kind, ridge):
    given, n = (8.0, 5.0, 1.0, 0.02), 40
    scores, _ = scores_and_weights(n)
    weights = torch.tensor(given, dtype=torch.float64)[true_distances(n).clamp(max=3)].expand(2, -1, -1)
    how = {"window": kind.get("window"), "distance_weights": given}
    expected = fit_of(pair_moments_from_scores(scores, **how), kind.get("first_token", True), ridge=ridge)
    found = fit_pair_weights(scores, weights, CausalPairs(n, **kind), ridge=ridge)
    for name in ("r", "r_within_rows", "a", "b", "c", "tss"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), atol=1e-8, rtol=1e-8, equal_nan=True)


def test_hidden_entries_are_not_read():
    scores, weights = scores_and_weights()
    hidden = ~mask_of(PAIRS)
    plain = fit_pair_weights(scores, weights, PAIRS)
    other = fit_pair_weights(scores.masked_fill(hidden, -math.inf), weights.masked_fill(hidden, -1), PAIRS)
    assert torch.equal(plain.r, other.r)


@pytest.mark.parametrize(
    ("which", "at", "value", "pairs", "message"),
    [
        (1, (1, 5, 2), -0.5, PAIRS, r"visible weight of head 1 is -0.5 at token 5; .* 0 or more"),
        (0, (0, 3, 1), math.nan, PAIRS, "visible score of head 0 is nan at token 3"),
        (0, (1, 4, 2), math.inf, CausalPairs(12, first_token=False), "visible score of head 1 is inf at token 4"),
    ],
)
def test_what_cannot_be_fitted_is_refused_with_the_remedy(which, at, value, pairs, message):
    given = scores_and_weights()
    given[which][at] = value
    with pytest.raises(InputError, match=message):
        fit_pair_weights(*given, pairs)


def test_too_many_tokens_are_refused():
    long = torch.zeros(1, 1, 1).expand(1, LONGEST + 1, LONGEST + 1)
    with pytest.raises(InputError, match=r"1,025 tokens are more than 1,024; give shorter prompts, or weights by dist"):
        fit_pair_weights(long, long, CausalPairs(LONGEST + 1))


@pytest.mark.parametrize(
    ("mean", "size", "constant"), [(3.0, 0.0, True), (3.0, 1e-8, True), (3.0, 1e-5, False), (0.0, 1e-40, True)]
)
def test_what_rounding_leaves_has_no_r(mean, size, constant):
    """As in the fit of all pairs alike: float32 cannot tell such scores from a constant, or from zero."""
    scores, weights = scores_and_weights()
    scores = mean + size * scores
    fit, alike = fit_pair_weights(scores, weights, PAIRS), fit_three_axis(pair_moments_from_scores(scores))
    for r in (fit.r, fit.r_within_rows, alike.r):
        assert (r.isnan() == constant).all()
    rows = fit_pair_weights(normal(2, 12, 1).expand(2, 12, 12), weights, PAIRS)  # constant within rows alone
    np.testing.assert_allclose(rows.r, 1)
    assert rows.r_within_rows.isnan().all()
