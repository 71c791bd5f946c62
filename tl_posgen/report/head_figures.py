"""Figures of heads: maps [layer, head], curves of all heads, and points a head."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr
from plotly.colors import sample_colorscale

from tl_posgen.models.selection import head_name
from tl_posgen.report.figures import (
    COLOURS,
    SCALE,
    Panels,
    at_usual_labels,
    colour_axis,
    drawn_models,
    heat,
    model_label,
)

_FEW = 12  # an axis of so few whole numbers labels them all
MOST_CURVES = 16  # of a layer's heads, drawn one by one
MOST_ROWS = 128  # of a map with a row a head
HEAD = ("layer", "head")
_CELLS, _CELLS_ACROSS = 128, 36  # up to which cells carry their number: of a map, and beside each other
_FLAT = 0.1  # of the range of the model's map: below, a null model's is not drawn
_N_POINTS = 96  # distances drawn per curve, evenly spread on the logarithmic axis
_MEDIAN = "median over heads, and nine tenths of them"


def head_names(index: Iterable[Any]) -> list[str]:
    """Return "L1H3" for each (layer, head), for hovering."""
    return [head_name(*place) for place in index]


def head_map(
    *names: str | tuple[str, Mapping[str, Any]],
    title: str,
    subtitle: str = "",
    limits: tuple[int | float, int | float] | Literal["bounds"] | None = "bounds",
) -> Callable:
    """Return a figure for `Measure.figures`: layer x head maps of variables, under the labels that they declare.

    Args:
        names: variables, each at its usual labels or with others: ("r", {"tokens": "without first"}).
        subtitle: may name options: "at distance {d0:g}".
        limits: of the colour scale; those of the numbers if None. If left out, the `bounds` of the variables together,
            and those of the numbers where one has none.
    """

    def figure(result: Any) -> go.Figure:
        pairs = [(entry, {}) if isinstance(entry, str) else entry for entry in names]
        pairs = [(name, at) for name, at in pairs if name in result.trained]
        maps = []
        for side, data, _ in drawn_models(result):
            for number, (name, at) in enumerate(pairs):
                if name in data:  # some are of the model alone
                    variable = result.measure.variables.get(name)
                    words = [
                        f"{label} token" if dim == "tokens" else label if isinstance(label, str) else f"{dim} {label}"
                        for dim, label in at.items()
                    ]
                    heading = ", ".join([variable.label if variable else name, *words])
                    array = at_usual_labels(result, data[name], at).transpose(*HEAD)
                    heading += "" if data is result.trained else f"<br>{side}"  # the figure's title names the model
                    maps.append(Map(number, side, heading, array))
        scale = _bounds_of(result, [name for name, _ in pairs]) if limits == "bounds" else limits
        panels = map_panels(maps, scale, columns=len(pairs), horizontal_spacing=0.06)
        panels.figure.update_annotations(font_size=11)
        words = subtitle.format(**{**result.trained.attrs, **result.measure.options()})
        return panels.titled(f"{title} · {model_label(result.trained)}", words)

    return figure


def _bounds_of(result: Any, names: Sequence[str]) -> tuple[float, float] | None:
    """Return the range of the declared bounds of these variables; None where one has none, or an infinite one."""
    bounds = [result.numbers.bounds_of(name) for name in names]
    if not bounds or not all(pair and np.isfinite(pair).all() for pair in bounds):
        return None
    lows, highs = zip(*bounds, strict=True)
    return float(min(lows)), float(max(highs))


class Map(NamedTuple):
    """A map [down, across] of one side: the model, or a null model.

    Attributes:
        what: it is of, the same for all sides; the model's comes first.
    """

    what: Any
    side: str
    title: str
    array: xr.DataArray


def map_panels(
    maps: Iterable[Map],
    limits: tuple[int | float, int | float] | None = None,
    *,
    x: str = "head",
    y: str = "layer",
    row_height: int = 0,
    **panels: Any,
) -> Panels:
    """Return a panel a map, all on one colour axis, numbers written where there are few; a null model's map that spans
    less than a tenth of the model's is a line below the model's in its place.

    Args:
        limits: of the colour scale; those of the numbers if None.
        row_height: in pixels; by the number of rows if 0.
    """

    def ends(array: xr.DataArray) -> tuple[float, float]:
        return (float(array.min()), float(array.max())) if array.size else (np.nan, np.nan)

    drawn: dict[Any, tuple[Map, list[str]]] = {}
    for side_map in maps:
        (low, high), (model, below) = ends(side_map.array), drawn.get(side_map.what, (side_map, []))
        if side_map.side != model.side and high - low < _FLAT * -np.subtract(*ends(model.array)):
            below.append(f"{side_map.side}: between {low:.3g} and {high:.3g}")
        else:
            drawn[(side_map.what, side_map.side) if side_map.what in drawn else side_map.what] = side_map, []
    arrays = [side_map.array for side_map, _ in drawn.values()]
    height = row_height or max(170, min(28 * max((len(array) for array in arrays), default=0), 700))
    grid = Panels([side_map.title for side_map, _ in drawn.values()], row_height=height, **panels)
    across = grid.n_columns * max((array.shape[1] for array in arrays), default=0)
    for number, array in enumerate(arrays):
        is_written = across <= _CELLS_ACROSS and array.size <= _CELLS
        grid.add(number, heat(array, texttemplate="%{z:.2f}" if is_written else None))
    grid.axes(x, y).figure.update_xaxes(type="category", nticks=10).update_yaxes(type="category")
    for number, (_, below) in enumerate(drawn.values()):
        if below:
            grid.say_below(number, below)
    extremes = [end for array in arrays for end in ends(array) if end == end] or [0, 1]
    grid.figure.update_layout(coloraxis=colour_axis(*(limits or (min(extremes), max(extremes)))))
    return grid


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
    more_curves: Callable[[xr.Dataset, Any], list[go.Scatter]] = lambda data, layer: [],
    at: Mapping[str, Any] | None = None,
) -> go.Figure:
    """Draw one panel per layer and one line per head, behind them the median of the null models' heads and the band of
    nine tenths of them; of many heads these of the model too.

    Args:
        log_x: on a logarithmic axis, of which zero is a part, and long curves are thinned.
        share: of a logarithmic axis that is drawn; the longest distances are means over few pairs.
        at: labels of other dims, as in `head_map`.
        more_curves: further curves of a layer, from the (thinned) dataset of the model and the layer.
    """

    def thinned(data: xr.Dataset) -> xr.Dataset:  # all short places along the dim, fewer long ones
        n = max(1, int(data.sizes[along] * share))
        return data.isel({along: np.unique(np.geomspace(1, n, _N_POINTS).round().astype(int)) - 1}) if log_x else data

    def curve(x: np.ndarray, y: np.ndarray, hover: str, name: str, colour: str) -> dict[str, Any]:
        look = {"type": "scatter", "mode": "lines", "line": {"color": colour, "width": 1.6}, "showlegend": None}
        texts = {"name": name, "hovertemplate": f"{hover}<br>{along} %{{customdata}}: %{{y:.3f}}<extra></extra>"}
        # a mapping, which is faster than a trace: there may be a thousand
        return look | texts | {"x": x, "y": y, "customdata": x - log_x}

    layers, many = result.trained["layer"].values, result.trained.sizes["head"] > MOST_CURVES
    panels = Panels([f"layer {layer}" for layer in layers], shared_xaxes=True)
    for side, dataset, colour in reversed(drawn_models(result)):
        chosen = at_usual_labels(result, dataset[measure], at).to_dataset(name=measure)
        data = thinned(chosen)[measure].transpose("layer", "head", along)
        x, is_null = data[along].values + log_x, dataset is not result.trained
        for number, layer in enumerate(layers):
            curves = data.values[number].astype(np.float32)
            if is_null or many:
                low, middle, high = pd.DataFrame(curves).quantile([0.05, 0.5, 0.95]).to_numpy()
                there = np.isfinite(middle)
                around, ends = x[there], np.concatenate([high[there], low[there][::-1]])
                fill = {"fill": "toself", "fillcolor": "rgba(156,163,175,.35)" if is_null else "rgba(59,111,182,.2)"}
                look: dict[str, Any] = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
                panels.add(number, go.Scatter(x=[*around, *around[::-1]], y=ends, name=side, **fill, **look))
                panels.add(number, curve(x, middle, f"layer {layer}, {side}", side, colour))
                continue
            heads = data["head"].values
            shades: Any = sample_colorscale(SCALE, [*np.linspace(0, 0.9, len(heads))])
            for head, y, shade in zip(heads, curves, COLOURS if len(heads) <= len(COLOURS) else shades, strict=False):
                panels.add(number, curve(x, y, head_name(layer, head), f"head {head}", shade))
    for number, layer in enumerate(layers):
        panels.add(number, *more_curves(thinned(result.trained), layer))
    panels.axes(along, y_title, log_x=log_x)
    full_subtitle = f"{subtitle}; {_MEDIAN}" if many else subtitle
    figure = panels.titled(f"{title} · {model_label(result.trained)}", full_subtitle)
    if result.trained[along].dtype.kind == "i" and result.trained.sizes[along] <= _FEW and not log_x:
        figure.update_xaxes(dtick=1)  # there is no prompt 0.5
    return figure


def by_head(array: xr.DataArray) -> xr.DataArray:
    """Return an array [layer, head, ...] as [head, ...], the heads named "L3H6"; of more heads the means over those of
    each layer, as [layer, ...]."""
    if array.sizes["layer"] * array.sizes["head"] > MOST_ROWS:
        return array.mean("head")
    rows = array.stack(unit=("layer", "head"))
    names = head_names(rows["unit"].values)
    return rows.drop_vars(("unit", "layer", "head")).rename(unit="head").assign_coords(head=names)


def said_of_rows(rows: xr.DataArray) -> str:
    """Return what a subtitle adds where a row of `by_head` is a layer."""
    return "; mean over the heads of each layer" if "layer" in rows.dims else ""
