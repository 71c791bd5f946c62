"""Terms of a split, whole and by plane and source, pair by pair in float64."""

import pytest
import torch
from drawn import normal
from rotated_heads import ROPES

from tl_posgen.prompt.numbers import TERMS, source_terms, split_terms
from tl_posgen.rope.planes import turning_factors
from tl_posgen.rope.rotation import complex_planes, rotate

SCALE, N = 0.3, 5


def by_plane(q, k, mean_query, mean_key, mean_turn, rope):
    """Terms [term, head, query, key, plane], pair by pair."""
    zq, zk, mq, mk = (complex_planes(x, rope) for x in (q, k, mean_query[:, None], mean_key[:, None]))
    away = torch.arange(N)[:, None] - torch.arange(N)
    u, ubar, e = turning_factors(away.flatten(), rope, 8).unflatten(0, (N, N)), mean_turn[:, None, None], zk - mk
    zq, mq, e, mk = zq[:, :, None], mq[:, :, None], e[:, None].conj(), mk[:, None].conj()
    terms = zq * mk * u, (mq * e * ubar).expand(-1, N, -1, -1), (zq - mq) * e * ubar, zq * e * (u - ubar)
    return SCALE * torch.stack([one.real for one in terms])


@pytest.fixture(params=ROPES.values(), ids=ROPES.keys())
def drawn(request):
    rope, (q, k), (mean_query, mean_key) = request.param, normal(2, 2, N, 8), normal(2, 2, 8, seed=1)
    return q, k, mean_query, mean_key, turning_factors(torch.arange(7), rope, 8).mean(0).expand(2, -1), rope


def test_each_term_is_its_formula_and_they_add_up_to_the_scores(drawn):
    q, k, *rest, rope = drawn
    terms = split_terms(*drawn, SCALE)
    torch.testing.assert_close(torch.stack([terms[name] for name in TERMS]), by_plane(*drawn).sum(-1))
    scores = SCALE * rotate(q, torch.arange(N), rope) @ rotate(k, torch.arange(N), rope).mT
    torch.testing.assert_close(sum(terms.values()), scores, rtol=1e-12, atol=1e-12)
    last = split_terms(q[:, -2:], k, *rest, rope, SCALE)  # fewer queries than keys are the last ones
    for name in TERMS:
        torch.testing.assert_close(last[name], terms[name][:, -2:])


@pytest.mark.parametrize(("source_q", "source_k"), [(1, 1), (1, 3), (3, 1), (2, 3)])
def test_sources_and_planes_are_their_formula_and_add_up_to_the_terms_of_the_whole(drawn, source_q, source_k):
    *_, turn, rope = drawn
    query, n = N - 1, len(rope.inv_freq)
    q, k = normal(source_q, N, 8, seed=1), normal(source_k, N, 8, seed=2)
    mean_query, mean_key = normal(len(q), 8, seed=3), normal(len(k), 8, seed=4)
    found = source_terms(q[:, query], mean_query, k, mean_key, turn[0], query - torch.arange(N), rope, SCALE)
    assert found.shape == (4, N, n + (n < 4), source_q * source_k)
    for pair, (s, t) in enumerate((s, t) for s in range(source_q) for t in range(source_k)):
        every = by_plane(q[s, None], k[t, None], mean_query[s, None], mean_key[t, None], turn[:1], rope)[:, 0, query]
        torch.testing.assert_close(found[:, :, :n, pair], every[..., :n])
        if n < 4:  # the unrotated remainder is one
            torch.testing.assert_close(found[:, :, n, pair], every[..., n:].sum(-1))
    sums = (x.sum(0)[None] for x in (q, k, mean_query, mean_key))
    whole = split_terms(*sums, turn[:1], rope, SCALE)
    for number, name in enumerate(TERMS):
        torch.testing.assert_close(found[number].sum((-2, -1)), whole[name][0, query], rtol=1e-10, atol=1e-12)
