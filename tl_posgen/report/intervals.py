"""Means with 95% intervals, as variables `<name>`, `<name>_low` and `<name>_high`: computed, declared, drawn."""

from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float

from tl_posgen.collector import Variable
from tl_posgen.stats.intervals import Bounds, mean_interval

ENDS = ("", "_low", "_high")
OVER_PROMPTS = "of the 95% interval over prompts, Student's"
FISHER = "of Fisher's 95% interval of independent heads"


def mean_and_ends(
    name: str, values: Float[np.ndarray, "example *place"], dims: tuple[str, ...], bounds: Bounds | None = None
) -> dict[str, Any]:
    """Return the mean over the first axis without NaN, and the ends of its interval, as variables of a dataset."""
    columns = (xr.DataArray(values).mean("dim_0").values, *mean_interval(values, bounds))
    return {f"{name}{end}": (dims, column) for end, column in zip(ENDS, columns, strict=True)}


def with_ends(
    name: str, label: str, unit: str, description: str, dims: tuple[str, ...], ends: str = OVER_PROMPTS
) -> dict[str, Variable]:
    """Return the declarations of a number and of the two ends of its interval.

    Args:
        ends: the description of the ends: the kind of interval.
    """
    return {
        name: Variable(label, unit, description, dims),
        f"{name}_low": Variable(f"{label}, lower end", unit, ends, dims),
        f"{name}_high": Variable(f"{label}, upper end", unit, ends, dims),
    }


def error_bars(data: xr.Dataset, name: str) -> dict[str, Any]:
    """Return plotly's error bars from the mean to the ends of its interval."""
    mean, low, high = (data[f"{name}{end}"].values for end in ENDS)
    return {"array": high - mean, "arrayminus": mean - low, "thickness": 1, "width": 0}
