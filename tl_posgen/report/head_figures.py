"""Figures of heads: maps [layer, head], curves of all heads, and points a head."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.models.selection import head_name
from tl_posgen.report.figures import (
    Panels,
    at_labels,
    band,
    colour_axis,
    colours_of,
    heat,
    model_label,
    sides,
)

FEW = 12  # an axis of so few whole numbers labels them all
MOST_CURVES = 16  # of a layer's heads, drawn one by one
MOST_ROWS = 128  # of a map with a row a head
_N_POINTS = 96  # distances drawn per curve, evenly spread on the logarithmic axis
MEDIAN = "median over heads, and nine tenths of them"


def thinned(dataset: xr.Dataset, dim: str = "distance", share: float = 0.5) -> xr.Dataset:
    """Return a selection of places along a dimension, up to a share of its length: all short ones, fewer long ones."""
    n = max(1, int(dataset.sizes[dim] * share))
    places = np.unique(np.geomspace(1, n, _N_POINTS).round().astype(int)) - 1
    return dataset.isel({dim: places})


def head_names(index: Iterable[Any]) -> list[str]:
    """Return "L1H3" for each (layer, head), for hovering."""
    return [head_name(*place) for place in index]


def head_points(x: xr.DataArray, y: xr.DataArray, hover: str = "%{x:.3f}, %{y:.3f}", **more: Any) -> go.Scatter:
    """Return one array over stacked (layer, head) against another, a point a head."""
    template = f"%{{text}}<br>{hover}<extra></extra>"
    names = head_names(x[x.dims[0]].values)
    return go.Scatter(x=x.values, y=y.values, mode="markers", text=names, hovertemplate=template, **more)


def head_map(
    *names: str | tuple[str, Mapping[str, Any]],
    title: str,
    subtitle: str = "",
    limits: tuple[int | float, int | float] | None = (0.0, 1.0),
) -> Callable:
    """Return a figure for `Measure.figures`: layer x head maps of variables, under the labels that they declare.

    Args:
        names: variables, each at its usual labels or with others: ("r", {"tokens": "without first"}).
        subtitle: may name options: "at distance {d0:g}".
        limits: of the colour scale; those of the numbers if None.
    """

    def figure(result: Any) -> go.Figure:
        titles, arrays = [], []
        pairs = [(one, {}) if isinstance(one, str) else one for one in names]
        pairs = [(name, at) for name, at in pairs if name in result.own]
        for side, data, _ in sides(result):
            for name, at in (one for one in pairs if one[0] in data):  # some are of the model alone
                variable = result.measure.variables.get(name)
                words = [
                    f"{label} token" if dim == "tokens" else label if isinstance(label, str) else f"{dim} {label}"
                    for dim, label in at.items()
                ]
                titles.append(f"{', '.join([variable.label if variable else name, *words])} · {side}")
                arrays.append(at_labels(result, data[name], at))
        low, high = limits or (min(float(one.min()) for one in arrays), max(float(one.max()) for one in arrays))
        panels = map_panels(titles, arrays, colour_axis(low, high), columns=len(pairs), horizontal_spacing=0.06)
        panels.figure.update_annotations(font_size=11)
        words = subtitle.format(**{**result.own.attrs, **result.measure.options()})
        return panels.finish(f"{title} · {model_label(result.own)}", words)

    return figure


def map_panels(
    titles: Sequence[str], arrays: Sequence[xr.DataArray], colours: Mapping[str, Any], **panels: Any
) -> Panels:
    """Return a panel a map [layer, head], all on one colour axis, numbers written where there are few."""
    height = max(170, min(28 * max((array.sizes["layer"] for array in arrays), default=0), 700))
    drawn = Panels(titles, row_height=height, **panels)
    for panel, array in enumerate(arrays):
        shown = heat(array.transpose("layer", "head"), texttemplate="%{z:.2f}" if array.size <= 128 else None)
        drawn.add(panel, shown)
    drawn.axes("head", "layer").figure.update_xaxes(type="category", nticks=10).update_yaxes(type="category")
    drawn.figure.update_layout(coloraxis=dict(colours))
    return drawn


def layer_curves(
    result: Any,
    measure: str,
    along: str,
    *,
    title: str,
    subtitle: str,
    y_title: str,
    log_x: bool = False,
    share: float = 0.5,
    beside: Callable[[xr.Dataset, Any], list[go.Scatter]] = lambda data, layer: [],
    at: Mapping[str, Any] | None = None,
) -> go.Figure:
    """Draw one panel per layer and one line per head, behind them the median of the null models' heads and the band of
    nine tenths of them; of many heads these of the model too.

    Args:
        log_x: x is along + 1, on a logarithmic axis, and long curves are thinned.
        share: of a logarithmic axis that is drawn; the longest distances are means over few pairs.
        at: labels of other dims, as in `head_map`.
        beside: further curves of a layer, from the (thinned) dataset of the model and the layer.
    """
    layers, many = result.own["layer"].values, result.own.sizes["head"] > MOST_CURVES
    panels = Panels([f"layer {layer}" for layer in layers], shared_xaxes=True)
    for side, whole, colour in reversed(sides(result)):
        chosen = at_labels(result, whole[measure], at).to_dataset(name=measure)
        data = (thinned(chosen, along, share) if log_x else chosen)[measure].transpose("layer", "head", along)
        x, is_null = data[along].values + log_x, whole is not result.own
        for number, layer in enumerate(layers):
            curves = data.values[number].astype(np.float32)
            if is_null or many:
                low, middle, high = pd.DataFrame(curves).quantile([0.05, 0.5, 0.95]).to_numpy()
                known = np.isfinite(middle)
                area = band(x[known], low[known], high[known], side, grey=is_null).update(showlegend=False)
                panels.add(number, area, _curve(x, middle, f"layer {layer}, {side}", side, colour, along))
                continue
            heads = data["head"].values
            for head, y, shade in zip(heads, curves, colours_of(len(heads)), strict=True):
                panels.add(number, _curve(x, y, head_name(layer, head), f"head {head}", shade, along))
    for number, layer in enumerate(layers):
        panels.add(number, *beside(thinned(result.own, along, share) if log_x else result.own, layer))
    panels.axes(f"{along} + 1" if log_x else along, y_title, log_x=log_x)
    words = f"{subtitle}; {MEDIAN}" if many else subtitle
    figure = panels.finish(f"{title} · {model_label(result.own)}", words)
    if result.own[along].dtype.kind == "i" and result.own.sizes[along] <= FEW and not log_x:
        figure.update_xaxes(dtick=1)  # there is no prompt 0.5
    return figure


def _curve(x: np.ndarray, y: np.ndarray, hover: str, name: str, colour: str, along: str) -> dict[str, Any]:
    """Return a curve as a plain mapping, which plotly handles faster than a trace: there may be a thousand."""
    look = {"type": "scatter", "mode": "lines", "line": {"color": colour, "width": 1.6}, "showlegend": None}
    return look | {
        "x": x,
        "y": y,
        "name": name,
        "hovertemplate": f"{hover}<br>{along} %{{x}}: %{{y:.3f}}<extra></extra>",
    }


def by_head(array: xr.DataArray, most: int | float = MOST_ROWS) -> xr.DataArray:
    """Return an array [layer, head, ...] as [head, ...], the heads named "L3H6"; of more heads the means over those of
    each layer, as [layer, ...]."""
    if array.sizes["layer"] * array.sizes["head"] > most:
        return array.mean("head")
    rows = array.stack(unit=("layer", "head"))
    names = head_names(rows["unit"].values)
    return rows.drop_vars(("unit", "layer", "head")).rename(unit="head").assign_coords(head=names)


def said_of_rows(rows: xr.DataArray) -> str:
    """Return what a subtitle adds where a row of `by_head` is a layer."""
    return "; mean over the heads of each layer" if "layer" in rows.dims else ""
