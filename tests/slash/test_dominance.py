"""Best distances and strongest heads of mean slash scores."""

import numpy as np
import xarray as xr

from tl_posgen.slash.dominance import best_distance, strongest


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
