"""Heads in groups, a point a head: slash-dominant, the others, and those of the null."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from tl_posgen.views.style import COLOURS, NULL_COLOUR, model_label

TOKENS = {"all": "all tokens", "without_first": "first token left out"}
Group = tuple[str, str, xr.Dataset]
Measure = Callable[[xr.Dataset], xr.DataArray]


def head_groups(dataset: xr.Dataset, null: xr.Dataset | None, variant: str) -> list[Group]:
    """(name, colour, dataset over `place`), empty groups left out; what has other dims than heads keeps them."""
    heads = dataset.sel(variant=variant).stack(place=("layer", "head"))
    dominant = heads["dominant"].values.astype(bool)
    found = [
        ("slash-dominant heads", COLOURS[1], heads.isel(place=np.flatnonzero(dominant))),
        ("other heads", COLOURS[0], heads.isel(place=np.flatnonzero(~dominant))),
    ]
    if null is not None:
        found.append((model_label(null), NULL_COLOUR, null.sel(variant=variant).stack(place=("layer", "head"))))
    return [group for group in found if group[2].sizes["place"]]


def places(group: xr.Dataset) -> list[str]:
    """'layer 1 head 3' of every head of a group, for hovering."""
    return [f"layer {layer} head {head}" for layer, head in group["place"].values]


def box_panels(panels: Mapping[str, tuple[Sequence[Group], Mapping[str, Measure]]], y_title: str) -> go.Figure:
    """A panel a title; in it a category a measure, and for each group a box with a point a head."""
    figure = make_subplots(rows=1, cols=len(panels), subplot_titles=list(panels), shared_yaxes=True)
    drawn: set[str] = set()
    for column, (groups, measures) in enumerate(panels.values(), start=1):
        for name, colour, group in groups:
            values = {label: measure(group).values for label, measure in measures.items()}
            box = go.Box(
                x=[label for label, value in values.items() for _ in value],
                y=np.concatenate(list(values.values())),
                name=name,
                legendgroup=name,
                showlegend=name not in drawn,
                marker={"color": colour, "size": 4},
                line={"width": 1},
                boxpoints="all",
                jitter=0.5,
                pointpos=0,
                text=places(group) * len(values),
                hovertemplate="%{text}: %{y:.3f}<extra></extra>",
            )
            figure.add_trace(box, row=1, col=column)
            drawn.add(name)
    figure.update_yaxes(title_text=y_title, col=1)
    return figure.update_layout(boxmode="group")
