"""The residual's summaries against dense linear algebra, with a real three-axis least-squares residual."""

import operator
from collections import Counter, defaultdict
from functools import reduce
from itertools import pairwise

import numpy as np
import pytest
import torch
from dense_fit import dense_residual
from hypothesis import given, settings
from hypothesis import strategies as st
from rotated_heads import ROTATING

from tl_posgen.position.decomposition.numbers import residual_moments
from tl_posgen.position.decomposition.numbers.pair_moments import pair_moments_from_scores
from tl_posgen.position.decomposition.numbers.residual_moments import (
    PlaneParts,
    ResidualSums,
    TokenPairTally,
    TokenSums,
)
from tl_posgen.position.decomposition.numbers.three_axis_fit import fit_three_axis
from tl_posgen.rope.rotation import Rope, rotate

SCALE, N, D_HEAD = 0.3, 11, 8
VISIBLE = torch.ones(N, N).tril().bool()


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotated_head(rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
    position = torch.arange(N)
    q, k = (rotate(random_tensor(2, N, D_HEAD, seed=seed), position, rope) for seed in (0, 1))
    return q, k


def sums_of(scores: torch.Tensor, *blocks: int, window: int | None = None, **parts) -> ResidualSums:
    """Of what the fit without the first token leaves, from blocks of rows that end where they say."""
    moments = pair_moments_from_scores(scores, window=window).without_first_token
    sums = ResidualSums(fit_three_axis(moments, tolerance=1e-13), crop=N, crop_within=N, **parts)
    for start, stop in pairwise((0, *blocks, N)):
        sums.add(scores[:, start:stop, :stop])
    return sums


@pytest.mark.parametrize("rope", ROTATING.values(), ids=ROTATING.keys())
def test_products_with_planes_are_those_of_one_fit_a_plane(rope):
    q, k = rotated_head(rope)
    left = dense_residual(SCALE * q @ k.mT, VISIBLE)
    shares = PlaneParts(q, k, rope, SCALE).products(left) / left.square().sum((1, 2))[:, None]
    torch.testing.assert_close(shares.sum(-1), torch.ones(2, dtype=torch.float64))
    first = [0, len(rope.inv_freq)] if rope.pairing == "half" else [0, 1]
    own = dense_residual(SCALE * q[..., first] @ k[..., first].mT, VISIBLE)
    torch.testing.assert_close(shares[:, 0], (own * left).sum((1, 2)) / left.square().sum((1, 2)))


@settings(max_examples=10, deadline=None)
@given(cut=st.integers(1, N - 1), window=st.none() | st.integers(3, N))
def test_sums_over_blocks_of_rows_are_those_of_dense_least_squares(cut, window):
    q, k = rotated_head(ROTATING["half"])
    distance = torch.arange(N)[:, None] - torch.arange(N)
    visible = (distance >= 0) & (distance < (window or N))
    scores = (SCALE * q @ k.mT).masked_fill(~visible, -torch.inf)
    visible[:, 0] = False
    planes = PlaneParts(q, k, ROTATING["half"], SCALE)
    sums = sums_of(scores, cut, window=window, planes=planes, tokens=torch.arange(N))
    left = dense_residual(scores, visible)
    torch.testing.assert_close(sums.corner, left)
    torch.testing.assert_close(sums.energy, left.square().sum((1, 2)))
    diagonals = [left.diagonal(-d, 1, 2) for d in range(N)]
    torch.testing.assert_close(sums.energy_at, torch.stack([x.square().sum(-1) for x in diagonals], 1))
    torch.testing.assert_close(sums.abs_at, torch.stack([x.abs().sum(-1) for x in diagonals], 1))
    assert sums.n_distance.tolist() == [int(visible.diagonal(-d).sum()) for d in range(N)]
    seen = scores.masked_fill(~visible, 0)
    within = (seen - seen.sum(-1, keepdim=True) / visible.sum(-1, keepdim=True).clamp(min=1)) * visible
    torch.testing.assert_close(sums.within_corner, within)
    torch.testing.assert_close(sums.within, within.square().sum((1, 2)))
    torch.testing.assert_close(sums.squares, seen.square().sum((1, 2)))
    torch.testing.assert_close(sums.in_planes, planes.products(left))
    torch.testing.assert_close(sums.within_planes, planes.products(within))
    torch.testing.assert_close(sums.tokens.total, left)  # every token once


def test_what_is_dropped_is_zero_in_these_heads_alone():
    sums = sums_of(random_tensor(2, N, N), tokens=torch.arange(N) % 4)
    within = sums.within.clone()
    sums.drop(torch.tensor([True, False]), torch.tensor([False, False]))
    assert [bool(x.any()) for x in sums.energy_at] == [bool(x.any()) for x in sums.corner] == [False, True]
    assert [bool(x.any()) for x in sums.tokens.total] == [False, True]
    torch.testing.assert_close(sums.within, within)


def tally_of(e: torch.Tensor, tokens: list[int]) -> TokenPairTally:
    """Of the residuals of one prompt, added in two blocks of rows."""
    e, mask, cut = e.double().tril(), torch.ones(e.shape[1:]).tril().bool(), len(tokens) // 2
    sums = TokenSums(torch.tensor(tokens), len(e), e.device)
    for start, stop in ((0, cut), (cut, len(tokens))):
        sums.add(e[:, start:stop, :stop], mask[start:stop, :stop])
    return sums.tally(e.square().sum((1, 2)))


@settings(max_examples=20, deadline=None)
@given(ids=st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=3))
def test_a_tally_over_prompts_is_that_of_all_pairs(ids):
    generator = torch.Generator().manual_seed(0)
    count, total, energy, tallies = Counter(), defaultdict(float), 0.0, []
    for row in ids:
        e = torch.randn(2, 6, 6, generator=generator, dtype=torch.float64)
        tallies.append(tally_of(e, row))
        energy += float(e[1].tril().square().sum())
        for i in range(6):
            for j in range(i + 1):
                count[row[i], row[j]] += 1
                total[row[i], row[j]] += float(e[1, i, j])
    tally = reduce(operator.add, tallies)
    known = int((tally.count[1] > 0).sum())
    kinds = list(zip(tally.query_token[1].tolist(), tally.key_token[1].tolist(), strict=True))[:known]
    assert sorted(kinds) == sorted(count)
    assert tally.count[1][:known].tolist() == [count[kind] for kind in kinds]
    np.testing.assert_allclose(tally.mean[1][:known], [total[kind] / count[kind] for kind in kinds])
    np.testing.assert_allclose(tally.share[1][:known], [total[kind] ** 2 / count[kind] / energy for kind in kinds])
    assert (tally.share.diff(dim=1) <= 0).all()


def test_a_full_tally_keeps_the_kinds_that_explain_most(monkeypatch):
    monkeypatch.setattr(residual_moments, "KEEP", 2)
    tally = tally_of(torch.diag(torch.tensor([1.0, 3.0, 2.0]))[None], [4, 5, 6])
    assert tally.query_token.tolist() == [[5, 6]]
    torch.testing.assert_close(tally.share, torch.tensor([[9 / 14, 4 / 14]], dtype=torch.float64))


def test_tallies_of_some_heads_each_are_one_of_all_of_them(monkeypatch):
    monkeypatch.setattr(residual_moments, "KEEP", 4)
    e = torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(1))
    whole, *parts = (tally_of(some, [1, 2, 1, 3, 2]) for some in (e, e[:1], e[1:]))
    together = TokenPairTally.join_heads(parts)
    for name in ("kind", "total", "count", "energy"):
        torch.testing.assert_close(getattr(together, name), getattr(whole, name))
