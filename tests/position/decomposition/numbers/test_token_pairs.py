"""Tallies of token pairs against counting pair by pair."""

import operator
from collections import Counter, defaultdict
from functools import reduce

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.position.decomposition.numbers import token_pairs
from tl_posgen.position.decomposition.numbers.token_pairs import TokenPairTally, TokenSums


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
    monkeypatch.setattr(token_pairs, "KEEP", 2)
    tally = tally_of(torch.diag(torch.tensor([1.0, 3.0, 2.0]))[None], [4, 5, 6])
    assert tally.query_token.tolist() == [[5, 6]]
    torch.testing.assert_close(tally.share, torch.tensor([[9 / 14, 4 / 14]], dtype=torch.float64))


def test_tallies_of_some_heads_each_are_one_of_all_of_them(monkeypatch):
    monkeypatch.setattr(token_pairs, "KEEP", 4)
    e = torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(1))
    whole, *parts = (tally_of(some, [1, 2, 1, 3, 2]) for some in (e, e[:1], e[1:]))
    together = TokenPairTally.join_heads(parts)
    for name in ("kind", "total", "count", "energy"):
        torch.testing.assert_close(getattr(together, name), getattr(whole, name))
