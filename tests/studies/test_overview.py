"""What a study says over models."""

import numpy as np
import pytest
import xarray as xr

from tl_posgen.core.numbers import TRAINED, Numbers
from tl_posgen.studies.overview import Overview

NAME = "three_axis_r_within_rows"


def told(values, sizes):
    """The sentence on models with these values of one number, and so many parameters."""
    shape = (1, len(values), 1, 1, 1, 1)
    data = {
        NAME: (("init", "model", "revision", "text", "layer", "head"), np.reshape(values, shape)),
        "finished": (("model", "revision", "text"), np.ones(shape[1:4], dtype=bool)),
        "parameters": ("model", np.array(sizes, dtype=float)),
    }
    coords = {"init": [TRAINED], "model": list("abcdef"[: len(values)]), "revision": ["main"], "text": ["bundled"]}
    data = xr.Dataset(data, {**coords, "layer": [0], "head": [0]}, {"measures": ["three_axis"]})
    data[NAME].attrs["measure"] = "three_axis"
    (sentence,) = Overview().findings(Numbers(Overview(), data))
    return sentence


def test_a_number_is_correlated_with_size_over_the_models_that_have_it():
    """Of those that lack it the size counts neither for the correlation nor for how many models there are."""
    values, sizes = [0.5, 0.6, 0.4, 0.7], [1e5, 1e6, 3e4, 1e8]
    r = np.corrcoef(values, np.log(sizes))[0, 1]
    expected = f"over 4 models; with ln parameters r = {r:.2f}."
    assert told(values, sizes).endswith(expected)
    assert told([*values, np.nan], [*sizes, 2e3]).endswith(expected)


@pytest.mark.parametrize("values", [[0.5, 0.6, np.nan, np.nan], [0.5, 0.6, 0.7, np.nan]])
def test_two_or_three_models_have_no_correlation_with_size(values):
    assert "with ln parameters" not in told(values, [1e5, 1e6, 1e7, 1e8])
