"""Lifts of diagonals, the mean curve and swapped contents, against scores one by one in float64."""

import pytest
import torch
from drawn import normal
from scipy import stats

from tl_posgen.frequencies.numbers.roles import contrast_at, correlation_with_mean_curve, swap_scores

HEADS, N, PLANES = 2, 14, 3


def planes(*shape, seed=0):
    return torch.complex(*normal(2, *shape, seed=seed))


def test_the_lift_of_a_diagonal_is_that_of_its_scores_above_the_next_three():
    q, k, rows = planes(HEADS, N, PLANES), planes(HEADS, N, PLANES, seed=1), torch.arange(6, N)
    for distance in (0, 1, 2):
        found = contrast_at(q, k, rows, distance)
        for head in range(HEADS):
            scores = (q[head] @ k[head].mH).real
            at = [torch.stack([scores[i, i - distance - more] for i in rows.tolist()]).mean() for more in range(4)]
            assert found[head].sum().item() == pytest.approx((at[0] - sum(at[1:]) / 3).item())


def test_the_correlation_with_the_mean_curve_is_that_of_each_query():
    q, k, curve = planes(HEADS, N, PLANES), planes(HEADS, N, PLANES, seed=1), normal(HEADS, 4, seed=2)
    distances, rows = [1, 2, 4, 7], torch.arange(8, N)
    found = correlation_with_mean_curve(q, k, curve, distances, rows)
    for head in range(HEADS):
        scores = (q[head] @ k[head].mH).real
        each = [stats.pearsonr([float(scores[i, i - d]) for d in distances], curve[head]).statistic for i in rows]
        assert found[head].item() == pytest.approx(sum(each) / len(each))


def swapped(q, contents, turns, pairs, size=1.0):
    weights = torch.ones(len(q), len(pairs), dtype=torch.float64)
    return [one.tolist() for one in swap_scores(size * q, contents, turns, pairs, weights)]


def test_swapped_scores_are_the_cosines_of_the_exponentials():
    q, contents = planes(HEADS, PLANES), planes(HEADS, N, PLANES, seed=1)
    turns = torch.polar(torch.ones(N, PLANES).double(), normal(N, PLANES, seed=3))
    pairs = torch.tensor([[2, 9], [5, 6]])
    weights = normal(HEADS, 2, seed=4).abs()
    found = swap_scores(q, contents, turns, pairs, weights)
    for head in range(HEADS):
        total = [0.0, 0.0]
        for number, (a, b) in enumerate(pairs.tolist()):

            def s(content, place, head=head):
                return (q[head] * (contents[head, content] * turns[place]).conj()).real.sum()

            d, e = torch.stack([s(a, a), s(b, b)]).exp(), torch.stack([s(b, a), s(a, b)]).exp()
            for side, one in enumerate((e, e.flip(0))):
                total[side] += float(weights[head, number] * torch.cosine_similarity(d, one, dim=0))
        assert [float(one[head]) for one in found] == pytest.approx([one / float(weights[head].sum()) for one in total])


@pytest.mark.parametrize("size", [1.0, 1e3])  # exponentials that float64 does not hold
def test_a_head_of_places_is_positional_and_one_of_contents_symbolic(size):
    q, pairs = torch.ones(1, 1, dtype=torch.complex128), torch.tensor([[1, 3], [2, 4]])
    angles = torch.polar(torch.ones(6, 1).double(), torch.linspace(0, 3, 6)[:, None].double())
    places = swapped(q, torch.ones(1, 6, 1, dtype=torch.complex128), angles, pairs, size)
    contents = swapped(q, angles[None], torch.ones(6, 1, dtype=torch.complex128), pairs, size)
    assert places[0] == contents[1] == pytest.approx([1.0])
    assert places[1] == pytest.approx(contents[0])
    assert places[1][0] < 0.9
