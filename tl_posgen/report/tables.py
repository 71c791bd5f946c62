"""Tables of results, as page, notebook and terminal show them; printed, split where too wide, no number cut."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import pandas as pd
from pandas.api.types import is_float_dtype
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from tl_posgen.core.formatting import format_number
from tl_posgen.core.measure import HEAD, in_words
from tl_posgen.core.numbers import TRAINED
from tl_posgen.core.result import Result

MOST_HEADS = 64  # rows of a terminal's table; a larger model gets a row per layer
_MOST_COLUMNS = 9  # of numbers there
NO_NUMBER = "-"  # in a cell; sentences say "not defined"


def compact(result: Result, of: str = TRAINED) -> pd.DataFrame:
    """Return a table for a terminal: the result's own short table, or its headlines under their labels.

    Large models get means over the heads of a layer.
    """
    table = short_table(result, of)
    if table is not None:
        return table
    frame = labelled(result, result.frame(init=result.numbers.by_null[of].labels[0] if of != TRAINED else TRAINED))
    if tuple(frame.columns[:2]) == HEAD and len(frame) > MOST_HEADS:
        frame = pd.DataFrame(frame.groupby("layer", as_index=False).mean()).assign(head="all")
    return frame.iloc[:, : _MOST_COLUMNS + len(result.measure.rows)]


def short_table(result: Result, of: str = TRAINED) -> pd.DataFrame | None:
    """Return the result's own short table with conditions called as figures call them; None where it has none."""
    table = result.table(of)
    return None if table is None else _with_words(result, table)


def _with_words(result: Result, frame: pd.DataFrame) -> pd.DataFrame:
    """Return a frame with its labels in the words of the measure."""
    words = result.measure.words
    named = [n for n, labels in result.own.coords.items() if words and labels.dtype.kind in "OUT" and n in frame]
    return frame.assign(**{str(name): [in_words(label, words) for label in frame[name]] for name in named})


def labelled(result: Result, frame: pd.DataFrame) -> pd.DataFrame:
    """Return a frame of a result with its columns and conditions called as figures call them."""
    labels = {name: one.label for name, one in result.measure.variables.items()}

    def words(column: Any) -> str:
        name, *more = str(column).split(", ")
        return ", ".join([labels.get(name, name), *(in_words(one, result.measure.words) for one in more)])

    return _with_words(result, frame).rename(columns=words)


def head_means(table: pd.DataFrame) -> dict[str, float]:
    """Return the mean of every measure over heads, without heads that have no value (constant scores)."""
    return {str(name): float(table[name].mean()) for name in table.columns if name not in HEAD}


# Columns as text, and printed


def print_frame(
    console: Console, frame: pd.DataFrame, title: str, legend: str = "", most: int | None = None
) -> dict[str, int]:
    """Print a frame in as many tables as its columns need, each with the columns that name the rows.

    Args:
        most: print only so many rows, and only the columns that fit into one table; all if left out.

    Returns:
        Numbers of rows and columns that are left out.
    """
    n_rows = len(frame)
    frame = frame.head(n_rows if most is None else most)
    columns = {str(name): texts.tolist() for name, texts in as_text(frame).items()}
    labels = list(takewhile(lambda name: not is_float_dtype(frame[name]), frame.columns))
    n_labels = len(labels) if 0 < len(labels) < len(columns) else 1
    left_out = print_columns(console, columns, title, n_labels, (), legend, whole=most is None)
    return {"row": n_rows - len(frame), "column": left_out}


