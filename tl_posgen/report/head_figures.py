"""Figures of heads: maps [layer, head], curves of all heads, and points a head."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr
from jaxtyping import Float, Real

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
N_POINTS = 96  # distances drawn per curve, evenly spread on the logarithmic axis
MEDIAN = "median over heads, and nine tenths of them"


def thinned(dataset: xr.Dataset, dim: str = "distance", share: float = 0.5) -> xr.Dataset:
    """Return a selection of places along a dimension, up to a share of its length: all short ones, fewer long ones."""
    n = max(1, int(dataset.sizes[dim] * share))
    places = np.unique(np.geomspace(1, n, N_POINTS).round().astype(int)) - 1
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
    """Draw one panel per layer and one line per head, with the null models' heads behind them; of many heads their
    median, and the band of nine tenths of them.

    Args:
        log_x: x is along + 1, on a logarithmic axis, and long curves are thinned.
        share: of a logarithmic axis that is drawn; the longest distances are means over few pairs.
        at: labels of other dims, as in `head_map`.
        beside: further curves of a layer, from the (thinned) dataset of the model and the layer.
    """
    layers, columns = result.own["layer"].values, []
    panels = Panels([f"layer {layer}" for layer in layers], shared_xaxes=True)
    for side, whole, colour in reversed(sides(result)):
        chosen = at_labels(result, whole[measure], at).to_dataset(name=measure)
        data = (thinned(chosen, along, share) if log_x else chosen)[measure].transpose("layer", "head", along)
        x, curves = data[along].values + (1 if log_x else 0), data.values.astype(np.float32)
        columns.append((side, whole is not result.own, colour, data["head"].values, x, curves))
    many = result.own.sizes["head"] > MOST_CURVES
    for number, layer in enumerate(layers):
        for side, is_null, colour, heads, x, curves in columns:
            if many:
                panels.add(number, *_over_heads(x, curves[number], layer, side, colour, along, grey=is_null))
            elif is_null:
                panels.add(number, curve(*_joined(x, curves[number]), layer, side, colour, along, width=1, opacity=0.5))
            else:
                for head, y, shade in zip(heads, curves[number], colours_of(len(heads)), strict=True):
                    drawn = curve(x, y, layer, f"head {head}", shade, along)
                    panels.add(number, drawn | {"hovertemplate": _hover_of(head_name(layer, head), along)})
        panels.add(number, *beside(thinned(result.own, along, share) if log_x else result.own, layer))
    panels.axes(f"{along} + 1" if log_x else along, y_title, log_x=log_x)
    words = f"{subtitle}; {MEDIAN}" if many else subtitle
    figure = panels.finish(f"{title} · {model_label(result.own)}", words)
    if result.own[along].dtype.kind == "i" and result.own.sizes[along] <= FEW and not log_x:
        figure.update_xaxes(dtick=1)  # there is no prompt 0.5
    return figure


def curve(
    x: Real[np.ndarray, " point"],
    y: Float[np.ndarray, " point"],
    layer: Any,
    name: str,
    colour: str,
    along: str,
    *,
    width: int | float = 1.6,
    opacity: float = 1.0,
) -> dict[str, Any]:
    """Return a layer's curve as a plain mapping, which plotly handles faster than a trace: there may be a thousand."""
    return {
        "type": "scatter",
        "mode": "lines",
        "x": x,
        "y": y,
        "name": name,
        "line": {"color": colour, "width": width},
        "opacity": opacity,
        "showlegend": None,
        "hovertemplate": _hover_of(f"layer {layer}, {name}", along),
    }


def _over_heads(
    x: Real[np.ndarray, " x"],
    curves: Float[np.ndarray, "head x"],
    layer: Any,
    name: str,
    colour: str,
    along: str,
    *,
    grey: bool = False,
) -> list[Any]:
    """Return the median of a layer's curves, in front of the band of nine tenths of them."""
    low, middle, high = pd.DataFrame(curves).quantile([0.05, 0.5, 0.95]).to_numpy()
    known = np.isfinite(middle)
    area = band(x[known], low[known], high[known], name, grey=grey).update(showlegend=False)
    return [area, curve(x, middle, layer, name, colour, along)]


def _hover_of(name: str, along: str) -> str:
    """Return what hovering over a curve says."""
    return f"{name}<br>{along} %{{x}}: %{{y:.3f}}<extra></extra>"


def _joined(
    x: Real[np.ndarray, " x"], curves: Float[np.ndarray, "curve x"]
) -> tuple[Float[np.ndarray, " point"], Float[np.ndarray, " point"]]:
    """Join several curves [curve, x] over one x into a single line with gaps between them.

    Example:
        >>> x, y = _joined(np.array([1, 2]), np.array([[3.0, 4.0], [5.0, 6.0]]))
        >>> x.tolist(), y.tolist()
        ([1.0, 2.0, nan, 1.0, 2.0, nan], [3.0, 4.0, nan, 5.0, 6.0, nan])
    """
    gap = np.full((len(curves), 1), np.nan, dtype=np.float32)
    every = np.broadcast_to(x.astype(np.float32), (len(curves), len(x)))
    return np.append(every, gap, axis=1).ravel(), np.append(curves, gap, axis=1).ravel()


def by_head(array: xr.DataArray, most: int | float = MOST_ROWS) -> xr.DataArray:
    """Return an array [layer, head, ...] as [head, ...], the heads named "L3H6"; of more heads the means over those of
    each layer, as [layer, ...]."""
    if array.sizes["layer"] * array.sizes["head"] > most:
        return array.mean("head")
    rows = array.stack(unit=("layer", "head"))
    names = head_names(rows["unit"].values)
    return rows.drop_vars(("unit", "layer", "head")).rename(unit="head").assign_coords(head=names)


def head_rows(array: xr.DataArray, along: str, most: int | float = MOST_ROWS) -> xr.DataArray:
    """Return a per-head array [layer, head, along] with one row per head, or layer, as in `by_head`, for `heat`."""
    rows = by_head(array, most)
    return rows.transpose(..., along).reset_coords(drop=True)


def said_of_rows(rows: xr.DataArray) -> str:
    """Return what a subtitle adds where a row of `by_head` is a layer."""
    return "; mean over the heads of each layer" if "layer" in rows.dims else ""
