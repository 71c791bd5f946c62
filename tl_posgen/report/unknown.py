"""Stand-in for a measure whose declaration is not installed: head maps of its per-head numbers."""

from dataclasses import dataclass

import plotly.graph_objects as go
import xarray as xr

from tl_posgen.core.measure import Measure as NewMeasure
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
    """A layer x head map for each variable with just these two dimensions."""
    title = f"{result.name.replace('_', ' ')} per head · {model_label(result.own)}"
    return head_maps(result.own, result.null, {name: name for name in scalars(result.own)[:MOST]}, title=title)


def scalars(dataset: xr.Dataset) -> list[str]:
    return [str(name) for name, array in dataset.data_vars.items() if set(array.dims) == {"layer", "head"}]


def unknown(name: str) -> NewMeasure:
    """Return a measure of this name that maps what a saved result holds."""
    title = "".join(part.capitalize() for part in name.split("_"))
    explanation = "The package that declares this measure is not installed; its per-head numbers are shown."
    body = {"__doc__": f"{name}.\n\n{explanation}\n\nSource: unknown", "question": name.replace("_", " ")}
    body |= {
        "figures": {"map": map_of_scalars},
        "name": name,
        "kinds": lambda self, data: ["map"] * bool(scalars(data)),
    }
    return dataclass(frozen=True)(type(title, (NewMeasure,), body))()


def map_of_scalars(result) -> go.Figure:
    """Draw a layer x head map for each variable with just these two dimensions."""
    title = f"{result.name.replace('_', ' ')} per head · {model_label(result.own)}"
    return head_maps(result.own, result.null, {name: name for name in scalars(result.own)[:MOST]}, title=title)
