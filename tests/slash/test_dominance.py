"""Best distances of mean slash scores, and statistics of queries and keys."""

import numpy as np
import pytest
import torch
import xarray as xr

from tl_posgen.slash.dominance import best_distance, statistics_from_qk, statistics_of


def test_the_best_distance_is_below_half_of_what_the_prompts_reach_with_and_without_the_first_token():
    score = np.zeros((2, 1, 2, 6))
    score[..., 2], score[..., 3], score[1, ..., 5] = 0.5, 0.9, np.nan
    score[0, 0, 1] = np.nan
    dims = ("tokens", "layer", "head", "distance")
    found = best_distance(xr.DataArray(score, {"distance": range(6)}, dims))
    np.testing.assert_array_equal(found.squeeze("layer"), [[2, np.nan], [0, 0]])  # D < 3, and D < 2 of five


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "bloom"])  # a window, soft caps, slopes
def test_a_layers_own_queries_and_keys_have_the_statistics_of_its_pattern(family_model, captured, name):
    for layer in captured(family_model(name, "bridge"), torch.arange(2, 42), "pattern"):
        own, found = statistics_of(layer), statistics_from_qk(layer, layer.rotated_q, layer.rotated_k)
        for part in ("score", "uniform", "attention_distance", "first_token"):
            torch.testing.assert_close(getattr(found, part), getattr(own, part), atol=1e-5, rtol=1e-4, equal_nan=True)
