"""The three-axis fit with weights by distance, against dense weighted least squares in float64."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tl_posgen.errors import InputError
from tl_posgen.position.decomposition.numbers import normal_equations as equations
from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.numbers.pair_moments import pair_moments, pair_moments_from_scores
from tl_posgen.position.decomposition.numbers.three_axis_fit import fit_three_axis, iid_r

NEAR = (8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0)
KINDS = {
    "max(8 - d, .05)": (*NEAR, 0.05),
    "max(8 - d, .001)": (*NEAR, 0.001),
    "exp(-d / 8) + 1e-6": tuple(math.exp(-d / 8) + 1e-6 for d in range(4096)),
}
MOST = st.floats(1e-3, 10)


def listed(pairs: CausalPairs) -> tuple[np.ndarray, np.ndarray]:
    everything = torch.arange(pairs.n_tokens)
    query, key = pairs.mask(everything, everything).nonzero().T.numpy()
    return query, key


def dense(scores: torch.Tensor, pairs: CausalPairs) -> tuple[np.ndarray, float, float]:
    """Fitted values by lstsq on the rows times sqrt(w), weighted r, and weighted r within rows, of one head."""
    (query, key), n = listed(pairs), pairs.n_tokens
    given = np.array(pairs.distance_weights)
    w = given[np.minimum(query - key, len(given) - 1)]
    x = np.zeros((len(query), 3 * n))
    for axis, index in enumerate((query - key, query, key)):
        x[np.arange(len(query)), axis * n + index] = 1
    y = scores.double().numpy()[query, key]
    fit = x @ np.linalg.lstsq(np.sqrt(w)[:, None] * x, np.sqrt(w) * y, rcond=1e-13)[0]
    rows = np.bincount(query, w, n)

    def within(values: np.ndarray) -> np.ndarray:
        return values - (np.bincount(query, w * values, n) / np.where(rows, rows, 1))[query]

    def correlation(one: np.ndarray, other: np.ndarray) -> float:
        return float((w * one * other).sum() / math.sqrt((w * one**2).sum() * (w * other**2).sum()))

    centred = (values - np.average(values, weights=w) for values in (y, fit))
    return fit, correlation(*centred), correlation(within(y), within(fit))


def random_qk(n: int, *, heads: int = 1, d_head: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, heads, n, d_head, generator=generator, dtype=torch.float64)
    return q + 1, k + torch.linspace(0, 2, n)[:, None]


@pytest.mark.parametrize("first_token", [True, False])
@pytest.mark.parametrize("weights", KINDS.values(), ids=KINDS)
def test_fit_and_both_correlations_equal_dense_weighted_least_squares(weights, first_token):
    q, k = random_qk(60)
    moments = pair_moments(q, k, distance_weights=weights)
    fit = fit_three_axis(moments if first_token else moments.without_first_token)
    values, r, within = dense((q @ k.mT)[0], fit.pairs)
    found = fit.fitted(torch.arange(60), torch.arange(60))[0].numpy()[listed(fit.pairs)]
    np.testing.assert_allclose(found, values, atol=1e-8)
    assert fit.r.item() == pytest.approx(r, abs=1e-8)
    assert fit.r_within_rows.item() == pytest.approx(within, abs=1e-8)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(4, 40),
    weights=st.lists(MOST, min_size=1, max_size=45),
    window=st.none() | st.integers(2, 45),
    diagonal=st.booleans(),
    first_token=st.booleans(),
    from_scores=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example(4, [5.25, 0.001, 8.66, 0.682, 5.25], None, True, True, True, 4)  # every distance in the band
@example(20, [3.1824, 0.001], None, True, True, True, 2014)  # unit vectors of which only rounding is left
def test_any_weights_lengths_and_windows(n, weights, window, diagonal, first_token, from_scores, seed):
    pairs = CausalPairs(n, window, first_token, diagonal, tuple(weights))
    assume(not pairs.saturated and pairs.width > 1)
    q, k = random_qk(n, seed=seed)
    how = {"window": window, "diagonal": diagonal, "distance_weights": weights}
    moments = pair_moments_from_scores(q @ k.mT, **how) if from_scores else pair_moments(q, k, **how)
    fit = fit_three_axis(moments if first_token else moments.without_first_token)
    values, r, within = dense((q @ k.mT)[0], pairs)
    found = fit.fitted(torch.arange(n), torch.arange(n))[0].numpy()[listed(pairs)]
    np.testing.assert_allclose(found, values, atol=1e-8)
    assert fit.r.item() == pytest.approx(r, abs=1e-8)
    assert fit.r_within_rows.item() == pytest.approx(within, abs=1e-8)
    total = sum(weights[min(d, len(weights) - 1)] for d in np.subtract(*listed(pairs)))
    assert pairs.total == pytest.approx(total)


@pytest.mark.parametrize("weights", [*KINDS.values(), (1.0,), (2.0, 2.0, 0.5)])
@pytest.mark.parametrize("band", [0, 8, 40])
@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_with_any_band_the_normal_equations_are_solved(weights, band, ridge, monkeypatch):
    monkeypatch.setattr(equations, "preconditioner_band", lambda pairs: min(band, pairs.size))
    pairs = CausalPairs(50, window=45, distance_weights=weights)
    counts, x = pairs.counts(), torch.randn(3, 2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x[0, :, pairs.width :] = 0
    right = pairs.normal(x, counts) + ridge * x
    found, _ = equations.solve(pairs, counts, right, ridge, 1e-12, torch.zeros_like(x))
    torch.testing.assert_close(pairs.normal(found, counts) + ridge * found, right, atol=1e-8, rtol=1e-9)


@pytest.mark.parametrize("n", [256, 1024])
@pytest.mark.parametrize("weights", KINDS.values(), ids=KINDS)
def test_steps_stay_few_at_any_length_and_the_diagonal_alone_takes_more(weights, n, monkeypatch):
    q, k = random_qk(n)
    moments = pair_moments(q, k, distance_weights=weights)
    fit = fit_three_axis(moments)
    assert fit.iterations <= 25
    monkeypatch.setattr(equations, "preconditioner_band", lambda pairs: 0)
    slow = fit_three_axis(moments)
    assert slow.iterations >= fit.iterations
    torch.testing.assert_close(slow.r, fit.r)


@pytest.mark.parametrize("pairs", [CausalPairs(300, window=2), CausalPairs(300, window=30)], ids=str)
def test_a_short_window_needs_few_steps_too(pairs):
    q, k = random_qk(300)
    assert fit_three_axis(pair_moments(q, k, window=pairs.window)).iterations < 12


def test_a_band_is_chosen_where_far_tokens_are_tied_loosely():
    wanted = {None: 0, 512: 128, 64: 64, 2: 64}
    assert {window: equations.preconditioner_band(CausalPairs(1024, window)) for window in wanted} == wanted
    assert [
        equations.preconditioner_band(CausalPairs(n, distance_weights=(*NEAR, 0.001))) for n in (20, 256, 4096)
    ] == [20, 64, 64]
    assert equations.preconditioner_band(CausalPairs(2**17, window=4)) == 0  # its blocks would not fit


def test_ridge_shrinks_in_units_of_weight():
    q, k = random_qk(30)
    weights = KINDS["max(8 - d, .05)"]
    fits = [
        fit_three_axis(pair_moments(q, k, distance_weights=[c * w for w in weights]), ridge=c * 0.5) for c in (1.0, 3.0)
    ]
    torch.testing.assert_close(fits[0].a, fits[1].a)
    torch.testing.assert_close(fits[0].r, fits[1].r)


def test_equal_weights_are_no_weights():
    q, k = random_qk(40)
    plain, doubled = fit_three_axis(pair_moments(q, k)), fit_three_axis(pair_moments(q, k, distance_weights=(2.0, 2.0)))
    torch.testing.assert_close(doubled.c, plain.c)
    torch.testing.assert_close(doubled.r, plain.r)
    torch.testing.assert_close(doubled.tss, 2 * plain.tss)
    assert torch.equal(doubled.n_distance, plain.n_distance)


@pytest.mark.parametrize("weights", [(), (1.0, 0.0), (1.0, -2.0), (math.nan,), (1.0, math.inf)])
def test_a_weight_that_is_not_above_zero_is_refused_with_the_remedy(weights):
    with pytest.raises(InputError, match=r"weights by distance, .* above 0, .* such as 1e-6, or a window"):
        pair_moments(*random_qk(8), distance_weights=weights)


def test_chance_r_is_what_gaussian_noise_reaches():
    noise = torch.randn(400, 48, 48, generator=torch.Generator().manual_seed(6))
    for pairs in (CausalPairs(48, distance_weights=(*NEAR, 0.05)), CausalPairs(48, 20, distance_weights=(3.0, 0.1))):
        fit = fit_three_axis(
            pair_moments_from_scores(noise, window=pairs.window, distance_weights=pairs.distance_weights)
        )
        share = (fit.r.square() * fit.tss).sum() / fit.tss.sum()
        assert math.sqrt(share) == pytest.approx(iid_r(pairs), rel=0.015)
        assert iid_r(pairs) > replace(pairs, distance_weights=(1.0,)).iid_r


@pytest.mark.parametrize("weights", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("window", [None, 9])
def test_chance_r_of_a_short_text_is_exact(weights, window):
    n, pairs = 24, CausalPairs(24, window, distance_weights=weights)
    query, key = listed(pairs)
    w = np.array(weights)[np.minimum(query - key, len(weights) - 1)]
    x = np.stack([np.eye(n)[of] for of in (query - key, query, key)], 1).reshape(len(query), -1)
    spread = np.trace(np.linalg.pinv(x.T @ (w[:, None] * x), rcond=1e-13, hermitian=True) @ x.T @ (w[:, None] ** 2 * x))
    mean_part = (w**2).sum() / w.sum()
    expected = math.sqrt((spread - mean_part) / (w.sum() - mean_part))
    assert iid_r(pairs) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("weights", [(1e300,), (1e-300, 2e-300), (1.0, 1e-16)])
def test_weights_that_float64_cannot_hold_together_are_refused(weights):
    with pytest.raises(InputError, match="give weights about 1"):
        CausalPairs(8, distance_weights=weights)
