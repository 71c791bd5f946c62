"""Prompts with a gap, and where curves rise, by hand."""

import numpy as np
import pytest
import torch

from tl_posgen.frequencies.numbers.gap import apart, first_rise, with_copy, with_needle


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


def test_the_first_rise_is_where_a_line_between_places_crosses_zero():
    x = np.array([0.0, 4, 8, 16])
    curves = {(-1, -3, 1, 9): 7.0, (-2, 2, -1, 5): 2.0, (1, 1, 1, 1): 0.0, (-1, -1, 0, 0): 16.0, (0, 0, 0, 3): 8.0}
    np.testing.assert_allclose(first_rise(x, np.array([*curves], dtype=float)), [*curves.values()])
    assert np.isnan(first_rise(x, np.array([-1, np.nan, 1, 1.0])))
