"""The key part, fitted again with every pair at one distance, against plain least squares."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rotated_heads import captures_of

from tl_posgen.position.decomposition.numbers.pair_moments import pair_moments_from_scores
from tl_posgen.position.decomposition.numbers.three_axis_fit import fit_three_axis
from tl_posgen.position.distance.hooks import scores_at_distance
from tl_posgen.position.distance.one_distance import refit_r, same_key_part


def key_part(scores: torch.Tensor) -> torch.Tensor:
    """c of one head's least-squares fit to a_{i-j} + b_i + c_j over j <= i, without mean and linear trend."""
    n = len(scores)
    query, key = torch.tril_indices(n, n)
    design = torch.cat([torch.eye(n, dtype=torch.float64)[index] for index in (query - key, query, key)], 1)
    c = torch.linalg.lstsq(design, scores.double()[query, key, None], driver="gelsd").solution[2 * n :, 0]
    line = torch.stack([torch.ones(n), torch.arange(n)], 1).double()
    return c - line @ torch.linalg.lstsq(line, c[:, None]).solution[:, 0]


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom"])
def test_the_fit_made_again_against_least_squares(family_model, name):
    (capture,) = captures_of(family_model(name, "bridge"), torch.arange(2, 16)[None], layers=[1])
    found = refit_r(capture, torch.tensor([0.0, 5.0]))
    for first, of_variant in enumerate(found):
        for at, d0 in enumerate((0, 5)):
            for head in range(2):
                two = [x[head, first:, first:] for x in (capture.scores(), scores_at_distance(capture, d0, None))]
                expected = torch.corrcoef(torch.stack([key_part(scores) for scores in two]))[0, 1]
                torch.testing.assert_close(of_variant[head, at], expected, atol=1e-4, rtol=1e-4)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_neither_levels_nor_slopes_of_the_scores_matter(seed):
    """Adding any a_d, b_i and straight line in j to the scores leaves what is compared as it is."""
    generator = torch.Generator().manual_seed(seed)
    scores, a, b = (torch.randn(*shape, generator=generator).double() for shape in ((2, 9, 9), (9,), (9,)))
    index = torch.arange(9)
    moved = scores + a[(index[:, None] - index).clamp(min=0)] + b[:, None] + 3.0 * index
    one, other = (fit_three_axis(pair_moments_from_scores(x)) for x in (scores, moved))
    torch.testing.assert_close(same_key_part(one, other), torch.ones(2, dtype=torch.float64))


def test_fits_of_as_many_parameters_as_pairs_say_nothing():
    fit = fit_three_axis(pair_moments_from_scores(torch.randn(2, 3, 3)))
    assert same_key_part(fit, fit).isnan().all()
