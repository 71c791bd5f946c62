"""The mean-key correlation against the explicit split, pair by pair."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.errors import InputError
from tl_posgen.maths.mean_key import mean_key_r, tv_bound
from tl_posgen.maths.rope import Rope, inverse_frequencies, rotate
from tl_posgen.maths.splits import attention_profile, point_mass, split_scores, triangle, uniform

ROPES = {
    "half": Rope(inverse_frequencies(8, 100.0)),
    "adjacent": Rope(inverse_frequencies(8, 100.0), pairing="adjacent"),
    "partial, scaled": Rope(inverse_frequencies(4, 100.0), scaling=1.3),
}
LAWS = {"d0 = 0": 0, "d0 = 2.5": 2.5, "d0 = 1000": 1000, "triangle": triangle(5), "uniform": uniform(20)}


def random_qk(n: int = 30, heads: int = 2, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, heads, n, 8, generator=generator)
    return q + 1.5, k + torch.randn(heads, 1, 8, generator=generator)


def expected_r(q, k, rope, law, *, window=None, mean_key=None, rows: bool = False) -> torch.Tensor:
    q, k, n = q.double(), k.double(), q.shape[1]
    positions = torch.arange(n)
    w = 0.3 * rotate(q, positions, rope) @ rotate(k, positions, rope).mT
    split = split_scores(q, k, rope, 0.3, law if not isinstance(law, int | float) else point_mass(law), mean_key).scores
    distance = positions[:, None] - positions
    seen = (distance >= 0) & (distance < (window or n))
    if rows:
        w, split = (x - x.masked_fill(~seen, 0).sum(-1, keepdim=True) / seen.sum(-1)[:, None] for x in (w, split))
    return torch.stack([torch.corrcoef(torch.stack([w[h, seen], split[h, seen]]))[0, 1] for h in range(len(q))])


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
def test_r_is_that_of_the_explicit_split(rope, law):
    q, k = random_qk()
    found = mean_key_r(q, k, rope, 0.3, [law])
    torch.testing.assert_close(found.r[0], expected_r(q, k, rope, law), atol=1e-6, rtol=0)
    torch.testing.assert_close(found.r_visible[0], expected_r(q, k, rope, law, rows=True), atol=1e-6, rtol=0)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(3, 40), window=st.none() | st.integers(2, 45), d0=st.integers(0, 3000), seed=st.integers(0, 2**31))
def test_r_within_windows_is_that_of_the_explicit_split(n, window, d0, seed):
    rope, (q, k) = ROPES["half"], random_qk(n, seed=seed)
    found = mean_key_r(q, k, rope, 0.3, [d0], window=window)
    torch.testing.assert_close(found.r[0], expected_r(q, k, rope, d0, window=window), atol=1e-5, rtol=0)


def test_several_laws_give_a_row_each():
    rope, (q, k) = ROPES["half"], random_qk()
    together = mean_key_r(q, k, rope, 0.3, [0, triangle(4)])
    alone = [mean_key_r(q, k, rope, 0.3, [law]).r[0] for law in (0, triangle(4))]
    torch.testing.assert_close(together.r, torch.stack(alone))


def test_a_law_may_differ_from_head_to_head():
    rope, (q, k) = ROPES["half"], random_qk()
    pattern = (q @ k.mT).masked_fill(torch.ones(30, 30).triu(1).bool(), -math.inf).softmax(-1)
    law = attention_profile(pattern)
    torch.testing.assert_close(mean_key_r(q, k, rope, 0.3, [law]).r[0], expected_r(q, k, rope, law), atol=1e-6, rtol=0)


def test_a_longer_text_goes_without_the_matrix_to_the_same_r():
    rope, (q, k) = ROPES["half"], random_qk(n=300)
    torch.testing.assert_close(mean_key_r(q, k, rope, 0.3, [64]).r[0], expected_r(q, k, rope, 64), atol=1e-6, rtol=0)


def test_a_mean_key_of_ones_own_is_used():
    rope, (q, k) = ROPES["half"], random_qk()
    other = torch.randn(2, 8, generator=torch.Generator().manual_seed(9))
    found = mean_key_r(q, k, rope, 0.3, [5], mean_key=other).r[0]
    torch.testing.assert_close(found, expected_r(q, k, rope, 5, mean_key=other.double()), atol=1e-6, rtol=0)
    assert (found - mean_key_r(q, k, rope, 0.3, [5]).r[0]).abs().max() > 1e-3


def test_the_first_token_left_out_is_the_text_without_it():
    rope, (q, k) = ROPES["half"], random_qk()
    found, alone = mean_key_r(q, k, rope, 0.3, [3], first_token=False), mean_key_r(q[:, 1:], k[:, 1:], rope, 0.3, [3])
    torch.testing.assert_close(found.r, alone.r)


def test_constant_keys_are_position_alone_and_split_exactly():
    rope, (q, k) = ROPES["half"], random_qk()
    found = mean_key_r(q, k[:, :1].expand_as(k), rope, 0.3, [1000])
    torch.testing.assert_close(found.r, torch.ones(1, 2, dtype=torch.float64))


def test_constant_scores_have_no_r():
    ones = torch.ones(1, 10, 8)
    assert mean_key_r(ones, ones, Rope(), 1.0, [0]).r.isnan().all()


def test_a_text_without_tokens_is_refused():
    q, k = random_qk(n=1)
    with pytest.raises(InputError, match="no token is left"):
        mean_key_r(q, k, ROPES["half"], 0.3, [0], first_token=False)


# The softmax bound


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 20), delta=st.floats(0, 8), shift=st.floats(-5, 5), seed=st.integers(0, 2**31))
def test_total_variation_stays_below_the_bound(n, delta, shift, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, dtype=torch.float64, generator=generator)
    change = delta * (2 * torch.rand(n, dtype=torch.float64, generator=generator).round() - 1)
    tv = (logits.softmax(0) - (logits + change + shift).softmax(0)).abs().sum() / 2
    assert tv <= tv_bound(torch.tensor(delta, dtype=torch.float64)) + 1e-12


def test_the_bound_is_reached():
    half = torch.tensor(0.65, dtype=torch.float64)
    before, after = torch.stack([half, -half]), torch.stack([-half, half])
    tv = (before.softmax(0) - after.softmax(0)).abs().sum() / 2
    torch.testing.assert_close(tv, tv_bound(2 * half))
