"""Figures of sources: a map layer x source beside the random init, and one of every head."""

from typing import Any

import plotly.graph_objects as go
import xarray as xr

from tl_posgen.report.figures import DIVERGING, Panels, at_labels, colour_axis, head_rows, heat, model_label, sides

SUBTITLE = "shares sum to 1 along a row; negative where a source works against the others"
FEW = 300  # cells that have their number written


def draw_layers(result: Any) -> go.Figure:
    """Draw the mean share over heads of every source, a row a layer, beside the random init."""
    both = [(side, shares_of(result, data).mean("head")) for side, data, _ in sides(result)]
    return maps(result, both, "layer", 26)


def draw_heads(result: Any) -> go.Figure:
    """Draw the share of every source, a row a head."""
    both = [(side, head_rows(shares_of(result, data), "source")) for side, data, _ in sides(result)]
    return maps(result, both, "head", 14)


def shares_of(result: Any, data: xr.Dataset) -> xr.DataArray:
    """Return the shares [layer, head, source] at the usual side and term, only those of sources that are there."""
    return at_labels(result, data["share"]).transpose("layer", "head", "source").dropna("source", how="all")


def maps(result: Any, both: list[tuple[str, xr.DataArray]], rows: str, height: int) -> go.Figure:
    """Draw one map a model."""
    size = 110 + height * max(len(one[rows]) for _, one in both)
    panels = Panels([side for side, _ in both], columns=1, row_height=size, vertical_spacing=0.5 * 70 / size)
    for number, (_, one) in enumerate(both):
        panels.add(number, heat(one, texttemplate="%{z:.2f}" if one.size <= FEW else None))
    panels.figure.update_layout(coloraxis=colour_axis(-1.0, 1.0, DIVERGING))
    panels.figure.update_yaxes(type="category", autorange="reversed", title_text=rows)
    panels.figure.update_xaxes(type="category", tickangle=35)
    usual = result.measure.usual()
    words = {"k": "keys", "q": "queries"}[usual["side"]]
    return panels.finish(f"Sources of {usual['term']}, {words} · {model_label(result.own)}", SUBTITLE)
