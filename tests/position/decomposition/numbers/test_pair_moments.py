"""The moments that the three-axis fit is made of: from queries and keys, from scores, in blocks, without a token."""

import math

import numpy as np
import pytest
import torch
from dense_fit import mask_of, random_qk, reference, three_axis_from_scores
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tl_posgen import arithmetic
from tl_posgen.errors import InputError
from tl_posgen.position.decomposition.numbers import pair_moments as moments_module
from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.numbers.pair_moments import (
    PairMoments,
    pair_moments,
    pair_moments_from_scores,
)
from tl_posgen.rope import bilinear_sums

MANY_CHUNKS = {"SHORT": -1000, "CHUNK": 8, "SLAB": 3, "WORKING_SET": 4000}


def assert_same(one: PairMoments | None, other: PairMoments | None) -> None:
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        for name in ("sums", "within_rows", "tss"):
            torch.testing.assert_close(getattr(one, name), getattr(other, name), atol=1e-9, rtol=1e-7)
        assert_same(one.without_first_token, other.without_first_token)


@settings(max_examples=50, deadline=None)
@given(
    n=st.integers(1, 90),
    window=st.none() | st.integers(1, 95),
    heads=st.integers(1, 3),
    settings=st.sampled_from([{"SHORT": -1000}, {"SHORT": 1000}, MANY_CHUNKS]),
    seed=st.integers(0, 2**31),
)
@example(300, None, 2, MANY_CHUNKS, 0)
def test_moments_from_qk_equal_those_from_scores(n, window, heads, settings, seed):
    q, k = (x.double() for x in random_qk(n, heads=heads, seed=seed))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setattr(bilinear_sums, name, value)
        ours = pair_moments(q, k, 0.5, window=window)
    assert_same(ours, pair_moments_from_scores(0.5 * q @ k.mT, window=window))


def test_scores_that_are_not_bilinear_are_fitted_exactly():
    q, k = random_qk(40, constant=0.3)
    scores = 5 * torch.tanh(q @ k.mT / 5) - 0.2 * (torch.arange(40)[:, None] - torch.arange(40))
    r, _ = reference(scores, CausalPairs(40))
    np.testing.assert_allclose(three_axis_from_scores(scores).r, r, atol=1e-7)


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_blocks_of_rows_change_neither_the_moments_nor_the_scores(monkeypatch, rows):
    scores = torch.randn(2, 50, 50, generator=torch.Generator().manual_seed(2))
    given = scores.clone()
    whole = pair_moments_from_scores(scores, window=20)
    monkeypatch.setattr(arithmetic, "SCORES_AT_ONCE", rows * 2 * 50)
    assert_same(pair_moments_from_scores(scores, window=20), whole)
    assert torch.equal(scores, given)


def test_in_a_window_float32_is_summed_as_float64_is():
    """The band is a difference of two triangles, which would cost digits."""
    q, k = random_qk(60)
    assert torch.equal(pair_moments(q, k, window=5).sums, pair_moments(q.double(), k.double(), window=5).sums)


@pytest.mark.parametrize("group", [2, 3])
def test_heads_taken_in_groups_equal_heads_together(monkeypatch, group):
    q, k = (x.double() for x in random_qk(60, heads=5))
    together = pair_moments(q, k)
    monkeypatch.setattr(moments_module, "QUERIES_AT_ONCE", q[0].numel() * group)
    assert_same(pair_moments(q, k), together)


def test_hidden_scores_are_not_read():
    scores = torch.randn(1, 10, 10, generator=torch.Generator().manual_seed(3))
    hidden = ~mask_of(CausalPairs(10, window=4))
    fits = [three_axis_from_scores(scores.masked_fill(hidden, junk), window=4) for junk in (-math.inf, math.nan, 1e30)]
    assert all(torch.equal(fit.r, fits[0].r) for fit in fits)


def test_a_visible_score_that_is_not_finite_is_refused_by_name():
    scores = torch.zeros(2, 6, 6)
    scores[1, 4, 2] = -math.inf
    with pytest.raises(InputError, match="visible score of head 1 is not finite at token 4"):
        pair_moments_from_scores(scores)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "q or k of head 1 is not finite at token 3"),
        (math.inf, "q or k of head 1 is not finite at token 3"),
        (1e38, r"q or k of head 1 is not finite at token \d; .* an overflow"),
    ],
)
def test_queries_and_keys_that_are_not_finite_or_overflow_are_refused(value, message):
    q, k = random_qk(8)
    q[1, 3, 2] = value
    k[1, :, 2] *= 10
    with pytest.raises(InputError, match=message):
        pair_moments(q, k)