def as_text(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame as terminal, page and notebook show it: titles without underscores, every cell as text.

    Example:
        >>> as_text(pd.DataFrame({"refit_r": [0.5, float("nan")]})).to_dict("list")
        {'refit r': ['0.500', '-']}
    """
    return with_whole_numbers(frame).map(cell).rename(columns=title)


def table_html(frame: pd.DataFrame) -> str:
    """Return a table for pages and notebooks."""
    with pd.option_context("display.max_colwidth", None):
        return as_text(frame).to_html(index=False, border=0, classes="numbers")


def title(name: Any) -> str:
    """Return the title of a column."""
    return str(name).replace("_", " ")


def with_whole_numbers(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with columns of whole numbers, such as steps and distances, as integers; "-" for none.

    Example:
        >>> with_whole_numbers(pd.DataFrame({"step": [30.0, float("nan")], "r": [0.5, 1.0]})).to_dict("list")
        {'step': [30, '-'], 'r': [0.5, 1.0]}
    """
    found = frame.copy()
    for name in frame.columns[[is_float_dtype(kind) for kind in frame.dtypes]]:
        known = frame[name].dropna()
        if len(known) and (known % 1 == 0).all() and known.abs().max() > 1:
            found[name] = pd.Series([int(one) if one == one else NO_NUMBER for one in frame[name]], frame.index, object)
    return found


def cell(value: Any) -> str:
    """Return a value with three decimals if it is no whole number; "-" for none."""
    if not isinstance(value, float):
        return str(value)
    return format_number(value, ".3f") if value == value else NO_NUMBER


def print_columns(
    console: Console,
    columns: Mapping[str, Sequence[str]],
    title: str,
    n_labels: int,
    foot: Sequence[str] = (),
    legend: str = "",
    *,
    whole: bool = True,
) -> int:
    """Print columns of cells in as many tables as the width needs; a column that does not fit moves to a further table.

    Headings and text break at spaces if necessary; a number is never cut. If not even the labels and one column fit,
    the table is wider than the terminal.

    Args:
        n_labels: how many of the first columns name the rows; every table begins with them.
        foot: styles of the last rows, which a line separates from the others.
        legend: printed below the last table.
        whole: False prints only the first table.

    Returns:
        Number of columns that are not shown.
    """
    names = list(columns)
    labels, rest = names[:n_labels], names[n_labels:]

    def width(widths: Mapping[str, int], group: Sequence[str], gap: int) -> int:
        return sum(widths[name] + gap for name in group) + 2 - gap

    uncut = {name: widest([name, *columns[name]]) for name in names}
    gap = 2 if width(uncut, names, 2) <= console.width else 1
    needs = {name: widest([*name.split(), *columns[name]]) for name in names}
    if any(width(needs, [*labels, name], gap) > console.width for name in rest):  # labels are broken, too
        needs |= {name: widest([word for one in (name, *columns[name]) for word in one.split()]) for name in labels}
    groups = [[*labels]]  # of columns that fit the width, each with the labels and at least one other
    for name in rest:
        if len(groups[-1]) > n_labels and width(needs, [*groups[-1], name], gap) > console.width:
            groups.append([*labels])
        groups[-1].append(name)
    for group in groups if whole else groups[:1]:
        widths = uncut if width(uncut, group, gap) <= console.width else needs
        table = empty_table(title, gap)
        for name in group:
            table.add_column(name, justify="right", width=widths[name])
        rows = list(zip(*(columns[name] for name in group), strict=True))
        body = len(rows) - len(foot)
        for number, row in enumerate(rows):
            style = foot[number - body] if number >= body else None
            table.add_row(*row, style=style, end_section=number == body - 1 and bool(foot))
        if (wide := width(widths, group, gap)) > console.width:
            table.width = wide
        console.print(table, crop=False)
    if legend:
        console.print(f"{legend.removesuffix('.')}.", style="dim", highlight=False)
    return 0 if whole else sum(len(group) - n_labels for group in groups[1:])


def widest(texts: Sequence[str]) -> int:
    return max(map(cell_len, texts), default=1)


def empty_table(title: str, gap: int = 2) -> Table:
    """Return an empty table whose columns are `gap` spaces apart, and one space from either edge."""
    return Table(title=title, box=box.SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), pad_edge=False)


def short(value: float) -> str:
    """Format with three decimals and no zero before the point: .917, -.500, but 10.250; "-" for none."""
    text = cell(float(value))
    if text == NO_NUMBER:
        return text
    sign, digits = ("-" if text.startswith("-") else ""), text.lstrip("-")
    return sign + (digits[1:] if digits.startswith("0.") else digits)
