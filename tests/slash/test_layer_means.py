"""Means over prompts: each number over the prompts that have it, of the heads that were asked for."""

import numpy as np
import pytest
import torch
import xarray as xr

from tl_posgen.core.sums import Sums
from tl_posgen.models import run_capture
from tl_posgen.slash import Slash
from tl_posgen.slash.layer_means import best_distance, strongest, with_tokens
from tl_posgen.slash.numbers.slash_scores import slash_statistics, uniform_scores


def pattern_of(n, seed=0):
    scores = torch.randn(2, n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(-1)


@pytest.fixture
def means_of(mini):
    """Patterns, a prompt each, to the means over prompts in one layer, all tokens."""

    def means(*patterns):
        sums, kept = Sums(Slash.variables), []
        for prompt, pattern in enumerate(patterns):
            run_capture(mini, torch.arange(2)[None], kept.append, layers=[3], heads=[0, 1])
            kept[-1].prompt = prompt
            sums.add_layer(kept[-1], with_tokens(slash_statistics(pattern)))
        return sums.means().sel(layer=3, tokens="all")

    return means


def test_each_prompt_counts_once_and_a_distance_where_it_exists(means_of):
    patterns = [pattern_of(n, seed=n) for n in (30, 50, 40)]
    found = means_of(*patterns)
    for distance in (0, 29, 30, 45, 49):
        reach = [one.diagonal(-distance, -2, -1).mean(-1) for one in patterns if one.shape[-1] > distance]
        np.testing.assert_allclose(found["score"].sel(distance=distance), torch.stack(reach).mean(0))
        uniform = [uniform_scores(one.shape[-1])[distance] for one in patterns if one.shape[-1] > distance]
        np.testing.assert_allclose(found["uniform"].sel(distance=distance), np.mean(uniform))
    away = [slash_statistics(pattern).attention_distance for pattern in patterns]
    np.testing.assert_allclose(found["attention_distance"], torch.stack(away).mean(0))


def test_what_a_prompt_of_one_token_does_not_have_is_left_out(means_of):
    pattern = pattern_of(20)
    found = means_of(torch.ones(2, 1, 1, dtype=torch.float64), pattern)
    np.testing.assert_allclose(found["relative_entropy"], slash_statistics(pattern).relative_entropy)


def test_the_strongest_heads_are_those_measured_strongest_first():
    score = xr.DataArray([[0.1, np.nan], [0.9, 0.3]], {"layer": [1, 3], "head": [0, 5]}, ("layer", "head"))
    assert strongest(score, 2) == [(3, 0), (3, 5)]
    assert strongest(score, 9) == [(3, 0), (3, 5), (1, 0)]


def test_the_best_distance_is_below_half_of_what_the_prompts_reach_with_and_without_the_first_token():
    score = np.zeros((2, 1, 2, 6))
    score[..., 2], score[..., 3], score[1, ..., 5] = 0.5, 0.9, np.nan
    score[0, 0, 1] = np.nan
    dims = ("tokens", "layer", "head", "distance")
    found = best_distance(xr.DataArray(score, {"distance": range(6)}, dims))
    np.testing.assert_array_equal(found.squeeze("layer"), [[2, np.nan], [0, 0]])  # D < 3, and D < 2 of five
