"""Numbers of an accelerator against those of the CPU."""

from typing import Any

import numpy as np
from torch import Tensor


def assert_near(actual: Any, expected: Any, error: float, name: str = "", *, least: float = 0.0) -> None:
    """max |actual - expected| <= error max(|expected|, least); what is not finite must be the same."""
    actual, expected = (np.asarray(one.double() if isinstance(one, Tensor) else one) for one in (actual, expected))
    largest = np.abs(expected[np.isfinite(expected)]).max(initial=least)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=error * largest, err_msg=name)


def assert_same_numbers(there: Any, here: Any, error: float) -> None:
    """Compare every variable of floats in two datasets."""
    for variable, expected in here.data_vars.items():
        if expected.dtype.kind == "f":
            assert_near(there[variable].values, expected.values, error, str(variable), least=1e-3)
