"""Terms by plane and source against the split of whole queries and keys, in float64."""

import pytest
import torch

from tl_posgen.prompt.numbers import TERMS, source_terms, split_terms
from tl_posgen.rope.planes import turning_factors
from tl_posgen.rope.rotation import Rope, complex_planes, inverse_frequencies

ROPES = {
    "half": Rope(inverse_frequencies(8, 100.0)),
    "partial, scaled": Rope(inverse_frequencies(4, 100.0), scaling=1.3),
    "none": Rope(),
}
SCALE, N, QUERY = 0.3, 6, 5


@pytest.fixture(params=ROPES.values(), ids=ROPES.keys())
def rope(request):
    return request.param


@pytest.mark.parametrize(("source_q", "source_k"), [(1, 1), (1, 3), (3, 1), (2, 3)])
def test_sources_and_planes_add_up_to_the_terms_of_the_whole(rope, source_q, source_k):
    torch.manual_seed(0)
    drawn = [torch.randn(*shape, 8, dtype=torch.float64) for shape in ((source_q,),) * 2 + ((source_k, N), (source_k,))]
    q, mean_query, k, mean_key = drawn
    turn = turning_factors(torch.arange(7), rope, 8).mean(0)
    found = source_terms(*drawn, turn, QUERY - torch.arange(N), rope, SCALE)
    planes = len(rope.inv_freq) + (rope.rotary_dim < 8)
    assert found.shape == (4, N, planes, source_q * source_k)
    whole_q = torch.zeros(1, N, 8, dtype=torch.float64)
    whole_q[0, QUERY] = q.sum(0)
    whole = split_terms(
        whole_q, k.sum(0)[None], mean_query.sum(0)[None], mean_key.sum(0)[None], turn[None], rope, SCALE
    )
    for number, name in enumerate(TERMS):
        torch.testing.assert_close(found[number].sum((-2, -1)), whole[name][0, QUERY], rtol=1e-10, atol=1e-12)


def test_one_entry_is_its_formula(rope):
    torch.manual_seed(1)
    q, mean_query, mean_key = torch.randn(1, 8), torch.randn(1, 8), torch.randn(3, 8)
    k, turn = torch.randn(3, N, 8), turning_factors(torch.arange(7), rope, 8).mean(0)
    found = source_terms(q, mean_query, k, mean_key, turn, QUERY - torch.arange(N), rope, SCALE)
    zq, mq, zk, mk = (complex_planes(x.double(), rope) for x in (q[0], mean_query[0], k[2, 1], mean_key[2]))
    u, e = turning_factors(torch.tensor([QUERY - 1]), rope, 8)[0], (zk - mk).conj()
    formulas = (zq * mk.conj() * u, mq * e * turn, (zq - mq) * e * turn, zq * e * (u - turn))
    n = len(rope.inv_freq)
    for number, planes in enumerate(formulas):
        torch.testing.assert_close(found[number, 1, :n, 2], SCALE * planes.real[:n])
        if n < 4:  # the unrotated remainder is one
            torch.testing.assert_close(found[number, 1, n, 2], SCALE * planes.real[n:].sum())
