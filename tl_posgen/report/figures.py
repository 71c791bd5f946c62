"""Figure primitives: shared layout, head maps, small multiples, curves by layer; the model next to its null models."""

import html
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from jaxtyping import Float
from plotly.colors import sample_colorscale
from plotly.subplots import make_subplots

from tl_posgen.models.loading.null_kinds import NULL_KINDS

COLOURS = ("#3b6fb6", "#d1603d", "#3f9b6b", "#8b5fa8", "#c79a2b", "#4aa3b5", "#b0567d", "#6b7280")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "pentagon", "cross")  # of curves in grey print
PATTERNS = {"position": "", "content": "/", "interaction": "x"}  # of bars, in grey print
NULL_COLOUR = "#9ca3af"
SCALE = "Viridis"
MARKS = sample_colorscale(SCALE, [0.25, 0.4, 0.55, 0.7, 0.85])  # of lines and points: seen on white and on black
DIVERGING = "RdBu"
AT_START = {"textposition": "inside", "insidetextanchor": "start", "textangle": 0}  # of bars: no dotted line crosses it
_LONG = 30  # letters of a name that takes two lines of a legend
_LINE = 20  # pixels from one name to the next
NOTHING = "nothing to show: no number is defined here"
MOST_NAMES = 8  # of layers or heads in a legend, along a colour bar, as columns of panels
MOST_TICKS = 16  # numbers written along an axis
_COLOUR_BAR = 400  # pixels, the most: its ends are seen at once
_WIDE = 110  # letters of a subtitle that fit into the 700 pixels which plotly gives a saved picture
_SUBTITLE_LINE = 16  # pixels


def plain(text: Any) -> str:
    """Return a text that users gave as figures show it letter by letter: plotly reads <b> and &lt;, but not &quot;.

    Example:
        >>> plain("<b>x</b> & co")
        '&lt;b&gt;x&lt;/b&gt; &amp; co'
    """
    return html.escape(str(text), quote=False)


def model_name(dataset: xr.Dataset) -> str:
    """Return the model's name, or the name of its random init."""
    return str(dataset.attrs.get("model", "model"))


def model_label(dataset: xr.Dataset) -> str:
    """Return the name of the model, or of its random init, for figures."""
    return plain(model_name(dataset))


def drawn_models(result: Any) -> list[tuple[str, xr.Dataset, str]]:
    """Return (label, dataset, colour) of the model, and of its first random init and first shuffled weights, where
    there are any; a long label takes two lines, as legends are beside the panels."""
    colours = {"trained": COLOURS[0]} | {name: kind.colour for name, kind in NULL_KINDS.items()}

    def label(data: xr.Dataset) -> str:
        name = model_label(data)
        return name.replace(" (", "<br>(", 1) if len(name) > _LONG else name

    return [(label(data), data, colours[kind]) for kind, data in result.by_kind.items()]


def titled(figure: go.Figure, title: str, subtitle: str = "", height: int = 420) -> go.Figure:
    """Add title, subtitle and the layout that all figures share.

    A few names stay where they would grow with the model: in the legend of those that differ by a number, "layer 3",
    and along axes whose places are given.
    """
    alike = defaultdict[str, list[Any]](list)
    traces: Any = figure.data
    for trace in traces:
        if trace["showlegend"] and trace["name"]:
            alike[re.sub(r"\d+", "#", str(trace["name"]))].append(trace)
    for traces in alike.values():
        in_legend = {id(trace) for trace in evenly(traces)}
        for trace in traces:
            trace["showlegend"] = id(trace) in in_legend
    axes: Any = (*figure.select_xaxes(), *figure.select_yaxes())
    for axis in axes:
        if axis.tickvals is not None and len(axis.tickvals) > MOST_TICKS:
            texts = axis.tickvals if axis.ticktext is None else axis.ticktext
            axis.update(tickvals=evenly(axis.tickvals, MOST_TICKS), ticktext=evenly(texts, MOST_TICKS))
    lines = _wrapped(subtitle)
    more = _SUBTITLE_LINE * max(len(lines) - 1, 0)
    small = f"<br><span style='font-size:12px;color:#555'>{'<br>'.join(lines)}</span>" if subtitle else ""
    figure.update_layout(
        title={
            "text": f"<b>{title}</b>{small}",
            "x": 0.01,
            "y": 1,
            "yref": "container",
            "yanchor": "top",
            "pad": {"t": 14},
        },
        template="plotly_white",
        font={"family": "Inter, Segoe UI, Helvetica, Arial, sans-serif", "size": 12},
        height=height + more,
        margin={"t": 90 + more, "l": 60, "r": 30, "b": 50},
        colorway=COLOURS,
        uniformtext={"minsize": 9, "mode": "hide"},  # in bars: what would be smaller is left out
        modebar_remove=["sendChartToCloud"],  # plotly's "Share chart" uploads the numbers
        meta={"title": title, "subtitle": subtitle.replace("<br>", " ")},
    )
    return figure


