"""Slash statistics against sub-diagonals taken one by one."""

import pytest
import torch
from drawn import normal, visible
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.errors import InputError
from tl_posgen.slash.numbers import slash_scores
from tl_posgen.slash.numbers.slash_scores import slash_statistics


def random_scores(n_heads, n, seed=0, sharpness=2.0):
    return sharpness * normal(n_heads, n, n, seed=seed)


def softmax_of(scores, window=None):
    return scores.masked_fill(~visible(scores.shape[-1], window), -torch.inf).softmax(-1)


def random_pattern(n_heads, n, seed=0, window=None):
    return softmax_of(random_scores(n_heads, n, seed), window)


def diagonals(pattern):
    n = pattern.shape[-1]
    return torch.stack([pattern.diagonal(-d, -2, -1).mean(-1) for d in range(n)], -1)


def without_first_column(pattern):
    rest = pattern[:, 1:, 1:]
    return rest / rest.sum(-1, keepdim=True)


def mean_distance(pattern):
    position = torch.arange(pattern.shape[-1], dtype=torch.float64)
    return (pattern * (position[:, None] - position)).sum(-1).mean(-1)


@settings(deadline=None, max_examples=15)
@given(n=st.integers(2, 300), n_heads=st.integers(1, 3), seed=st.integers(0, 99), window=st.none() | st.integers(2, 40))
def test_scores_at_all_distances_equal_the_means_of_the_subdiagonals(n, n_heads, seed, window):
    pattern = random_pattern(n_heads, n, seed, window)
    found = slash_statistics(pattern, window=window)
    torch.testing.assert_close(found.score[0], diagonals(pattern), rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=15)
@given(n=st.integers(2, 300), n_heads=st.integers(1, 3), seed=st.integers(0, 99))
def test_scores_without_first_token_equal_those_of_the_renormalised_pattern(n, n_heads, seed):
    pattern = random_pattern(n_heads, n, seed)
    expected = diagonals(without_first_column(pattern))
    torch.testing.assert_close(slash_statistics(pattern).score[1, :, :-1], expected, rtol=0, atol=1e-12)


def test_scores_do_not_depend_on_how_the_heads_are_blocked(monkeypatch):
    pattern = random_pattern(5, 200)
    whole = slash_statistics(pattern)
    monkeypatch.setattr(slash_scores, "BLOCK", 1)
    monkeypatch.setattr(slash_scores, "ROWS", 7)
    torch.testing.assert_close(slash_statistics(pattern).score[0], whole.score[0])


def test_scores_of_a_strong_sink_keep_their_precision_without_the_first_token():
    scores = random_scores(1, 150).float()
    scores[..., 0] += 25.0  # all but about 1e-10 of each row goes to the first token
    pattern = softmax_of(scores)
    expected = diagonals(without_first_column(pattern.double()))
    torch.testing.assert_close(slash_statistics(pattern).score[1, :, :-1], expected, rtol=1e-5, atol=1e-7)


def test_half_precision_sliced_and_strided_patterns_are_read_like_whole_ones_and_left_unchanged():
    pattern = random_pattern(4, 140).bfloat16()
    expected, before = slash_statistics(pattern[1::2].float().contiguous()).score[0], pattern.clone()
    torch.testing.assert_close(slash_statistics(pattern[1::2]).score[0], expected)
    torch.testing.assert_close(slash_statistics(pattern.mT.contiguous().mT[1::2]).score[0], expected)
    assert torch.equal(pattern, before)


def test_row_with_nothing_but_the_first_token_attends_nowhere_without_it():
    pattern = torch.zeros(1, 6, 6, dtype=torch.float64)
    pattern[..., 0] = 1.0
    found = slash_statistics(pattern)
    assert found.score[1, :, :-1].abs().max() == 0
    assert found.first_token.item() == 1


def test_distance_entropy_in_nats_and_attention_to_the_first_token_are_means_over_queries():
    pattern = random_pattern(3, 180)
    found, rest = slash_statistics(pattern), without_first_column(pattern)
    torch.testing.assert_close(found.attention_distance[0], mean_distance(pattern))
    torch.testing.assert_close(found.attention_distance[1], mean_distance(rest))
    torch.testing.assert_close(found.entropy[0], torch.special.entr(pattern).sum(-1).mean(-1))
    torch.testing.assert_close(found.entropy[1], torch.special.entr(rest).sum(-1).mean(-1))
    torch.testing.assert_close(found.first_token, pattern[..., 0].mean(-1))
    assert slash_statistics(pattern, entropy=False).entropy[0].isnan().all()


@settings(deadline=None, max_examples=12)
@given(n=st.integers(2, 200), window=st.none() | st.integers(1, 30))
def test_uniform_is_the_slash_score_of_uniform_attention(n, window):
    pattern = softmax_of(torch.zeros(1, n, n, dtype=torch.float64), window)
    found = slash_statistics(pattern, window=window)
    torch.testing.assert_close(found.uniform[0], diagonals(pattern)[0])
    expected = diagonals(without_first_column(pattern))[0] if window != 1 else found.score[1, 0, :-1]
    torch.testing.assert_close(found.uniform[1, :-1], expected)


@pytest.mark.parametrize(
    ("pattern", "message"), [(torch.ones(1, 2, 3), "2 queries by 3 keys"), (torch.full((1, 4, 4), 0.25), "causal")]
)
def test_patterns_that_are_not_square_or_look_ahead_are_refused(pattern, message):
    with pytest.raises(InputError, match=message):
        slash_statistics(pattern)
