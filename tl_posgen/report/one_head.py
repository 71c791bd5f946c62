"""One head of a report: its numbers beside those of null models, its curves, its maps between tokens."""

import html
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from tl_posgen.core.formatting import in_ranges
from tl_posgen.core.measure import HEAD, Measure
from tl_posgen.core.number import Number, mean_of_nulls
from tl_posgen.core.numbers import NUMBER_DIMS
from tl_posgen.core.report import Report
from tl_posgen.core.result import Result
from tl_posgen.errors import InputError
from tl_posgen.models.selection import head_name, named_heads
from tl_posgen.report.figures import COLOURS, SCALE, Panels, line, plain, token_map
from tl_posgen.report.heads import heads_of
from tl_posgen.report.page import InCell
from tl_posgen.report.tables import table_html

_MOST_NUMBERS = 16  # of one variable; more are a curve or a map
_BAND = {"fill": "toself", "fillcolor": "rgba(156,163,175,.35)", "mode": "lines", "line": {"width": 0}}


def one_head_of(results: Mapping[str, Result], head: Any, *more: Any) -> "HeadView":
    """Return one head of these results; see `Report.head`."""
    if more:
        arguments = ", ".join(map(repr, (head, *more)))
        raise InputError(f'head({arguments}): give a name, head("L3H1"), or a pair, head((3, 1))')
    pairs = named_heads(head)
    if len(pairs) != 1:
        raise InputError(f'head={head!r}: these are {len(pairs)} heads; give one, such as "L3H1"')
    view = HeadView(*pairs[0], results)
    if view.frame().empty:
        frame = Report(results, {}).frame()
        existing = [[*dict.fromkeys(frame[dim].tolist())] for dim in HEAD]
        there = f"layers {in_ranges(sorted(existing[0]))}, heads {in_ranges(sorted(existing[1]))}"
        remedy = f"there are {there}" if existing[0] else "this report has no numbers of single heads"
        raise InputError(f"no result has a number of {view.name}; {remedy}")
    return view


