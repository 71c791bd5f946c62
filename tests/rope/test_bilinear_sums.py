"""Sums over a causal band against the score matrix."""

import pytest
import torch

from tl_posgen.rope import bilinear_sums
from tl_posgen.rope.bilinear_sums import fft_length, products_over_band, sums_over_band


@pytest.mark.parametrize("short", [-1000, 1000], ids=["long route", "short route"])
@pytest.mark.parametrize("width", [41, 17, 1])
def test_sums_from_chunk_to_chunk_lose_no_digit(width, short, monkeypatch):
    """Check whole numbers whose squares add up beyond float32's integers: only float64 sums are exact."""
    for name, value in {"SHORT": short, "CHUNK": 1, "SLAB": 16, "WORKING_SET": 100}.items():
        monkeypatch.setattr(bilinear_sums, name, value)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randint(-3, 4, (2, 9, 41, 1), generator=generator) * 21.0 ** (
        torch.rand(2, 9, 41, 1, generator=generator) < 0.2
    )
    distance = torch.arange(41)[:, None] - torch.arange(41)
    scores = ((distance >= 0) & (distance < width)) * (q.double() @ k.double().mT)
    by_distance = torch.stack([scores.diagonal(-d, 1, 2).sum(-1) for d in range(41)], -1)
    found = sums_over_band(q, k, width)
    assert all(part.dtype == torch.float64 for part in found)
    torch.testing.assert_close(found[0], by_distance, rtol=1e-5, atol=0.01)
    for part, expected in zip(found[1:], (scores.sum(-1), scores.sum(-2)), strict=False):
        assert torch.equal(part, expected)
    if short < 0:
        assert torch.equal(found[3], scores.square().sum((-2, -1)))


def test_lengths_of_the_fft_are_the_least_of_those_it_is_fast_at():
    fast = sorted(odd * 2**power for odd in (1, 3, 5) for power in range(1, 12))
    assert [fft_length(n) for n in range(1, 2000)] == [min(x for x in fast if x >= n) for n in range(1, 2000)]


@pytest.mark.parametrize("short", [-1000, 1000], ids=["long route", "short route"])
@pytest.mark.parametrize("width", [150, 130, 41, 1])
@pytest.mark.parametrize("leading", [(17,), (2, 3)], ids=str)
def test_products_over_a_band_are_those_of_all_pairs(width, leading, short, monkeypatch):
    monkeypatch.setattr(bilinear_sums, "SHORT", short)
    monkeypatch.setattr(bilinear_sums, "SLAB", 2)
    n, generator = 130, torch.Generator().manual_seed(4)
    q, k, other_q, other_k = (torch.randn(*leading, n, 3, generator=generator).double() for _ in range(4))
    away = torch.arange(n)[:, None] - torch.arange(n)
    band = (away >= 0) & (away < width)
    forms = [(q, k), (other_q, other_k), (q, other_k), (other_q, k), (other_q[:1], other_k[:1])]
    which = [(0, 1), (0, 0), (0, 2), (3, 0), (0, 4), (2, 3)]

    def expected(one, other):
        (q, k), (other_q, other_k) = forms[one], forms[other]
        return ((q @ k.mT) * (other_q @ other_k.mT) * band).sum((-2, -1))

    for pair, found in zip(which, products_over_band(forms, which, width), strict=True):
        torch.testing.assert_close(found, expected(*pair), atol=1e-9, rtol=1e-10)
    if width >= n:
        (single,) = products_over_band([(q.float(), k.float()), (other_q.float(), other_k.float())], [(0, 1)], width)
        torch.testing.assert_close(single, expected(0, 1), atol=1e-2, rtol=1e-4)  # of float32, summed in float64