def reworded(figure: go.Figure, words: Callable[[str], str]) -> go.Figure:
    """Change the words of a figure's titles, axes and hovers."""
    axes: Any = (*figure.select_xaxes(), *figure.select_yaxes())
    layout: Any = figure.layout
    titles = [layout.title, *(axis.title for axis in axes), *layout.annotations]
    for title in titles:
        if title.text:
            title.text = words(str(title.text))
    traces: Any = figure.data
    for trace in traces:
        if "hovertemplate" in trace and isinstance(trace["hovertemplate"], str):
            trace["hovertemplate"] = words(trace["hovertemplate"])
    layout.meta = {name: words(text) for name, text in (layout.meta or {}).items()}
    return figure


def _wrapped(text: str, most: int = _WIDE) -> list[str]:
    """Return the lines of a text, cut at <br> and where a line would show more letters than `most`.

    Example:
        >>> _wrapped("scores &lt; 1, and<br>more", most=12)
        ['scores &lt; 1,', 'and', 'more']
    """
    lines = []
    for part in text.split("<br>"):
        lines.append("")
        for word in part.split():
            longer = f"{lines[-1]} {word}".strip()
            if lines[-1] and len(html.unescape(longer)) > most:
                lines.append(word)
            else:
                lines[-1] = longer
    return lines


