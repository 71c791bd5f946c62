"""The figure of attention examples: true attention, fitted attention and their difference, a row a head."""

from itertools import product
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.models.selection import head_name
from tl_posgen.report.figures import DIVERGING, SCALE, Panels, model_label, token_map

SCORES = ("true", "three-axis fit")
MAPS = (*SCORES, "true - fit")


def maps_of(data: xr.Dataset, example: int) -> np.ndarray:
    """Return the true attention, the fitted one and their difference [map, query, key] of an example."""
    true, fitted = data["pattern"].isel(example=example).transpose("scores", "query", "key").values
    return np.stack([true, fitted, true - fitted])


def draw_patterns(result: Any) -> go.Figure:
    """Draw the three maps of every example head as heat maps, a row a head."""
    heads = [
        head_name(*place) for place in zip(result.trained["layer"].values, result.trained["head"].values, strict=True)
    ]
    panels = Panels([f"{head} · {name}" for head in heads for name in MAPS], columns=len(MAPS), row_height=280)
    attention, difference = {"colorscale": SCALE, "zmin": 0, "zmax": 1}, {"colorscale": DIVERGING, "zmid": 0}
    for number, (example, kind) in enumerate(product(range(len(heads)), range(len(MAPS)))):
        example_map = xr.DataArray(maps_of(result.trained, example)[kind], dims=("query", "key"))
        panels.add(number, token_map(example_map, **(difference if kind == 2 else attention)))
    panels.axes("key", "query").figure.update_yaxes(type="linear", autorange="reversed").update_xaxes(type="linear")
    subtitle = "attention of the scores, of the three-axis fit, their difference; first prompt; no random init"
    return panels.titled(f"True and fitted attention · {model_label(result.trained)}", subtitle)
