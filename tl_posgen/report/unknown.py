"""Stand-in for a measure whose declaration is not installed: head maps of its per-head numbers."""

import plotly.graph_objects as go
import xarray as xr

from tl_posgen.measure import Measure
from tl_posgen.report.figures import head_maps, model_label

MOST = 12  # maps in one figure


def unknown_measure(name: str) -> Measure:
    """Return a measure that draws head maps, for a saved result whose own measure is not installed."""
    return Measure(
        name=name,
        question=name.replace("_", " "),
        explanation="The package that declares this measure is not installed; its per-head numbers are shown.",
        source="unknown",
        variables={},
        summarise=lambda dataset: {},
        figures={"map": every_map},
        drawn=lambda dataset: ["map"] if scalars(dataset) else [],
    )


def every_map(result) -> go.Figure:
    """Draw a layer x head map for each variable with just these two dimensions."""
    title = f"{result.name.replace('_', ' ')} per head · {model_label(result.dataset)}"
    return head_maps(result.dataset, result.null, {name: name for name in scalars(result.dataset)[:MOST]}, title=title)


def scalars(dataset: xr.Dataset) -> list[str]:
    return [str(name) for name, array in dataset.data_vars.items() if set(array.dims) == {"layer", "head"}]
