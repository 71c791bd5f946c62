"""Means over prompts: each number over the prompts that have it, of the heads that were asked for."""

import numpy as np
import pytest
import torch
import xarray as xr

from tl_posgen.collector import HeadRows, Variable
from tl_posgen.models import run_capture
from tl_posgen.slash.layer_means import by_head, means_over_prompts, strongest, with_and_without
from tl_posgen.slash.slash_scores import slash_statistics, uniform_scores


def pattern_of(n, seed=0):
    scores = torch.randn(2, n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(-1)


@pytest.fixture
def means_of(mini):
    """Patterns, a prompt each, to the means over prompts in one layer."""

    def means(*patterns):
        rows, kept = HeadRows(), []
        for prompt, pattern in enumerate(patterns):
            run_capture(mini, torch.arange(2)[None], kept.append, layers=[3], heads=[0, 1])
            kept[-1].prompt = prompt
            rows.add(kept[-1], **by_head(slash_statistics(pattern)))
        return means_over_prompts(rows).sel(layer=3)

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


def test_what_is_declared_is_declared_without_the_first_token_too():
    declared = with_and_without({"r": Variable("r", "nats", "its formula", ("layer",), headline="r")})
    assert list(declared) == ["r", "r_without_first_token"]
    other = declared["r_without_first_token"]
    assert (other.label, other.unit, other.dims, other.headline) == ("r without first token", "nats", ("layer",), "")
