"""The three-axis fit with weights by distance, against dense weighted least squares in float64."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from dense_fit import design, fit_of, fitted_entries, mask_of, weighted_reference
from drawn import normal
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from rotated_heads import true_distances

from tl_posgen.errors import InputError
from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.numbers.pair_moments import pair_moments, pair_moments_from_scores
from tl_posgen.position.decomposition.numbers.three_axis_fit import LONGEST, fit_three_axis, iid_r, solve

NEAR = (8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0)
KINDS = {
    "max(8 - d, .05)": (*NEAR, 0.05),
    "max(8 - d, .001)": (*NEAR, 0.001),
    "exp(-d / 8) + 1e-6": tuple(math.exp(-d / 8) + 1e-6 for d in range(4096)),
}


def weights_of(pairs: CausalPairs) -> torch.Tensor:
    """[query, key]"""
    given = torch.tensor(pairs.distance_weights, dtype=torch.float64)
    return given[true_distances(pairs.n_tokens).clamp(max=len(given) - 1)]


def random_qk(n: int, *, heads: int = 1, d_head: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = normal(2, heads, n, d_head, seed=seed)
    return q + 1, k + torch.linspace(0, 2, n)[:, None]


def check(pairs: CausalPairs, *, from_scores: bool = False, seed: int = 0) -> None:
    """The fit, in the norm of its weights, and both correlations are those of dense weighted least squares."""
    q, k = random_qk(pairs.n_tokens, seed=seed)
    how = {name: getattr(pairs, name) for name in ("window", "distance_weights")}
    moments = pair_moments_from_scores(q @ k.mT, **how) if from_scores else pair_moments(q, k, **how)
    fit = fit_of(moments, pairs.first_token)
    weights = weights_of(pairs)
    fitted, r, within = weighted_reference((q @ k.mT)[0], weights, pairs)
    scale = (weights / weights.max()).sqrt()[mask_of(pairs)].numpy()
    np.testing.assert_allclose(scale * fitted_entries(fit, pairs)[0], scale * fitted, atol=1e-8)
    assert [fit.r.item(), fit.r_within_rows.item()] == pytest.approx([r, within], abs=1e-8)
    assert pairs.total == pytest.approx(float(weights[mask_of(pairs)].sum()))


@pytest.mark.parametrize("first_token", [True, False])
@pytest.mark.parametrize("weights", KINDS.values(), ids=KINDS)
def test_fit_and_both_correlations_equal_dense_weighted_least_squares(weights, first_token):
    check(CausalPairs(60, first_token=first_token, distance_weights=weights))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(4, 40),
    weights=st.lists(st.floats(1e-3, 10), min_size=1, max_size=45),
    window=st.none() | st.integers(2, 45),
    first_token=st.booleans(),
    from_scores=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example(4, [5.25, 0.001, 8.66, 0.682, 5.25], None, True, True, 4)  # every distance in the band
@example(18, [0.001, 2.0, 6.0, 0.5], None, False, False, 0)  # a row of one pair, of the least weight
@example(20, [3.1824, 0.001], None, True, True, 2014)  # unit vectors of which only rounding is left
def test_any_weights_lengths_and_windows(n, weights, window, first_token, from_scores, seed):
    pairs = CausalPairs(n, window, first_token, tuple(weights))
    assume(not pairs.saturated and pairs.width > 1)
    check(pairs, from_scores=from_scores, seed=seed)


@pytest.mark.parametrize("weights", [*KINDS.values(), (1.0,), (2.0, 2.0, 0.5)])
@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_the_normal_equations_are_solved(weights, ridge):
    pairs = CausalPairs(50, window=45, distance_weights=weights)
    counts, x = pairs.counts(), normal(3, 2, 50, seed=1)
    x[0, :, pairs.width :] = 0
    right = pairs.normal(x, counts) + ridge * x
    found = solve(pairs, counts, right, ridge, 1e-12, torch.zeros_like(x))
    torch.testing.assert_close(pairs.normal(found, counts) + ridge * found, right, atol=1e-8, rtol=1e-9)


@pytest.mark.parametrize("weights", [(), (1.0, 0.0), (1.0, -2.0), (math.nan,), (1.0, math.inf)])
def test_a_weight_that_is_not_above_zero_is_refused_with_the_remedy(weights):
    with pytest.raises(InputError, match=r"weights by distance, .* above 0, .* such as 1e-6, or a window"):
        pair_moments(*random_qk(8), distance_weights=weights)


@pytest.mark.parametrize("weights", [(1e300,), (1e-300, 2e-300), (1.0, 1e-16)])
def test_weights_that_float64_cannot_hold_together_are_refused(weights):
    with pytest.raises(InputError, match="give weights about 1"):
        CausalPairs(8, distance_weights=weights)


@pytest.mark.parametrize("weights", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("window", [None, 9])
def test_chance_r_of_a_short_text_is_exact(weights, window):
    pairs = CausalPairs(24, window, distance_weights=weights)
    x, w = design(pairs).toarray(), weights_of(pairs)[mask_of(pairs)].numpy()
    spread = np.trace(np.linalg.pinv(x.T @ (w[:, None] * x), rcond=1e-13, hermitian=True) @ x.T @ (w[:, None] ** 2 * x))
    mean_part = (w**2).sum() / w.sum()
    assert iid_r(pairs) == pytest.approx(math.sqrt((spread - mean_part) / (w.sum() - mean_part)), rel=1e-6)


def test_chance_r_of_weights_is_not_known_beyond_the_longest_text():
    pairs = CausalPairs(LONGEST + 1, distance_weights=(2.0, 1.0))
    assert math.isnan(iid_r(pairs))
    assert iid_r(replace(pairs, distance_weights=(1.0,))) == pairs.iid_r


def test_chance_r_is_what_gaussian_noise_reaches():
    noise = normal(400, 48, 48, seed=6, dtype=torch.float32)
    for window, weights in ((None, (*NEAR, 0.05)), (20, (3.0, 0.1))):
        fit = fit_three_axis(pair_moments_from_scores(noise, window=window, distance_weights=weights))
        share = (fit.r.square() * fit.tss).sum() / fit.tss.sum()
        assert math.sqrt(share) == pytest.approx(iid_r(fit.pairs), rel=0.015)
        assert iid_r(fit.pairs) > replace(fit.pairs, distance_weights=(1.0,)).iid_r
