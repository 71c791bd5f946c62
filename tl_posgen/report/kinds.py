"""Kinds of figure that a measure declares by the names of its variables: bars, lines, points and heat maps.

Each is made once with its intervals over prompts and the null models beside; the fifth kind, `head_map`, and the curves
of all heads are in `head_figures`. A curve is (name, variable) or (name, variable, labels); a function of the `Numbers`
that gives an array stands in the place of a variable that is derived from stored ones.

    figures = {
        "loss": bars({"loss, nats per token": [("loss", "loss")]}, "condition", title="Loss"),
        "depth": lines({"correlation": [("r", "r"), ("within rows", "r_within_rows")]}, title="Fit by layer"),
        "against": points(("score", {"source": "natural"}), ("score", {"source": "random"}), title="On random tokens"),
        "map": heat_maps("coupling", "layer", "layer_2", per=["k"], title="Coupling"),
    }
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.core.measure import ENDS, HEAD
from tl_posgen.core.number import mean_of_nulls
from tl_posgen.core.numbers import range_of
from tl_posgen.models.loading.null_kinds import NULL_KINDS
from tl_posgen.report.figures import (
    AT_START,
    COLOURS,
    SYMBOLS,
    Panels,
    at_usual_labels,
    drawn_models,
    error_bars,
    line,
    model_label,
)
from tl_posgen.report.head_figures import Map, head_names, map_panels

Curve: TypeAlias = Sequence[Any]  # (name, variable or function of Numbers [, labels])
Figure: TypeAlias = Callable[[Any], go.Figure]  # of a Result: an entry of `Measure.figures`
Words: TypeAlias = str | Callable[[Any], str]  # a text, or a function of the result that gives it
_HOVER = "%{text}<br>%{x:.3f}, %{y:.3f}<extra></extra>"
_INTERVALS = "95 % intervals over prompts"


class _Drawn(NamedTuple):
    """A curve with its numbers along a dim: value, low and high of the model, and values of its null models by kind."""

    panel: int
    labels: list[Any]
    name: str
    colour: str
    symbol: str
    ends: np.ndarray
    nulls: Mapping[str, list[float]]


def _drawn(result: Any, panels: Mapping[str, Sequence[Curve]], along: str) -> Iterator[_Drawn]:
    numbers = result.numbers
    names = dict.fromkeys(name for curves in panels.values() for name, *_ in curves)
    colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
    symbols = {name: SYMBOLS[place % len(SYMBOLS)] for place, name in enumerate(names)}
    for panel, curves in enumerate(panels.values()):
        for name, variable, *labels in curves:
            array: Any = (
                variable(numbers) if callable(variable) else numbers.array(variable, **{along: None} | dict(*labels))
            )
            bounds = range_of(array) if callable(variable) else numbers.bounds_of(variable)
            at_places = numbers.along(array, along, bounds)
            nulls = {
                kind: [mean_of_nulls(number.by_null.get(kind, ())).value for number in at_places.values()]
                for kind in numbers.labels_by_null
            }
            defined = {kind: values for kind, values in nulls.items() if np.isfinite(values).any()}
            ends = [[getattr(number, end) for number in at_places.values()] for end in ENDS]
            yield _Drawn(panel, [*at_places], name, colours[name], symbols[name], np.array(ends), defined)


def _finished(panels: Panels, result: Any, title: str, subtitle: Words, *notes: str) -> go.Figure:
    """Return the figure under its title, with the model's name, and a subtitle that may name options."""
    names = {**result.trained.attrs, **result.measure.options()}
    text = subtitle(result) if callable(subtitle) else subtitle.format(**names)
    return panels.titled(f"{title} · {model_label(result.trained)}", "; ".join(filter(None, [text, *notes])))


