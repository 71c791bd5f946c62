"""The three-axis fit against dense least squares on the explicit design matrix, in float64."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from dense_fit import (
    PAIRS,
    design,
    entries,
    fitted_entries,
    mask_of,
    options,
    random_qk,
    reference,
    three_axis_from_qk,
    three_axis_from_scores,
    weighted_reference,
)
from drawn import normal
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.errors import InputError
from tl_posgen.position.decomposition.numbers import three_axis_fit
from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.numbers.pair_moments import pair_moments, pair_moments_from_scores
from tl_posgen.position.decomposition.numbers.three_axis_fit import fit_three_axis, solve_triangle
from tl_posgen.rope import bilinear_sums


def noise(*shape: int, seed: int = 8) -> torch.Tensor:
    return normal(*shape, seed=seed)


# Counts, rank and the normal equations


@pytest.mark.parametrize("pairs", PAIRS, ids=str)
def test_rank_of_the_pairs_is_that_of_the_design_matrix(pairs):
    assert pairs.n_pairs == int(mask_of(pairs).sum())
    assert pairs.rank == np.linalg.matrix_rank(design(pairs).toarray())


@pytest.mark.parametrize("pairs", PAIRS, ids=str)
def test_what_follows_from_the_pairs_is_that_of_the_mask_and_no_field(pairs):
    assert [one.name for one in fields(pairs)] == ["n_tokens", "window", "first_token", "distance_weights"]
    query, key = mask_of(pairs).nonzero().T
    distance = query - key
    assert [int(one.min()) for one in (distance, query, key)] == [0, pairs.first, pairs.first]
    assert (pairs.width, pairs.size, pairs.size) == tuple(len(one.unique()) for one in (distance, query, key))
    other = replace(pairs, n_tokens=pairs.n_tokens + 1)
    assert other.n_pairs == int(mask_of(other).sum())  # a copy counts again


@pytest.mark.parametrize("pairs", PAIRS, ids=str)
def test_normal_operator_is_the_dense_normal_matrix(pairs):
    x = noise(3, 2, pairs.size)
    x[0, :, pairs.width :] = 0
    matrix = torch.from_numpy((design(pairs).T @ design(pairs)).toarray())
    dense = torch.cat([part.nan_to_num() for part in pairs.spread(x)], -1) @ matrix
    torch.testing.assert_close(torch.cat(pairs.spread(pairs.normal(x, pairs.counts()), fill=0.0), -1), dense)


# r against lsqr


@pytest.mark.parametrize("short", [-1000, 1000], ids=["long route", "short route"])
@pytest.mark.parametrize(
    "pairs", [*PAIRS[:6], CausalPairs(150), CausalPairs(150, window=70, first_token=False)], ids=str
)
def test_r_equals_lsqr(pairs, short, monkeypatch):
    monkeypatch.setattr(bilinear_sums, "SHORT", short)
    q, k = random_qk(pairs.n_tokens, heads=2 if pairs.n_tokens < 100 else 1)
    scores = 0.3 * q.double() @ k.double().mT
    r, fitted = reference(scores, pairs)
    fit = three_axis_from_qk(q, k, 0.3, **options(pairs))
    np.testing.assert_allclose(fitted_entries(fit, pairs), fitted, atol=2e-4)
    if pairs.saturated:
        assert fit.r.isnan().all()
        assert fit.r_within_rows.isnan().all()
        return
    np.testing.assert_allclose(fit.r, r, atol=1e-6)
    if pairs.n_tokens < 100:
        within = [weighted_reference(one, torch.ones_like(one), pairs)[2] for one in scores]
        np.testing.assert_allclose(fit.r_within_rows, within, atol=1e-6)


@pytest.mark.parametrize(("n", "d_head", "constant", "far"), [(400, 32, 5.0, 0), (200, 6, 0.0, 1000)])
def test_long_texts_and_constants_a_thousand_times_the_spread_cost_no_digits(n, d_head, constant, far):
    q, k = random_qk(n, heads=1, d_head=d_head, constant=constant)
    k = k + far
    r, _ = reference(q.double() @ k.double().mT, CausalPairs(n))
    np.testing.assert_allclose(three_axis_from_qk(q, k).r, r, atol=1e-6)


def test_a_first_token_far_from_the_others_costs_them_no_digits():
    q, k = random_qk(60, constant=0.0)
    q[:, 0], k[:, 0] = 1e3, -1e3
    found, exact = (pair_moments(*both).without_first_token for both in ((q, k), (q.double(), k.double())))
    torch.testing.assert_close(found.sums, exact.sums, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.within_rows, exact.within_rows, rtol=1e-6, atol=0)


@pytest.mark.parametrize("pairs", [CausalPairs(24), CausalPairs(24, window=7, first_token=False)], ids=str)
@pytest.mark.parametrize("ridge", [0.1, 3.0])
def test_ridge_equals_the_dense_solve(pairs, ridge):
    q, k = random_qk(24)
    scores = q.double() @ k.double().mT
    fit = three_axis_from_qk(q, k, ridge=ridge, **options(pairs))
    for head, one in enumerate(scores):
        fitted, r, _ = weighted_reference(one, torch.ones_like(one), pairs, ridge)
        assert fit.r[head].item() == pytest.approx(r, abs=1e-6)
        np.testing.assert_allclose(fitted_entries(fit, pairs)[head], fitted, atol=1e-4)


@pytest.mark.parametrize("pairs", [CausalPairs(40), CausalPairs(40, window=9, first_token=False)], ids=str)
def test_additive_scores_are_fitted_exactly(pairs):
    a, b, c = noise(3, 2, 40)
    distance = (torch.arange(40)[:, None] - torch.arange(40)).clamp(min=0)
    scores = 3 + a[:, distance] + b[:, :, None] + c[:, None, :]
    fit = three_axis_from_scores(scores, **options(pairs))
    torch.testing.assert_close(fit.r, torch.ones(2, dtype=torch.float64))
    assert (torch.cat([fit.r, fit.r_within_rows]) <= 1).all()
    np.testing.assert_allclose(fitted_entries(fit, pairs), entries(scores, pairs), atol=1e-7)


# Gauges


@pytest.mark.parametrize("gauge", ["flat_queries", "flat_distance"])
def test_fitted_values_do_not_depend_on_the_gauge(gauge):
    crop = torch.arange(5, 25), torch.arange(12)
    moments = pair_moments(*random_qk(30))
    default, other = fit_three_axis(moments), fit_three_axis(moments, gauge=gauge)
    assert not torch.allclose(default.a.nan_to_num(), other.a.nan_to_num(), atol=1e-3)
    assert torch.equal(default.r, other.r)
    torch.testing.assert_close(other.fitted(*crop), default.fitted(*crop), equal_nan=True)


@pytest.mark.parametrize("n", [30, 3])
@pytest.mark.parametrize(("gauge", "flat"), [("flat_keys", "c"), ("flat_queries", "b"), ("flat_distance", "a")])
def test_gauge_keeps_its_promise(gauge, flat, n):
    fit = three_axis_from_qk(*random_qk(n), gauge=gauge, first_token=False)
    for part in (fit.b, fit.c):
        torch.testing.assert_close(part.nansum(-1), torch.zeros(2, dtype=torch.float64), atol=1e-9, rtol=0)
    part = getattr(fit, flat)[0].numpy()
    known = ~np.isnan(part)
    assert abs(np.polyfit(np.arange(n)[known], part[known], 1)[0]) < 1e-9


def test_axes_say_where_no_pair_is():
    pairs = CausalPairs(10, window=4, first_token=False)
    fit, seen = three_axis_from_qk(*random_qk(10), **options(pairs)), mask_of(pairs)
    for part, count in [(fit.a, torch.tensor([9, 8, 7, 6, *[0] * 6])), (fit.b, seen.sum(1)), (fit.c, seen.sum(0))]:
        assert torch.equal(part.isnan(), (count == 0).expand_as(part))


# Nulls


@pytest.mark.parametrize("pairs", [CausalPairs(40), CausalPairs(40, window=10, first_token=False)], ids=str)
def test_iid_r_is_what_gaussian_noise_reaches(pairs):
    fit = three_axis_from_scores(noise(600, 40, 40, seed=6), **options(pairs))
    assert math.sqrt(fit.r.square().mean()) == pytest.approx(fit.pairs.iid_r, rel=0.02)
    within = math.sqrt((pairs.rank - pairs.size) / (pairs.n_pairs - pairs.size))
    assert math.sqrt(fit.r_within_rows.square().mean()) == pytest.approx(within, rel=0.02)


@pytest.mark.parametrize("constant", [0.0, 7.3])
def test_constant_scores_have_no_r(constant):
    q, k = torch.ones(1, 50, 4), torch.full((1, 50, 4), constant)
    for fit in (three_axis_from_qk(q, k, 0.1), three_axis_from_scores(0.1 * q @ k.mT)):
        assert fit.r.isnan().all()
        assert fit.r_within_rows.isnan().all()


@pytest.mark.parametrize(
    ("mean", "size", "constant"),
    [(0, 1e-30, False), (0, 1e-37, False), (0, 1e-39, True), (1e6, 1, False), (1e6, 1e-2, True)],
)
def test_scores_that_float32_cannot_tell_from_a_constant_have_none(mean, size, constant):
    moments = pair_moments_from_scores(mean + size * noise(1, 30, 30))
    assert moments.is_constant.tolist() == [[constant], [constant]]


def test_scores_constant_within_rows_have_r_but_no_r_within_rows():
    fit = three_axis_from_scores(torch.arange(12.0)[:, None].expand(1, 12, 12))
    assert fit.r.tolist() == pytest.approx([1.0])
    assert fit.r_within_rows.isnan().all()


@pytest.mark.parametrize("tolerance", [1e-2, 1e-6])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_the_fit_stops_at_the_tolerance_of_the_residual(tolerance, size):
    """In the norm of the preconditioner, by the sums of what the fit leaves; conjugate gradients, for the window."""
    pairs, scores = CausalPairs(60, 30), size * noise(1, 60, 60, seed=9)
    fit = three_axis_from_scores(scores, window=30, tolerance=tolerance)
    x, w = design(pairs).toarray(), entries(scores, pairs)[0]
    x = x[:, x.any(0)]
    left = [x.T @ (w - values) / np.sqrt(x.sum(0)) for values in (fitted_entries(fit, pairs)[0], w.mean())]
    reached = np.linalg.norm(left[0]) / np.linalg.norm(left[1])
    assert tolerance / 30 < reached <= tolerance


# Many heads, and bad input


def test_a_constant_head_and_one_far_larger_do_not_disturb_the_others():
    scores = noise(4, 30, 30)
    alone = three_axis_from_scores(scores[2:])
    scores[0] = 4.0
    scores[1] *= 1e16
    together = three_axis_from_scores(scores)
    assert together.r[0].isnan()
    torch.testing.assert_close(together.r[2:], alone.r)
    torch.testing.assert_close(together.c[2:], alone.c)
    torch.testing.assert_close(together.a[0], torch.full((30,), 4.0, dtype=torch.float64))


def test_a_set_without_pairs_is_refused():
    with pytest.raises(InputError, match="no \\(query, key\\) pair is left"):
        CausalPairs(1, first_token=False)
    with pytest.raises(InputError, match="window must be at least 1"):
        CausalPairs(4, window=0)


def test_a_window_too_narrow_to_converge_is_refused(monkeypatch):
    monkeypatch.setattr(three_axis_fit, "MAX_ITERATIONS", 30)
    q, k = random_qk(200)
    with pytest.raises(InputError, match="a window of 2 ties 200 tokens"):
        three_axis_from_qk(q, k, window=2)
    assert three_axis_from_qk(q, k).r.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_raised_to_float32(dtype):
    q, k = (x.to(dtype) for x in random_qk(60))
    torch.testing.assert_close(three_axis_from_qk(q, k).r, three_axis_from_qk(q.float(), k.float()).r)


# The closed form


@settings(deadline=None)
@given(st.integers(4, 40), st.integers(0, 1000), st.booleans())
def test_solutions_leave_nothing_of_the_normal_equations(n, seed, as_pairs_without_first):
    pairs = CausalPairs(n + 1, first_token=False) if as_pairs_without_first else CausalPairs(n)
    x = torch.from_numpy(design(pairs).toarray())
    scores = normal(2, len(x), seed=seed)
    best = scores @ torch.linalg.pinv(x).T @ x.T  # fitted scores by dense least squares
    sums = scores @ x
    starts = 0, pairs.first, pairs.first
    axes = [one[:, start : start + n] for one, start in zip(sums.view(2, 3, -1).unbind(1), starts, strict=True)]
    theta = solve_triangle(torch.stack([axes[0], axes[1].flip(-1), axes[2]]))
    a, b, c = (part.nan_to_num() for part in pairs.spread(theta))
    torch.testing.assert_close(torch.cat([a, b, c], -1) @ x.T, best, atol=1e-11, rtol=0)


@pytest.mark.parametrize("n", [512, 4096, 30_000])
def test_axes_come_back_at_any_length(n):
    """Of axes without what is free: means of zero, and no straight line in the keys."""
    pairs = CausalPairs(n)
    theta = normal(3, 2, n, seed=1)
    theta[1] *= torch.linspace(1, 30, n, dtype=torch.float64)
    right = pairs.consistent(pairs.normal(theta, pairs.counts()))
    left = pairs.normal(solve_triangle(right), pairs.counts()) - right
    assert float((left / pairs.counts()).abs().max()) < 1e-13 * n
