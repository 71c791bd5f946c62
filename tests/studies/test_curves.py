"""What is followed over training, and when it has changed half of its way."""

import numpy as np
import pytest
import xarray as xr

from tl_posgen.core import registry
from tl_posgen.core.numbers import Numbers
from tl_posgen.position import ThreeAxis
from tl_posgen.studies.curves import CURVES, array_of, followed, half_way, numbers_of
from tl_posgen.studies.emergence import Emergence, values_of


def over_training(dims=("checkpoint",), **values):
    """Numbers of one model, "trained", over checkpoints."""
    arrays = {name: (("init", *dims), [array], {"measure": name.split("_")[0]}) for name, array in values.items()}
    data = xr.Dataset(arrays, {"init": ["trained"]}, {"measures": sorted({name.split("_")[0] for name in values})})
    return Numbers(Emergence(), data)


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


def test_a_per_head_number_is_its_mean_and_has_no_interval_without_groups_of_prompts():
    own = over_training(("checkpoint", "layer", "head"), a_r=np.arange(12.0).reshape(2, 2, 3))
    [curve] = followed(own.dataset)
    np.testing.assert_array_equal(values_of(own, curve), [2.5, 8.5])
    number = own.number(array_of(own, curve).isel(checkpoint=0))
    assert (number.value, number.low) == (2.5, pytest.approx(np.nan, nan_ok=True))


def test_a_number_by_prompt_has_its_interval():
    own = over_training(("checkpoint", "prompt"), a_x=[[1.0, 2, 3, 4], [5, 5, 5, 5]])
    [curve] = followed(own.dataset)
    number = own.number(array_of(own, curve).isel(checkpoint=0))
    half = 3.1824 * np.std([1, 2, 3, 4], ddof=1) / 2
    assert (number.low, number.high) == pytest.approx((2.5 - half, 2.5 + half))


def test_a_measure_without_curves_is_followed_by_its_first_numbers():
    own = over_training(other_a=[1.0], other_b=[1.0], other_c=[1.0], other_d=[1.0])
    curves = followed(own.dataset)
    assert [curve.name for curve in curves] == ["other_a", "other_b", "other_c"]
    assert (curves[0].label, curves[0].sentence) == ("other a", "Other a")


@pytest.mark.parametrize("measure", CURVES)
def test_every_curve_is_a_variable_of_a_registered_measure(measure):
    kind = registry.find(measure)
    for curve in CURVES[measure]:
        variable = kind.variables[curve.name.removeprefix(f"{measure}_")]
        assert set(curve.at) <= set(variable.dims)
        if curve.chance is not None:
            assert set(curve.chance) <= set(kind.variables["chance"].dims)


def test_a_study_keeps_numbers_of_every_head_and_means_of_others(mini, alice):
    """Curves that every head has are left out; numbers by prompt and by group stay as they are."""
    result = ThreeAxis()(mini, alice, length=24, n_prompts=4, progress=False)
    kept = numbers_of([result])
    assert kept["three_axis_r"].dims == ("init", "group", "tokens", "layer", "head")
    np.testing.assert_array_equal(kept["three_axis_r"], result.dataset["r"].transpose(*kept["three_axis_r"].dims))
    words = ThreeAxis.variables["r"].attributes
    assert kept["three_axis_r"].attrs == {**words, "measure": "three_axis", "range": [-1.0, 1.0]}
    assert not [name for name in ("a", "b", "c") if f"three_axis_{name}" in kept]
    assert kept["prompt_share"].dims == ("group",)
