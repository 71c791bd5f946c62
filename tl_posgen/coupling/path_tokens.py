"""Tokens of the first prompt coloured by a number of their path through the model, for circuitsvis."""

from typing import Any

import numpy as np
import xarray as xr

from tl_posgen.core.measure import TokenView
from tl_posgen.report.circuits import CROP, token_colours

SHOWN = {  # variable -> meaning of red
    "line_shape_score": "red: less straight than the median token",
    "growth_slope": "red: its norm grows faster than the median token's",
}


def labels(data: xr.Dataset) -> list[str]:
    """Return what each example shows."""
    if "token_text" not in data:
        return []
    return [f"{data[name].attrs.get('long_name', name)} by token, first prompt; {red}" for name, red in SHOWN.items()]


def show(data: xr.Dataset, example: int) -> Any:
    """Return the tokens of the first prompt, coloured by how far a number of their path is from the median's."""
    first = data[["path", "token_text"]].isel(prompt=0, position=slice(CROP))
    values = first["path"].sel(quantity=list(SHOWN)[example]).values
    values = np.where(np.isfinite(values), values, np.nan)
    return token_colours([str(token) for token in first["token_text"].values], values - np.nanmedian(values))


TOKENS = TokenView(labels, show)
