"""Repeated random tokens: the prompts, and the three scores against loops over queries."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.joining.numbers.repeated_tokens import repeated_prompts, repeated_scores


@settings(max_examples=30, deadline=None)
@given(start=st.integers(0, 2), period=st.integers(2, 9), seed=st.integers(0, 2**31))
def test_scores_are_means_over_the_queries_of_their_definition(start, period, seed):
    n, prompt = start + 2 * period, repeated_prompts(torch.arange(start) + 50, period, 12, 1, seed)[0]
    generator = torch.Generator().manual_seed(seed)
    pattern = torch.randn(2, n, n, generator=generator).masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    pattern = pattern.softmax(-1).double()
    previous, duplicate, induction = [], [], []
    for i in range(start, n):
        if i > start:
            previous.append(pattern[:, i, i - 1])
        earlier = [j for j in range(i) if prompt[j] == prompt[i]]
        if earlier:
            duplicate.append(pattern[:, i, earlier[0]])
            induction.append(pattern[:, i, earlier[0] + 1])
    found = repeated_scores(pattern, start, period)
    assert len(duplicate) == period
    torch.testing.assert_close(found.previous_token, torch.stack(previous).mean(0))
    torch.testing.assert_close(found.duplicate_token, torch.stack(duplicate).mean(0))
    torch.testing.assert_close(found.induction, torch.stack(induction).mean(0))


def test_a_block_of_different_tokens_stands_twice_and_prompts_differ():
    found = repeated_prompts(torch.tensor([3]), 20, 40, 3, seed=1)
    assert found.shape == (3, 41)
    assert torch.equal(found[:, 1:21], found[:, 21:])
    assert all(len(row[1:21].unique()) == 20 for row in found)
    assert not torch.equal(found[0], found[1])
    assert torch.equal(found, repeated_prompts(torch.tensor([3]), 20, 40, 3, seed=1))
    assert not torch.equal(found, repeated_prompts(torch.tensor([3]), 20, 40, 3, seed=2))


def test_a_head_of_each_kind_has_its_score_alone():
    n, period = 12, 6
    patterns = torch.zeros(3, n, n)
    for i in range(n):
        for head, back in enumerate((1, period, period - 1)):
            patterns[head, i, max(i - back, 0)] = 1
    found = torch.stack([*vars(repeated_scores(patterns, 0, period)).values()])
    assert found.diagonal().tolist() == pytest.approx([1, 1, 1])
    assert float((found - torch.diag(found.diagonal())).abs().max()) < 0.2