def evenly(values: Iterable[Any], most: int = MOST_NAMES) -> list[Any]:
    """Return at most so many of some values, evenly spread from the first one on.

    Example:
        >>> evenly(range(48)), evenly("abc")
        ([0, 6, 12, 18, 24, 30, 36, 42], ['a', 'b', 'c'])
    """
    every = list(values)
    return every[:: -(-len(every) // most) or 1]


def ticks_from_zero(top: int | float) -> dict[str, Any]:
    """Return the ticks of a logarithmic axis of x + 1, labelled with x: 0, 1, 3, 10, .. up to `top`.

    Example:
        >>> ticks_from_zero(127)
        {'tickvals': [1, 2, 4, 11, 31, 101], 'ticktext': ['0', '1', '3', '10', '30', '100']}
    """
    steps = (1,) if top > 1e4 else (1, 3)
    labels = [0, *(step * 10**power for power in range(15) for step in steps if step * 10**power <= top)]
    return {"tickvals": [label + 1 for label in labels], "ticktext": [f"{label:,}" for label in labels]}


class Panels:
    """Small multiples: traces are added to a panel by its number, and every name appears once in the legend. Where no
    trace has a number, or there is no panel, the figure says so.

    Example:
        >>> panels = Panels(["layer 0", "layer 1"], columns=2)
        >>> for number in range(2):
        ...     panels.add(number, go.Scatter(x=[0, 1], y=[0, number], name="r"))
        >>> [trace.showlegend for trace in panels.titled("r by layer").data]
        [True, False]
    """

    def __init__(self, titles: Sequence[str], *, columns: int = 4, row_height: int = 230, **subplots: Any):
        self.n_panels, self.n_columns = len(titles), max(1, min(columns, len(titles)))
        self.n_rows = max(1, -(-len(titles) // self.n_columns))
        self.row_height = row_height
        subplots = subplots if titles else {}  # their specs are of no panel
        between = min(85 / row_height, 0.5) / self.n_rows  # two lines of a title, and names of ticks
        settings: dict[str, Any] = {"horizontal_spacing": 0.05, "vertical_spacing": between}
        cells = [
            [{} if place < len(titles) else None for place in range(row, row + self.n_columns)]
            for row in range(0, self.n_rows * self.n_columns, self.n_columns)
        ]
        settings |= ({"specs": cells} if titles else {}) | subplots
        settings["horizontal_spacing"] = min(settings["horizontal_spacing"], 0.5 / self.n_columns)
        self.figure = make_subplots(rows=self.n_rows, cols=self.n_columns, subplot_titles=list(titles), **settings)
        self.figure.update_annotations(font_size=12)
        self._named: set[str] = set()

    def add(self, panel: int, *traces: Any) -> None:
        """Add traces to a panel; panels are counted row by row."""
        for trace in traces:
            if trace["name"] is not None and trace["type"] != "heatmap":
                in_legend = trace["name"] not in self._named and trace["showlegend"] is not False
                trace["legendgroup"], trace["showlegend"] = trace["name"], in_legend
                self._named |= {trace["name"]} if in_legend else set()
        at = self.place_of(panel)
        self.figure.add_traces(list(traces), rows=[at["row"]] * len(traces), cols=[at["col"]] * len(traces))

    def place_of(self, panel: int) -> dict[str, Any]:
        """Return the row and the column of a panel, counted from 1, as plotly takes them."""
        return {"row": panel // self.n_columns + 1, "col": panel % self.n_columns + 1}

    def axes(self, x: str = "", y: str = "", *, log_x: bool = False) -> "Panels":
        """Set axis titles: of x below the last panel of each column and those beside it that have numbers of their own,
        of y left of the first column.

        Args:
            log_x: x is a logarithmic axis of a whole number + 1, which is labelled with the number.
        """
        if log_x:
            traces: Any = self.figure.data
            ends = [np.asarray(trace["x"], float) for trace in traces if trace["x"] is not None]
            top = max((float(np.nanmax(x)) for x in ends if x.size), default=1.0)
            self.figure.update_xaxes(type="log", **ticks_from_zero(top - 1))
        last = max(0, self.n_panels - self.n_columns)
        for panel in range(last // self.n_columns * self.n_columns, self.n_panels):
            selector: dict[str, Any] = (
                {} if panel >= last else {"selector": lambda axis: axis.showticklabels is not False}
            )
            self.figure.update_xaxes(title_text=x, **self.place_of(panel), **selector)
        self.figure.update_yaxes(title_text=y, col=1)
        return self

    def say_below(self, panel: int, lines: Sequence[str]) -> None:
        """Write lines below a panel, under the title of its x axis."""
        axis: Any = self.figure.get_subplot(**self.place_of(panel))
        axis.xaxis.title.text = "<br>".join(filter(None, [axis.xaxis.title.text, *lines]))

    def titled(self, title: str, subtitle: str = "") -> go.Figure:
        """Return the figure with title, subtitle and shared layout."""

        def has_numbers(trace: Any) -> bool:  # of a curve, any y (or r), of horizontal bars, any x
            names = ("x",) if "orientation" in trace and trace["orientation"] == "h" else ("z", "r", "y", "x")
            values = next((trace[name] for name in names if name in trace and trace[name] is not None), ())
            try:
                return bool(np.isfinite(np.asarray(values, dtype=float)).any())
            except (TypeError, ValueError):  # names of bars
                return len(values) > 0

        if not any(map(has_numbers, self.figure.data)):
            place = {"x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper", "showarrow": False, "font": {"size": 14}}
            self.figure.add_annotation(text=NOTHING, **place)
        height = 140 + self.row_height * self.n_rows
        drawn: Any = self.figure
        if drawn.layout.coloraxis.to_plotly_json():  # the page may make the figure taller
            bar = {"lenmode": "pixels", "len": min(_COLOUR_BAR, height - 140), "y": 1, "yanchor": "top"}
            self.figure.update_layout(coloraxis_colorbar=bar)
        lines = max((str(axis.title.text).count("<br>") for axis in drawn.select_xaxes()), default=0)
        figure: Any = titled(drawn, title, subtitle, height=height + lines * _LINE)
        return figure.update_layout(margin_b=figure.layout.margin.b + lines * _LINE)


def line(
    x: Any, y: Any, name: str, colour: str = COLOURS[0], *, dash: str = "solid", width: int | float = 1.6, **more: Any
) -> go.Scatter:
    """Return one curve."""
    style = {"color": colour, "dash": dash, "width": width}
    return go.Scatter(x=x, y=y, name=name, line=style, **({"mode": "lines"} | more))


def error_bars(value: np.ndarray, low: np.ndarray, high: np.ndarray) -> dict[str, Any]:
    """Return bars from low to high, as plotly takes them."""
    return {"array": high - value, "arrayminus": value - low, "thickness": 1, "width": 0}


def named_points(
    figure: go.Figure, points: Float[np.ndarray, "axis point"], names: Sequence[str], *, top: float, height: int
) -> go.Figure:
    """Write the name of every point right of the panel, in the order of y, with a line to the point.

    Args:
        top: the highest y that the panel must show.
        height: of the panel, in pixels.
    """
    x, y = points
    low, high = (float(end) for end in (min(0.0, *y), max(top, *y)))
    low, high = low - 0.05 * (high - low), high + 0.08 * (high - low)
    edge, step = float(x.max() + 0.08 * ((np.ptp(x)) or 1.0)), (high - low) * _LINE / height
    places = np.sort(y).astype(float)
    for index in range(1, len(places)):  # up, until each line has its height
        places[index] = max(places[index], places[index - 1] + step)
    for index in range(len(places) - 1, -1, -1):  # down again, below the top
        places[index] = min(places[index], high - step * (len(places) - index))
    for point, place in zip(np.argsort(y), places, strict=True):
        tail = {"ax": edge, "ay": float(place), "axref": "x", "ayref": "y", "xanchor": "left"}
        arrow = {"arrowhead": 0, "arrowwidth": 0.7, "arrowcolor": NULL_COLOUR, "standoff": 5}
        figure.add_annotation(x=float(x[point]), y=float(y[point]), text=names[point], **tail, **arrow)
    return figure.update_yaxes(range=[low, high])


def at_usual_labels(result: Any, array: xr.DataArray, labels: Mapping[str, Any] | None = None) -> xr.DataArray:
    """Return an array at these labels, and at the measure's usual ones along other dims that have one."""
    usual = getattr(result.measure, "usual", dict)()
    chosen = {"tokens": "all", **usual, **(labels or {})}
    return array.sel({dim: label for dim, label in chosen.items() if dim in array.dims}, drop=True)


def heat(array: xr.DataArray, **more: Any) -> go.Heatmap:
    """Return a heat map of a two-dimensional array on the figure's colour scale; hovering names its dims."""
    down, across = array.dims
    is_of_heads = array.dims == ("layer", "head")
    hover = "L%{y}H%{x}" if is_of_heads else f"{down} %{{y}}, {across} %{{x}}"
    x, y = ([str(value) for value in array[dim].values] for dim in (across, down))
    more |= {"meta": "heads"} if is_of_heads else {}  # a click on the page opens that head
    hover = f"{hover}: %{{z:.3f}}<extra></extra>"
    return go.Heatmap(z=array.values, x=x, y=y, coloraxis="coloraxis", hovertemplate=hover, **more)


def colour_axis(low: float, high: float) -> dict[str, Any]:
    return {"colorscale": SCALE, "cmin": low, "cmax": high, "colorbar": {"thickness": 12}}


def token_map(array: xr.DataArray, **colours: Any) -> go.Heatmap:
    """Return a map [query, key] with numbered tokens, on its own colour scale."""
    n_queries, n_keys = array.transpose("query", "key").shape
    numbered = array.transpose("query", "key").drop_vars(("query", "key", "token"), errors="ignore")
    picture = heat(numbered.assign_coords(query=np.arange(n_queries), key=np.arange(n_keys)))
    return picture.update(coloraxis=None, showscale=False, **colours)
