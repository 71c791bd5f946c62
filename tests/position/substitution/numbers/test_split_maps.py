"""Position and content maps against the definition, pair by pair in float64, and against the variance decomposition."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.position.decomposition.numbers.variance_shares import TripleMoments, variance_shares
from tl_posgen.position.substitution.numbers.split_maps import split_maps
from tl_posgen.rope.rotation import Rope, inverse_frequencies, rotate


def by_hand(q, k, rope, scale, n_distances):
    """f and g, every pair on its own."""
    n, kbar = len(q), k[1:].mean(0)

    def at(x, place):
        return rotate(x[None], torch.tensor([place]), rope)[0]

    f = [[scale * at(q[i], i) @ at(kbar, j) for j in range(n)] for i in range(n)]
    turned = [torch.stack([at(q[i], d) for d in range(n_distances)]).mean(0) for i in range(n)]
    g = [[scale * turned[i] @ at(k[j] - kbar, 0) for j in range(n)] for i in range(n)]
    return torch.tensor(f), torch.tensor(g)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 999), window=st.sampled_from([None, 1, 3, 20]), rotary=st.sampled_from([2, 4, 6]))
def test_they_are_f_and_g_within_rows(seed, window, rotary):
    generator, rope, n, scale = torch.Generator().manual_seed(seed), Rope(inverse_frequencies(rotary)), 7, 0.3
    q, k = 1 + torch.randn(2, 1, n, 6, generator=generator, dtype=torch.float64)
    turned_q, turned_k = (rotate(x, torch.arange(n), rope) for x in (q, k))
    slope = torch.tensor([0.1])
    distance = torch.arange(n)[:, None] - torch.arange(n)
    seen = (distance >= 0) & (distance < (window or n))
    scores = (scale * turned_q @ turned_k.mT - 0.1 * distance).masked_fill(~seen, -torch.inf)
    found = split_maps(scores, q, k, rope, scale, window=window, slopes=slope)
    f, g = by_hand(q[0], k[0], rope, scale, min(n, window or n))
    expected = {"scores": scores[0], "position": f - 0.1 * distance, "content": g}
    flat = []
    for name, one in expected.items():
        mine, values = getattr(found, name)[0], []
        for i in range(n):
            keys = [j for j in range(1, n) if seen[i, j]] if i else []
            row = one[i, keys].double() - one[i, keys].double().mean()
            torch.testing.assert_close(mine[i, keys], row, atol=1e-6, rtol=1e-6)
            assert mine[i, [j for j in range(n) if j not in keys]].isnan().all()
            values.append(row)
        flat.append(torch.cat(values))
    if window == 1:
        assert found.r.isnan().all()
        return
    w, *parts = flat
    for r, part in zip(found.r[:, 0], (*parts, sum(parts)), strict=True):
        assert float(r) == pytest.approx(float(torch.corrcoef(torch.stack([w, part]))[0, 1]), abs=1e-6)


def test_over_every_triple_they_hold_what_variance_calls_position_and_content():
    """f(q, d) and g(q, k) of all queries, keys and distances, each less its mean over what it does not share."""
    generator, rope, n = torch.Generator().manual_seed(0), Rope(inverse_frequencies(4)), 6
    q, k = 0.5 + torch.randn(2, 1, n, 4, generator=generator, dtype=torch.float64)
    shares = variance_shares(TripleMoments.from_qk(q, k, rope, first_token=False), rope, 1.0, n).within_rows
    _, g = by_hand(q[0], k[0], rope, 1.0, n)
    at = torch.stack([rotate(q[0, 1:], torch.full((n - 1,), d), rope) for d in range(n)], 1)  # [query, distance, d]
    kbar, w = k[0, 1:].mean(0), at @ k[0, 1:].T
    by_distance, by_key = at @ kbar, g[1:, 1:]
    total = (w - w.mean((1, 2), keepdim=True)).square().mean()
    position = (by_distance - by_distance.mean(1, keepdim=True)).square().mean()
    content = (by_key - by_key.mean(1, keepdim=True)).square().mean()
    assert float(shares.share("d", "qd")) == pytest.approx(float(position / total))
    assert float(shares.share("k", "qk")) == pytest.approx(float(content / total))


@pytest.mark.parametrize("n", [2, 3])
def test_where_rows_do_not_vary_there_is_no_correlation(n):
    q, rope = torch.ones(1, n, 2), Rope(torch.zeros(1, dtype=torch.float64))
    assert all(math.isnan(r) for r in split_maps(q @ q.mT, q, q, rope, 1.0).r.flatten().tolist())
