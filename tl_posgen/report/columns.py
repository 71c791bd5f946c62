"""Tables in the terminal: as many beside the same labels as the width needs, and no number cut."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import pandas as pd
from pandas.api.types import is_float_dtype
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from tl_posgen.report.sentences import unsigned_zero


def print_frame(
    console: Console, frame: pd.DataFrame, title: str, legend: str = "", most: int | None = None
) -> dict[str, int]:
    """A frame in as many tables as its columns need, the columns that name its rows in front of each.

    Args:
        most: its first rows, and of its columns those that fit beside each other; all if left out.

    Returns:
        How many rows and columns are left out.
    """
    n_rows = len(frame)
    frame = frame.head(n_rows if most is None else most)
    columns = {str(name).replace("_", " "): [cell(value) for value in frame[name]] for name in frame.columns}
    labels = list(takewhile(lambda name: not is_float_dtype(frame[name]), frame.columns))
    n_labels = len(labels) if 0 < len(labels) < len(columns) else 1
    left_out = print_columns(console, columns, title, n_labels, (), legend, whole=most is None)
    return {"row": n_rows - len(frame), "column": left_out}


def cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return unsigned_zero(value, ".3f") if value == value else "-"


def print_columns(
    console: Console,
    columns: Mapping[str, Sequence[str]],
    title: str,
    n_labels: int,
    foot: Sequence[str] = (),
    legend: str = "",
    gap: int = 2,
    *,
    whole: bool = True,
) -> int:
    """Columns of cells in as many tables as the width needs: one that does not fit whole moves to a further table.

    Headings and text break at spaces where they must; a number is never cut. Where not even the labels and one column
    fit, the table is wider than the terminal.

    Args:
        n_labels: how many of the first columns name the rows: they stand in front of every table.
        foot: styles of the last rows, which a line sets apart.
        legend: below the last table.
        gap: spaces between columns.
        whole: not the first table alone.

    Returns:
        How many columns are not shown.
    """
    names = list(columns)
    labels, rest = names[:n_labels], names[n_labels:]
    uncut = {name: widest([name, *columns[name]]) for name in names}
    by_cell = {name: widest([*name.split(), *columns[name]]) for name in names}
    by_word = by_cell | {
        name: widest([word for one in (name, *columns[name]) for word in one.split()]) for name in labels
    }
    unbroken = all(taken(by_cell, [*labels, name], gap) <= console.width for name in rest)
    needs = by_cell if unbroken else by_word
    groups = fitting(labels, rest, needs, console.width, gap)
    for group in groups if whole else groups[:1]:
        widths = uncut if taken(uncut, group, gap) <= console.width else needs
        table = empty_table(title, gap)
        for name in group:
            table.add_column(name, justify="right", width=widths[name])
        rows = list(zip(*(columns[name] for name in group), strict=True))
        body = len(rows) - len(foot)
        for number, row in enumerate(rows):
            style = foot[number - body] if number >= body else None
            table.add_row(*row, style=style, end_section=number == body - 1 and bool(foot))
        if taken(widths, group, gap) > console.width:
            table.width = taken(widths, group, gap)
        console.print(table, crop=False)
    if legend:
        console.print(legend, style="dim", highlight=False)
    return 0 if whole else sum(len(group) - n_labels for group in groups[1:])


def widest(texts: Sequence[str]) -> int:
    return max(map(cell_len, texts), default=1)


def taken(widths: Mapping[str, int], names: Sequence[str], gap: int = 2) -> int:
    """Characters across of a table of these columns."""
    return sum(widths[name] + gap for name in names) + 2 - gap


def fitting(
    labels: Sequence[str], rest: Sequence[str], widths: Mapping[str, int], width: int, gap: int
) -> list[list[str]]:
    """The columns in groups that fit a width, one at least beside the labels."""
    groups = [[*labels]]
    for name in rest:
        if len(groups[-1]) > len(labels) and taken(widths, [*groups[-1], name], gap) > width:
            groups.append([*labels])
        groups[-1].append(name)
    return groups


def empty_table(title: str, gap: int = 2) -> Table:
    """Columns stand `gap` spaces apart, and one from either edge."""
    return Table(title=title, box=box.SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), pad_edge=False)


def short(value: float) -> str:
    """Three decimals, and no zero before the point: .917, -.500, but 10.250."""
    text = unsigned_zero(value, ".3f")
    sign, digits = ("-" if text.startswith("-") else ""), text.lstrip("-")
    return sign + (digits[1:] if digits.startswith("0.") else digits)
