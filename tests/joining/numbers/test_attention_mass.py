"""Attention mass taken from drawn keys, against a loop over keys."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.joining.numbers.attention_mass import take_from_drawn_keys


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 7), distance=st.integers(0, 6), seed=st.integers(0, 2**31))
def test_as_much_mass_is_taken_from_other_keys_whole_but_for_one(n, distance, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(2, n, n, dtype=torch.float64, generator=generator)
    pattern = scores.masked_fill(~torch.ones(n, n).tril().bool(), -torch.inf).softmax(-1)
    place = torch.arange(n)
    hidden = (place[:, None] - place == distance)[None]
    taken = pattern - take_from_drawn_keys(pattern, hidden, torch.Generator().manual_seed(seed))
    for head in range(2):
        for query in range(n):
            at = query - distance
            mass = float(pattern[head, query, at]) if at >= 0 else 0.0
            assert abs(float(taken[head, query].sum()) - min(mass, 1 - mass)) < 1e-12
            assert at < 0 or taken[head, query, at] == 0
            whole = (taken[head, query] - pattern[head, query]).abs() < 1e-12
            parts = (taken[head, query] > 1e-12) & ~whole
            assert int(parts.sum()) <= 1


def test_draws_differ_by_seed_and_are_those_of_the_seed():
    pattern = torch.full((1, 1, 50), 0.02, dtype=torch.float64)
    hidden = (torch.arange(50) < 10)[None, None]
    first, again, other = (
        take_from_drawn_keys(pattern, hidden, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_every_other_key_is_as_likely_to_give_its_mass_as_another():
    pattern = torch.full((1, 1, 10), 0.1, dtype=torch.float64)
    hidden = (torch.arange(10) == 0)[None, None]
    counts = sum(
        (take_from_drawn_keys(pattern, hidden, torch.Generator().manual_seed(seed))[0, 0] < 0.05).int()
        for seed in range(900)
    )
    assert counts[0] == 0
    assert all(60 < int(count) < 150 for count in counts[1:])  # 100 each are expected, 10 is the deviation