def lines(
    panels: Mapping[str, Sequence[Curve]] | Callable[[Any], Mapping[str, Sequence[Curve]]],
    along: str = "layer",
    *,
    x: str = "",
    title: str,
    subtitle: Words = "",
    x_title: str = "",
    y_title: str = "",
    log_x: bool = False,
    columns: int = 3,
) -> Figure:
    """Return a figure of curves along a dim: means over the other dims with intervals, the null models' broken.

    Args:
        panels: title -> curves, or a function of the result that returns this.
        x: a variable of that dim, in the place of its labels; on a logarithmic axis, of which zero is a part.
        subtitle: may name options: "at distance {d0:g}".
        log_x: on a logarithmic axis.
    """

    def figure(result: Any) -> go.Figure:
        by_title = panels(result) if callable(panels) else panels
        drawn = Panels(list(by_title), columns=columns, row_height=280)
        for curve in _drawn(result, by_title, along):
            at = (result.trained[x].values + log_x).tolist() if x else curve.labels
            style: dict[str, Any] = {"mode": "lines+markers", "marker": {"size": 6, "symbol": curve.symbol}}
            style["error_y"] = error_bars(*curve.ends)
            drawn.add(curve.panel, line(at, curve.ends[0], curve.name, curve.colour, **style))
            for kind, values in curve.nulls.items():
                look: dict[str, Any] = {"dash": NULL_KINDS[kind].dash, "width": 1, "showlegend": False}
                drawn.add(curve.panel, line(at, values, f"{curve.name}, {kind}", curve.colour, **look))
        over = "mean over heads, " if along == "layer" else ""
        dash_words = {"dash": "dashed", "dot": "dotted", "dashdot": "dash-dotted"}
        dashes = {kind: NULL_KINDS[kind].dash for kind in result.numbers.by_null}
        broken = [f"{dash_words.get(dash, dash)}: {kind}" for kind, dash in dashes.items()]
        drawn.axes(x_title or x or along, y_title, log_x=log_x)
        return _finished(drawn, result, title, subtitle, f"{over}{_INTERVALS}", *broken)

    return figure


def bars(
    panels: Mapping[str, Sequence[Curve]] | Callable[[Any], Mapping[str, Sequence[Curve]]],
    along: str,
    *,
    title: str,
    subtitle: Words = "",
    form: str = ".3f",
    columns: int | None = None,
) -> Figure:
    """Return a figure of horizontal bars, one a label of a dim, with intervals, and the null models' in grey.

    A function that gives an array at some of the labels gives bars of these alone.

    Args:
        panels, subtitle: as in `lines`.
        form: how values are written on the bars.
        columns: of panels; all are beside each other if left out.
    """

    def figure(result: Any) -> go.Figure:
        by_title = panels(result) if callable(panels) else panels
        curves = list(_drawn(result, by_title, along))
        words = {label: result.measure.in_words(label) for curve in curves for label in curve.labels}
        in_panels = [sum(1 + len(curve.nulls) for curve in curves if curve.panel == n) for n in range(len(by_title))]
        n_bars = max(in_panels, default=0)
        height = 60 + max(1, len(words)) * max(24, 20 * n_bars)
        across = columns or max(1, len(by_title))
        look: dict[str, Any] = {"columns": across, "shared_yaxes": True, "horizontal_spacing": 0.04}
        drawn = Panels(list(by_title), row_height=height, **look)
        for curve in curves:
            names, (value, low, high) = [words[label] for label in curve.labels], curve.ends
            written = ["" if np.isnan(number) else format(number, form) for number in value]
            bar = go.Bar(x=value, y=names, name=curve.name, text=written, orientation="h", marker_color=curve.colour)
            drawn.add(curve.panel, bar.update(error_x=error_bars(value, low, high), **AT_START))
            for kind, values in curve.nulls.items():
                grey: dict[str, Any] = {"orientation": "h", "marker_color": NULL_KINDS[kind].colour}
                drawn.add(curve.panel, go.Bar(x=values, y=names, name=f"{curve.name}, {kind}", **grey))
        drawn.figure.update_yaxes(autorange="reversed", automargin=True).update_layout(barmode="group", bargap=0.12)
        has_ends = any(np.isfinite(curve.ends[1:]).any() for curve in curves)
        return _finished(drawn, result, title, subtitle, _INTERVALS if has_ends else "")

    return figure


