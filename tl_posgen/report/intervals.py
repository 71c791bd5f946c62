"""A mean and its 95% bootstrap interval, `<name>`, `<name>_low` and `<name>_high`: measured, declared, said, drawn."""

from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float

from tl_posgen.collector import Variable
from tl_posgen.report.sentences import said
from tl_posgen.stats.bootstrap import bootstrap_interval
from tl_posgen.summary import Summary

ENDS = ("", "_low", "_high")
OVER_PROMPTS = "of the 95% bootstrap interval over prompts"


def mean_and_ends(
    name: str, values: Float[np.ndarray, "example *place"], dims: tuple[str, ...], seed: int = 0
) -> dict[str, Any]:
    """The mean over the first axis, NaN left out, and the ends of its interval, as variables of a dataset."""
    columns = (xr.DataArray(values).mean("dim_0").values, *bootstrap_interval(values, seed=seed))
    return {f"{name}{end}": (dims, column) for end, column in zip(ENDS, columns, strict=True)}


def with_ends(
    name: str, label: str, unit: str, description: str, dims: tuple[str, ...], ends: str = OVER_PROMPTS
) -> dict[str, Variable]:
    """The declarations of a number and the two ends of its interval, and of what these are the ends."""
    return {
        name: Variable(label, unit, description, dims),
        f"{name}_low": Variable(f"{label}, lower end", unit, ends, dims),
        f"{name}_high": Variable(f"{label}, upper end", unit, ends, dims),
    }


def with_interval(own: Summary, key: str, form: str = ".3f") -> str:
    """A number of the summary with its interval; without where one prompt leaves none.

    Example:
        >>> with_interval({"r": 0.058, "r_low": 0.041, "r_high": 0.073}, "r")
        '0.058 [0.041, 0.073]'
    """
    low, high = own.get(f"{key}_low"), own.get(f"{key}_high")
    return said(own[key], form) + ("" if low is None or low != low else f" [{said(low, form)}, {said(high, form)}]")


def error_bars(data: xr.Dataset, name: str) -> dict[str, Any]:
    """From the mean to the ends of its interval, as plotly takes them."""
    mean, low, high = (data[f"{name}{end}"].values for end in ENDS)
    return {"array": high - mean, "arrayminus": mean - low, "thickness": 1, "width": 0}
