"""Numbers of the head profiles, against their formulas written out and loops over queries."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.frequencies.numbers.copies import copied_rows
from tl_posgen.joining.numbers import (
    concentration,
    frequency_entropy,
    massive_values,
    repeated_scores,
    slow_mean_energy,
)

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(3, 7, 6, generator=GENERATOR, dtype=torch.float64)
Z, OTHER = (torch.randn(3, 7, 4, generator=GENERATOR, dtype=torch.complex128) + 0.5 for _ in range(2))


def test_massive_values_are_the_largest_norm_of_a_dimension_over_the_mean_norm():
    for head in range(3):
        norms = [math.sqrt(sum(float(X[head, t, d]) ** 2 for t in range(7))) for d in range(6)]
        torch.testing.assert_close(float(massive_values(X)[head]), max(norms) / (sum(norms) / 6))


def test_concentration_is_the_mean_resultant_length_weighted_by_size():
    for head in range(3):
        up = sum(abs(complex(Z[head, :, m].mean())) for m in range(4))
        down = sum(float(Z[head, :, m].abs().mean()) for m in range(4))
        torch.testing.assert_close(float(concentration(Z)[head]), up / down)
    torch.testing.assert_close(concentration(Z[:, :1].expand(3, 7, 4)), torch.ones(3, dtype=torch.float64))


def test_entropy_is_one_where_frequencies_weigh_alike_and_zero_for_one_alone():
    torch.testing.assert_close(
        frequency_entropy(torch.ones_like(Z), torch.ones_like(Z)).sum(), torch.tensor(3.0).double()
    )
    alone = torch.zeros_like(Z)
    alone[..., 1] = 1
    assert frequency_entropy(alone, OTHER).abs().max() == 0
    p = Z.abs().mean(1) * OTHER.abs().mean(1)
    p = p / p.sum(-1, keepdim=True)
    torch.testing.assert_close(frequency_entropy(Z, OTHER), -(p * p.log()).sum(-1) / math.log(4))


def test_the_slow_mean_counts_planes_that_turn_less_than_once():
    theta = torch.tensor([1.0, 0.7, 0.6, 0.01])  # 2 pi / 10 = .628
    up = Z.mean(1).abs().square()[:, 2:].sum(-1)
    torch.testing.assert_close(slow_mean_energy(Z, theta, 10), up / Z.abs().square().sum(-1).mean(1))


@settings(max_examples=30, deadline=None)
@given(start=st.integers(0, 2), period=st.integers(2, 9), seed=st.integers(0, 2**31))
def test_scores_are_means_over_the_queries_of_their_definition(start, period, seed):
    n, prompt = start + 2 * period, copied_rows(torch.arange(12), torch.arange(start) + 50, period, 1, seed)[0]
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
    torch.testing.assert_close(found["previous_token"], torch.stack(previous).mean(0))
    torch.testing.assert_close(found["duplicate_token"], torch.stack(duplicate).mean(0))
    torch.testing.assert_close(found["induction"], torch.stack(induction).mean(0))
