"""What is followed over training."""

import numpy as np
import pytest
import xarray as xr

from tl_posgen.core import registry
from tl_posgen.core.numbers import Numbers
from tl_posgen.position import ThreeAxis
from tl_posgen.studies.curves import FOLLOWED, followed, numbers_of
from tl_posgen.studies.emergence import Emergence


def over_training(dims=("checkpoint",), **values):
    """Numbers of one model, "trained", over checkpoints."""
    arrays = {name: (("init", *dims), [array], {"measure": name.split("_")[0]}) for name, array in values.items()}
    data = xr.Dataset(arrays, {"init": ["trained"]}, {"measures": sorted({name.split("_")[0] for name in values})})
    return Numbers(Emergence(), data)


def test_numbers_over_steps_are_means_over_heads_and_have_the_interval_of_their_prompts():
    values = {
        "a_r": (("layer", "head"), np.arange(12.0).reshape(2, 2, 3)),
        "a_x": (("prompt",), [[1.0, 2, 3, 4], [5] * 4]),
    }
    arrays = {
        name: (("init", "checkpoint", *dims), [array], {"measure": "a"}) for name, (dims, array) in values.items()
    }
    arrays["step"] = (("checkpoint",), [0, 10])
    own = Numbers(Emergence(), xr.Dataset(arrays, {"init": ["trained"]}, {"measures": ["a"]}))
    first, last = (own.measure.at_steps(own, "a_r")[step] for step in (0, 10))
    assert (first.value, last.value, np.isnan(first.low)) == (2.5, 8.5, True)
    number = own.measure.at_steps(own, "a_x")[0]
    half = 3.1824 * np.std([1, 2, 3, 4], ddof=1) / 2
    assert (number.low, number.high) == pytest.approx((2.5 - half, 2.5 + half))


def test_a_measure_without_curves_is_followed_by_its_first_numbers():
    own = over_training(other_a=[1.0], other_b=[1.0], other_c=[1.0], other_d=[1.0])
    curves = followed(own.dataset)
    assert [curve.name for curve in curves] == ["other_a", "other_b", "other_c"]
    assert (curves[0].label, curves[0].sentence) == ("other a", "Other a")


@pytest.mark.parametrize("measure", FOLLOWED)
def test_every_curve_is_a_variable_of_a_registered_measure(measure):
    kind = registry.find(measure)
    for curve in FOLLOWED[measure]:
        variable = kind.variables[curve.name.removeprefix(f"{measure}_")]
        assert set(curve.at) <= set(variable.dims)


@pytest.mark.longer
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