def points(
    x: tuple[str, Mapping[str, Any]],
    y: tuple[str, Mapping[str, Any]],
    panels: Mapping[str, Mapping[str, Any]] | Callable[[Any], Mapping[str, Mapping[str, Any]]] | None = None,
    *,
    title: str,
    subtitle: Words = "",
    x_title: str = "",
    y_title: str = "",
    equal: bool = False,
    columns: int = 4,
) -> Figure:
    """Return a figure of one per-head variable against another, a point a head; the null models' heads have other
    symbols.

    Args:
        x, y: variable and labels of its dims; the usual ones where none is given.
        panels: title -> labels of both, or a function of the result that returns this; one panel if left out.
        subtitle: as in `lines`.
        equal: draw the diagonal.
    """

    def figure(result: Any) -> go.Figure:
        by_title = panels(result) if callable(panels) else panels or {"": {}}
        drawn = Panels(list(by_title), columns=columns, horizontal_spacing=0.04)
        for panel, labels in enumerate(by_title.values()):
            tops = []
            for kind, (side, data, colour) in zip(result.by_kind, drawn_models(result), strict=True):
                ends = (at_usual_labels(result, data[name], {**labels, **at}) for name, at in (x, y))
                coordinates = xr.concat(list(ends), "axis").stack(place=HEAD).dropna("place")
                symbol = NULL_KINDS[kind].symbol if kind in NULL_KINDS else "circle"
                look = {"color": colour, "size": 7, "symbol": symbol}
                texts = {"text": head_names(coordinates["place"].values), "hovertemplate": _HOVER, "name": side}
                texts |= {"meta": "heads"} if data is result.trained else {}
                drawn.add(panel, go.Scatter(x=coordinates[0], y=coordinates[1], mode="markers", marker=look, **texts))
                tops.append(float(coordinates.max()) if coordinates.size else np.nan)
            if equal:
                ends = [0, tops[0]]
                drawn.add(panel, line(ends, ends, "equal", "black", dash="dot", width=1, hoverinfo="skip"))
        drawn.figure.update_annotations(font_size=11)
        drawn.axes(x_title, y_title)
        return _finished(drawn, result, title, subtitle, "a point a head", "dotted: equal" if equal else "")

    return figure


def heat_maps(
    name: str,
    down: str,
    across: str,
    *,
    title: str,
    per: Sequence[str] = (),
    subtitle: Words = "",
    x_title: str = "",
    y_title: str = "",
    limits: tuple[float, float] | None = None,
    diagonal: bool = True,
    row_height: int = 300,
) -> Figure:
    """Return a figure of maps of a variable over two dims, means over all others: a row for each label of the dims
    `per`, a column for the model and each kind of null models, all on one colour scale; see `map_panels`.

    Args:
        subtitle: as in `lines`.
        limits: of the colour scale; those of the numbers if left out.
        diagonal: False leaves it empty, where it is 1 by definition.
    """

    def figure(result: Any) -> go.Figure:
        models, maps = drawn_models(result), []
        rows = product(*(result.trained[dim].values.tolist() for dim in per))
        for row, (side, data, _) in product(rows, models):
            labels = dict(zip(per, row, strict=True))
            array = at_usual_labels(result, data[name], labels)
            array = array.mean([dim for dim in array.dims if dim not in (down, across)]).transpose(down, across)
            array = array if diagonal else array.where(~np.eye(*array.shape, dtype=bool))
            where = "".join(f", {dim} = {result.measure.in_words(label)}" for dim, label in labels.items())
            maps.append(Map(row, side, f"{side}{where}", array))
        axis_titles = {"x": x_title or across, "y": y_title or down}
        drawn = map_panels(maps, limits, columns=len(models), row_height=row_height, **axis_titles)
        drawn.figure.update_yaxes(autorange="reversed")
        return _finished(drawn, result, title, subtitle)

    return figure