@dataclass(frozen=True)
class HeadView:
    """One head of a report, which shows itself as its numbers and its figure.

    Attributes:
        layer, head: which.
        results: of the report.
    """

    layer: int
    head: int
    results: Mapping[str, Result]

    @property
    def name(self) -> str:
        """Its name: "L3H1"."""
        return head_name(self.layer, self.head)

    def numbers(self) -> Iterator[tuple[str, str, Number]]:
        """Yield measure, quantity and `Number` of each that is one of this head, at each label of few."""
        for result in self.results.values():
            numbers, usual = result.numbers, {dim: at for dim, at in result.measure.usual().items() if dim != "tokens"}
            for name, variable in result.measure.variables.items():
                array = numbers.dataset[name] if name in numbers else None
                if array is None or not set(HEAD) <= set(array.dims) or array.dtype.kind not in "biuf":
                    continue
                if self.layer not in array["layer"] or self.head not in array["head"]:
                    continue
                labels = {dim: label for dim, label in usual.items() if dim in array.dims}
                array = array.sel({**labels, "layer": self.layer, "head": self.head})
                over = [str(dim) for dim in array.dims if dim not in NUMBER_DIMS]
                if not set(over) <= set(array.coords) or np.prod([array.sizes[dim] for dim in over]) > _MOST_NUMBERS:
                    continue
                for place in product(*(array[dim].values.tolist() for dim in over)):
                    at = dict(zip(over, place, strict=True))
                    if number := numbers.number(array.sel(at), numbers.bounds_of(name)):
                        words = [
                            _in_words(result.measure, dim, label)
                            for dim, label in at.items()
                            if (dim, label) != ("tokens", "all")
                        ]
                        yield result.name, ", ".join([variable.label, *words]), number

    def frame(self) -> pd.DataFrame:
        """Return a row a number: measure, quantity, value, its interval from low to high, and the mean over the null
        models of each kind."""
        return pd.DataFrame(
            {"measure": measure, "quantity": quantity, "value": number.value, "low": number.low, "high": number.high}
            | {kind: float(np.mean(values)) for kind, values in number.by_null.items()}
            for measure, quantity, number in self.numbers()
        )

    def plot(self) -> go.Figure:
        """Draw the curves of this head, behind them the span of the first random init's heads, and its maps between the
        first tokens, where measures have them."""
        heads_data = heads_of(self.results) or {"names": [], "curves": []}
        place = heads_data["names"].index(self.name) if self.name in heads_data["names"] else None
        curves, maps = heads_data["curves"] if place is not None else [], []
        for result in self.results.values():
            if (name := result.measure.patterns) in result.trained:
                kind, unit = result.trained[name].dims[:2]
                if self.name in result.trained[unit]:
                    array = result.trained[name].sel({unit: self.name})
                    maps += [(f"{label} attention", array.sel({kind: label})) for label in array[kind].values]
        panels = Panels([*(plain(curve["title"]) for curve in curves), *(title for title, _ in maps)], columns=2)
        for number, curve in enumerate(curves):
            x, span = curve["x"], curve["null"]
            if span is not None:
                ends = {
                    "x": [*x, *x[::-1]],
                    "y": [*span["high"], *span["low"][::-1]],
                    "name": "heads of the random init",
                }
                panels.add(number, go.Scatter(**ends, **_BAND, hoverinfo="skip"))
            panels.add(number, line(x, curve["rows"][place], self.name, COLOURS[0]))
            axis: dict[str, Any] = {} if curve["ticks"] is None else {"type": "log", **curve["ticks"]}
            panels.figure.update_xaxes(title_text=curve["along"], **axis, **panels.place_of(number))
        for number, (_, array) in enumerate(maps, len(curves)):
            square = array.rename(dict(zip(array.dims, ("query", "key"), strict=True)))
            panels.add(number, token_map(square, colorscale=SCALE, zmin=0, zmax=1))
            panels.figure.update_xaxes(title_text="key", type="linear", **panels.place_of(number))
            panels.figure.update_yaxes(type="linear", autorange="reversed", **panels.place_of(number))
        return panels.titled(self.name)

    def __repr__(self) -> str:
        """A table: a row a number, headed by its measure, as wide as the terminal."""
        rows = [*self.numbers()]
        kinds = dict.fromkeys(kind for *_, number in rows for kind in number.by_null)
        console = Console(markup=False, force_jupyter=False, color_system=None)  # in a notebook, too, it is a text
        table = Table(self.name, box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("value [interval]", *kinds):
            table.add_column(heading, justify="right", no_wrap=True)
        last = ""
        for measure, quantity, number in rows:
            if measure != last:
                table.add_section()
                table.add_row(measure, style="bold")
            of_nulls = (f"{mean_of_nulls(number.by_null.get(kind, ())).with_interval}" for kind in kinds)
            table.add_row(Padding(quantity, (0, 0, 0, 2)), f"{number.with_interval}", *of_nulls)
            last = measure
        with console.capture() as captured:
            console.print(table, highlight=False)
        return "\n".join(line.rstrip() for line in captured.get().strip("\n").splitlines())

    def _repr_html_(self) -> str:
        """In a notebook: the numbers and the figure."""
        return self._cell().html()

    def _ipython_display_(self) -> None:
        self._cell().display(repr(self))

    def _cell(self) -> InCell:
        rows = [(measure, quantity, str(number)) for measure, quantity, number in self.numbers()]
        table = table_html(pd.DataFrame(rows, columns=["measure", "quantity", "value [interval] (null models)"]))
        figure = self.plot()
        return InCell(f"<h4>{html.escape(self.name)}</h4>{table}", figure if figure.data else None)


def _in_words(measure: Measure, dim: str, label: Any) -> str:
    """Return a label; a number behind its dim."""
    if dim == "tokens":
        return f"{label} token"
    return measure.in_words(label) if isinstance(label, str) else f"{dim.replace('_', ' ')} {label}"
