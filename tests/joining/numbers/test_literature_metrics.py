"""Head metrics of other papers against their formulas written out."""

import math

import torch

from tl_posgen.joining.numbers.literature_metrics import (
    concentration,
    frequency_entropy,
    massive_values,
    overlap,
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


def test_overlap_is_one_for_equal_distributions_and_zero_for_disjoint_ones():
    p, other = torch.tensor([[0.5, 0.5, 0.0, 0.0]]), torch.tensor([[0.0, 0.0, 0.3, 0.7]])
    assert (overlap(p, p), overlap(p, other)) == (torch.tensor([1.0]), torch.tensor([0.0]))
