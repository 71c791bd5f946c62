"""Tables of results as page, notebook and terminal show them: columns by their labels, cells as text."""

from typing import Any

import pandas as pd
from pandas.api.types import is_float_dtype

from tl_posgen.core.formatting import format_number
from tl_posgen.core.measure import HEAD
from tl_posgen.core.numbers import TRAINED
from tl_posgen.core.result import Result
from tl_posgen.report.circuits import on_one_line

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
    is_short = result.measure.table(result.numbers if of == TRAINED else result.numbers.by_null[of]) is not None
    return _with_words(result, result.table(of)) if is_short else None


def _with_words(result: Result, frame: pd.DataFrame) -> pd.DataFrame:
    """Return a frame with its labels in the words of the measure."""
    measure, coords = result.measure, result.trained.coords
    named = [n for n, labels in coords.items() if measure.words and labels.dtype.kind in "OUT" and n in frame]
    return frame.assign(**{str(name): [measure.in_words(label) for label in frame[name]] for name in named})


def labelled(result: Result, frame: pd.DataFrame) -> pd.DataFrame:
    """Return a frame of a result with its columns and conditions called as figures call them."""
    labels = {name: variable.label for name, variable in result.measure.variables.items()}

    def heading(column: Any) -> str:
        name, *more = str(column).split(", ")
        return ", ".join([labels.get(name, name), *map(result.measure.in_words, more)])

    return _with_words(result, frame).rename(columns=heading)


def head_means(table: pd.DataFrame) -> dict[str, float]:
    """Return the mean of every measure over heads, without heads that have no value (constant scores)."""
    return {str(name): float(table[name].mean()) for name in table.columns if name not in HEAD}


def as_text(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame as terminal, page and notebook show it: titles without underscores, every cell as text.

    Example:
        >>> as_text(pd.DataFrame({"refit_r": [0.5, float("nan")]})).to_dict("list")
        {'refit r': ['0.500', '-']}
    """
    return _with_whole_numbers(frame).map(cell).rename(columns=title)


def table_html(frame: pd.DataFrame) -> str:
    """Return a table for pages and notebooks."""
    with pd.option_context("display.max_colwidth", None):
        return as_text(frame).to_html(index=False, border=0, classes="numbers")


def title(name: Any) -> str:
    """Return the title of a column."""
    return str(name).replace("_", " ")


def _with_whole_numbers(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with columns of whole numbers, such as steps and distances, as integers; "-" for none.

    Example:
        >>> _with_whole_numbers(pd.DataFrame({"step": [30.0, float("nan")], "r": [0.5, 1.0]})).to_dict("list")
        {'step': [30, '-'], 'r': [0.5, 1.0]}
    """
    table = frame.copy()
    for name in frame.columns[[is_float_dtype(kind) for kind in frame.dtypes]]:
        defined = frame[name].dropna()
        if len(defined) and (defined % 1 == 0).all() and defined.abs().max() > 1:
            table[name] = pd.Series(
                [int(value) if value == value else NO_NUMBER for value in frame[name]], frame.index, object
            )
    return table


def cell(value: Any) -> str:
    """Return a value with three decimals if it is no whole number; "-" for none; a text on one line."""
    if not isinstance(value, float):
        return on_one_line(str(value))
    return format_number(value, ".3f") if value == value else NO_NUMBER
