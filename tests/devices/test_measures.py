"""Every measure on an accelerator: the numbers of the CPU, with random init, and its pictures."""

import pytest
from devices.near import assert_near, assert_same_numbers
from quick_options import KINDS, NAMES, OPTIONS

from tl_posgen.errors import InputError
from tl_posgen.models.tokens import bundled_text
from tl_posgen.position import ThreeAxis, Variance

CUT = {"length": 18, "n_prompts": 4, "nulls": 1, "progress": False}


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("hooked", "float32"),
        pytest.param("hooked", "bfloat16", marks=pytest.mark.slow),
        pytest.param("bridge", "float32", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_a_measure_gives_the_numbers_of_the_cpu(name, backend, dtype, models, device):
    asked = KINDS[name].with_options(OPTIONS.get(name, {}))
    if dtype == "bfloat16" and name.endswith("coupling"):
        with pytest.raises(InputError, match="float32"):
            asked(models(backend, dtype)[0], bundled_text(), **CUT)
        return
    there, here = (asked(model, bundled_text(), **CUT) for model in models(backend, dtype))
    for kind in there.kinds:
        there.plot(kind)
    for variable, expected in here.dataset.data_vars.items():
        if expected.dtype.kind == "f":
            error = device.error_of_bfloat16 if dtype == "bfloat16" else device.error
            assert_near(there.dataset[variable].values, expected.values, error, variable, least=1e-3)


def test_a_fit_with_a_ridge_is_solved_as_on_the_cpu(models, device):
    """With a ridge small eigenvalues appear, so that no number of steps is known to be enough."""
    measure = ThreeAxis(ridge=0.1)
    there, here = (measure(model, bundled_text(), **CUT | {"length": 120}) for model in models("hooked"))
    assert_same_numbers(*(one.dataset[["r", "a", "b"]] for one in (there, here)), device.error)


def test_shares_by_place_are_those_of_the_cpu(models, device):
    there, here = (
        Variance(absolute=True)(model, bundled_text(), **CUT | {"n_prompts": 8}) for model in models("hooked")
    )
    assert_same_numbers(*(one.dataset[["by_place", "absolute"]] for one in (there, here)), device.error)
