"""What is followed over training, and when it has changed half of its way."""

import numpy as np
import pytest
import xarray as xr

from tl_posgen.core import registry
from tl_posgen.studies.curves import CURVES, curve_of, followed, half_way, interval_of, values_of


def over_training(**values):
    data = {name: (dims, array, {"measure": name.split("_")[0]}) for name, (dims, array) in values.items()}
    return xr.Dataset(data, attrs={"measures": sorted({name.split("_")[0] for name in values})})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 1.0], (1, 1)),
        ([0.0, 0.2, 0.6, 0.9, 1.0], (2, 2)),
        ([0.37, 0.69, 0.42, 0.32, 0.47, 0.61, 0.66, 0.72], (1, 5)),
        ([1.0, 0.4, 0.0], (1, 1)),
        ([0.5, 0.5], (0, 0)),
        ([0.5], (0, 0)),
    ],
)
def test_half_of_the_change_is_found_first_and_for_good(values, expected):
    assert half_way(np.array(values)) == expected


def test_a_per_head_number_is_its_mean_and_has_no_interval():
    heads = np.arange(12.0).reshape(2, 2, 3)
    dims = ("checkpoint", "layer", "head")
    data = over_training(a_r=(dims, heads), a_r_low=(dims, heads), a_r_high=(dims, heads))
    np.testing.assert_array_equal(values_of(data, "a_r"), [2.5, 8.5])
    assert interval_of(data, "a_r") == {}


def test_a_number_of_the_model_has_the_interval_that_stands_beside_it():
    dims = ("checkpoint",)
    data = over_training(a_x=(dims, [1.0, 2.0]), a_x_low=(dims, [0.5, 1.5]), a_x_high=(dims, [2.0, 3.0]))
    np.testing.assert_array_equal(interval_of(data, "a_x")["high"], [2, 3])


def test_a_measure_without_curves_is_followed_by_its_first_numbers():
    dims = ("checkpoint",)
    data = over_training(other_a=(dims, [1.0]), other_b=(dims, [1.0]), other_c=(dims, [1.0]), other_d=(dims, [1.0]))
    assert [curve.name for curve in followed(data)] == ["other_a", "other_b", "other_c"]
    assert (curve_of("other_a").label, curve_of("other_a").told) == ("other a", "Other a")


@pytest.mark.parametrize("measure", CURVES)
def test_every_curve_is_a_variable_or_summary_number_of_a_registered_measure(measure):
    declared = registry.find(measure).variables
    for curve in CURVES[measure]:
        key = curve.name.removeprefix(f"{measure}_")
        assert key in declared or f"mean_{key}" in declared
