"""Prompts with a gap, and between which places a curve rises above zero, by hand."""

import math

import pytest
import torch

from tl_posgen.frequencies.numbers.gap import apart, first_surely_above, last_surely_below, with_copy, with_needle


@pytest.mark.parametrize("n", [12, 13])
def test_the_second_half_repeats_the_first_at_one_distance(n):
    tokens = torch.arange(2 * n).reshape(2, n)
    position = apart(n, 100)
    for first in (0, 2):
        changed = with_copy(tokens, first)
        copies = (changed != tokens).nonzero()
        assert len(copies) == 2 * (n // 2 - first)
        for row, place in copies.tolist():
            assert changed[row, place] == tokens[row, place - (n + 1) // 2]
            assert position[place] - position[place - (n + 1) // 2] == (n + 1) // 2 + 100
    assert torch.equal(tokens, torch.arange(2 * n).reshape(2, n))


def test_a_needle_stands_in_both_halves():
    tokens, needle = torch.zeros(1, 13, dtype=torch.long), torch.tensor([[5, 6, 7]])
    assert with_needle(tokens, needle)[0].tolist() == [0, 0, 5, 6, 7, 0, 0, 0, 0, 0, 5, 6, 7]
    assert with_needle(tokens[:, :8], needle)[0].tolist() == [0, 5, 6, 7, 0, 5, 6, 7]  # behind the first token


def test_the_boundary_lies_between_the_last_place_surely_below_and_the_first_surely_above():
    places, lower, upper = [0, 4, 8, 16, 32], [-3.0, -2.0, -1.0, 0.0, 1.0], [-1.0, -1.0, 1.0, 2.0, 1.5]
    assert (last_surely_below(places, upper), first_surely_above(places, lower)) == (4, 32)
    assert (last_surely_below(places[:2], upper[:2]), first_surely_above(places[:2], lower[:2])) == pytest.approx(
        (4, math.nan), nan_ok=True
    )
    assert last_surely_below(places, [-1.0, 1.0, -1.0, -1.0, -1.0]) == 0  # whatever comes back behind
    assert math.isnan(last_surely_below(places, [math.nan] * 5))
    assert math.isnan(first_surely_above(places, [math.nan] * 5))
