"""Products of sources against brute force over every query, key and distance."""

import pytest
import torch
from drawn import normal
from source_vectors import part_of

from tl_posgen.position.decomposition.numbers.variance_shares import TripleMoments, weighted_spread
from tl_posgen.rope.planes import turning_factors
from tl_posgen.rope.rotation import Rope, complex_planes, inverse_frequencies
from tl_posgen.sources.numbers import TERMS, source_form, source_weights

ROPE = Rope(inverse_frequencies(4, 10.0))  # of six numbers, two do not rotate
N_DISTANCES = 7


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("name", TERMS)
def test_products_with_the_weights_are_mean_products_of_scores(name, side):
    term, (q, k) = TERMS[name], 1 + normal(2, 3, 2, 5, 6)  # three sources
    turn = turning_factors(torch.arange(N_DISTANCES), ROPE, 6)
    pq, pk = (part_of(complex_planes(x, ROPE), term[of], 2) for x, of in ((q, "q"), (k, "k")))
    u = part_of(turn, term["d"], 0)
    sides = (pq, pk.sum(0, keepdim=True)) if side == "q" else (pq.sum(0, keepdim=True), pk)
    scores = torch.einsum("ahim,bhjm,dm->abhijd", sides[0], sides[1].conj(), u).real.flatten(0, 1)
    expected = (scores * scores.sum(0)).mean((2, 3, 4))

    moments = TripleMoments.from_qk(q.sum(0), k.sum(0), ROPE)
    distance = weighted_spread(turn, torch.full((N_DISTANCES,), 1 / N_DISTANCES, dtype=torch.float64))
    x = part_of(q if side == "q" else k, term[side], 2)
    weights = source_weights(source_form(term, side, moments, distance), x.sum(0), ROPE)
    found = (x * weights).sum(-1).mean(-1)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
