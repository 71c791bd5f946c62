"""Terms of a split, pair by pair and plane by plane in float64."""

import pytest
import torch

from tl_posgen.prompt.numbers import TERMS, split_terms
from tl_posgen.rope.planes import turning_factors
from tl_posgen.rope.rotation import Rope, complex_planes, inverse_frequencies, rotate

ROPES = {
    "half": Rope(inverse_frequencies(8, 100.0)),
    "adjacent": Rope(inverse_frequencies(8, 100.0), pairing="adjacent"),
    "partial, scaled": Rope(inverse_frequencies(4, 100.0), scaling=1.3),
    "none": Rope(),
}
SCALE, N = 0.3, 5


@pytest.fixture(params=ROPES.values(), ids=ROPES.keys())
def drawn(request):
    torch.manual_seed(0)
    rope, options = request.param, {"dtype": torch.float64}
    q, k = torch.randn(2, 2, N, 8, **options)
    mean_query, mean_key = torch.randn(2, 2, 8, **options)
    mean_turn = turning_factors(torch.arange(7), rope, 8).mean(0).expand(2, -1)
    return q, k, mean_query, mean_key, mean_turn, rope


def test_each_term_is_its_formula_pair_by_pair(drawn):
    q, k, mean_query, mean_key, mean_turn, rope = drawn
    terms = split_terms(*drawn, SCALE)
    zq, zk, mq, mk = (complex_planes(x, rope) for x in (q, k, mean_query, mean_key))
    turn = turning_factors(torch.arange(N), rope, 8)
    for head in range(2):
        for i in range(N):
            for j in range(i + 1):
                u, ubar, e = turn[i - j], mean_turn[head], (zk[head, j] - mk[head]).conj()
                expected = (
                    zq[head, i] * mk[head].conj() * u,
                    mq[head] * e * ubar,
                    (zq[head, i] - mq[head]) * e * ubar,
                    zq[head, i] * e * (u - ubar),
                )
                for name, planes in zip(TERMS, expected, strict=True):
                    found = terms[name][head, i, j]
                    torch.testing.assert_close(found, SCALE * planes.real.sum(), rtol=1e-12, atol=1e-12)


def test_the_terms_add_up_to_the_scores(drawn):
    q, k, *_, rope = drawn
    scores = SCALE * rotate(q, torch.arange(N), rope) @ rotate(k, torch.arange(N), rope).mT
    torch.testing.assert_close(sum(split_terms(*drawn, SCALE).values()), scores, rtol=1e-12, atol=1e-12)


def test_fewer_queries_than_keys_are_the_last_ones(drawn):
    q, k, *rest = drawn
    whole, last = split_terms(*drawn, SCALE), split_terms(q[:, -2:], k, *rest, SCALE)
    for name in TERMS:
        torch.testing.assert_close(last[name], whole[name][:, -2:])
