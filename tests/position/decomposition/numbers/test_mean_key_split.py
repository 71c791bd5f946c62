"""The mean-key correlation against the explicit split, pair by pair."""

import pytest
import torch
from drawn import normal, visible
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rotated_heads import ROTATING

from tl_posgen.errors import InputError
from tl_posgen.position.decomposition.numbers import mean_key_split
from tl_posgen.position.decomposition.numbers.mean_key_split import mean_key_products
from tl_posgen.position.decomposition.numbers.pair_moments import pair_moments
from tl_posgen.rope.rotation import Rope, rotate
from tl_posgen.rope.splits import point_mass, split_scores

HALF = ROTATING["half"]


def random_qk(n: int = 30, heads: int = 2, seed: int = 0):
    q, k = normal(2, heads, n, 8, seed=seed, dtype=torch.float32)
    return q + 1.5, k + normal(heads, 1, 8, seed=seed + 1, dtype=torch.float32)


def explicit_pairs(q, k, rope, d0, *, window=None, rows: bool = False) -> torch.Tensor:
    """W and the split at every pair, [head, 2, pair], in float64."""
    q, k, n = q.double(), k.double(), q.shape[1]
    positions = torch.arange(n)
    w = 0.3 * rotate(q, positions, rope) @ rotate(k, positions, rope).mT
    split = split_scores(q, k, rope, 0.3, point_mass(d0)).scores
    seen = visible(n, window)
    if rows:
        w, split = (x - x.masked_fill(~seen, 0).sum(-1, keepdim=True) / seen.sum(-1)[:, None] for x in (w, split))
    return torch.stack([w[:, seen], split[:, seen]], 1)


def expected_r(*args, **how) -> torch.Tensor:
    return torch.stack([torch.corrcoef(pairs)[0, 1] for pairs in explicit_pairs(*args, **how)])


@pytest.mark.parametrize("rope", ROTATING.values(), ids=ROTATING.keys())
def test_r_is_that_of_the_explicit_split(rope):
    q, k = random_qk()
    distances = (0, 2.5, 1000)
    found = mean_key_products(q, k, rope, 0.3, distances).correlation()
    for r, r_within_rows, d0 in zip(*(one[0] for one in found), distances, strict=True):
        torch.testing.assert_close(r, expected_r(q, k, rope, d0), atol=1e-6, rtol=0)
        torch.testing.assert_close(r_within_rows, expected_r(q, k, rope, d0, rows=True), atol=1e-6, rtol=0)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(8, 40),
    window=st.none() | st.integers(2, 45),
    d0=st.integers(0, 3000),
    seed=st.integers(0, 2**31),
    formed=st.sampled_from([0, 40]),
    at_once=st.sampled_from([1, 500, 2**19]),
)
@example(300, None, 64, 0, 0, 1)  # without the score matrix
def test_r_within_windows_is_that_of_the_explicit_split(n, window, d0, seed, formed, at_once):
    q, k = random_qk(n, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mean_key_split, "FORMED", formed)
        patch.setattr(mean_key_split, "SCORES_AT_ONCE", at_once)
        r, _ = mean_key_products(q, k, HALF, 0.3, [d0], window=window).correlation()
    for found, first in ((r[0, 0], 0), (r[1, 0], 1)):
        case = q[:, first:], k[:, first:], HALF, d0
        pairs = explicit_pairs(*case, window=window)  # a few may be nearly alike: rounding to float32 counts for more
        allowed = 1e-6 * max(10.0, float((pairs.abs().amax(-1) / pairs.std(-1)).max()))
        torch.testing.assert_close(found, expected_r(*case, window=window), atol=allowed, rtol=0)


@pytest.mark.parametrize("window", [None, 1, 2, 7, 28, 29, 30, 40])
def test_the_first_token_left_out_is_the_text_without_it(window):
    q, k = random_qk()
    found = mean_key_products(q, k, HALF, 0.3, [3], window=window).correlation()
    alone = mean_key_products(q[:, 1:], k[:, 1:], HALF, 0.3, [3], window=window).correlation()
    for one, other in zip(found, alone, strict=True):  # r, and r within rows
        torch.testing.assert_close(one[1], other[0], equal_nan=True)


def test_constant_keys_and_planes_that_never_turn_split_exactly_and_constant_scores_have_no_r():
    q, k = random_qk()
    for keys, rope in ((k[:, :1].expand_as(k), HALF), (k, Rope(torch.zeros(4, dtype=torch.float64)))):
        r, _ = mean_key_products(q, keys, rope, 0.3, [1000]).correlation()
        torch.testing.assert_close(r[0], torch.ones(1, 2, dtype=torch.float64), atol=1e-5, rtol=0)
    ones = torch.ones(1, 10, 8)
    assert mean_key_products(ones, ones, Rope(), 1.0, [0]).correlation()[0].isnan().all()


@pytest.mark.parametrize(
    ("n", "distance", "message"), [(1, 0, "1 token: none is left"), (30, -1, "distances must be 0 or more")]
)
def test_a_single_token_and_distances_below_zero_are_refused(n, distance, message):
    with pytest.raises(InputError, match=message):
        mean_key_products(*random_qk(n), HALF, 0.3, [distance]).correlation()


def test_moments_that_are_known_are_not_taken_again():
    q, k = random_qk()
    positions = torch.arange(q.shape[1])
    moments = pair_moments(rotate(q, positions, HALF), rotate(k, positions, HALF), 0.3)
    known, own = (mean_key_products(q, k, HALF, 0.3, [3], scores=scores).correlation() for scores in (moments, None))
    torch.testing.assert_close(known, own)
