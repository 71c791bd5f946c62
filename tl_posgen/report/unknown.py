"""A measure in place of one that is not installed: head maps of its numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
import xarray as xr

from tl_posgen.core.measure import HEAD, Measure
from tl_posgen.report.figures import model_label
from tl_posgen.report.head_figures import head_maps

MOST = 12  # maps beside each other


def unknown_measure(name: str) -> Measure:
    """Return a measure of this name that maps what a saved result holds, where its own is not installed here."""

    @dataclass(frozen=True)
    class Unknown(Measure):
        """A measure that is not installed.

        The package that declares this measure is not installed; its per-head numbers are shown.

        Source: unknown
        """

        question = name.replace("_", " ")
        figures = {"map": map_of_scalars}

        def kinds(self, data: xr.Dataset) -> Sequence[str]:
            return ["map"] if scalars(data) else []

    Unknown.__name__ = Unknown.__qualname__ = "".join(part.capitalize() for part in name.split("_"))
    return Unknown()


def map_of_scalars(result) -> go.Figure:
    """Draw a layer x head map for each variable with just these two dimensions."""
    title = f"{result.name.replace('_', ' ')} per head · {model_label(result.own)}"
    return head_maps([*result.sides.values()], {name: name for name in scalars(result.own)[:MOST]}, title=title)


def scalars(data: xr.Dataset) -> list[str]:
    """Return the names of numbers with one value a head."""
    return [str(name) for name, array in data.data_vars.items() if set(array.dims) == set(HEAD)]
