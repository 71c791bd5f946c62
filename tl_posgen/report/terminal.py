"""A report in the terminal: tables with the null's row, and what was found in words."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import pandas as pd
from pandas.api.types import is_float_dtype
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from tl_posgen.claim import WIDTHS
from tl_posgen.errors import InputError
from tl_posgen.measure import rows_of
from tl_posgen.report.figures import model_label
from tl_posgen.report.sentences import unsigned_zero
from tl_posgen.report.tables import MOST_HEADS, compact, head_means
from tl_posgen.result import Report, Result

MOST_COLUMNS = 15  # of one table; where measures have more between them, each gets a table of its own


def print_report(report: Report) -> None:
    """One row a head for what has headlines (a row a layer for more than 64 heads), then the other measures' tables."""
    frame, console = report.frame(), Console(markup=False)
    per_head = [result for result in report.values() if headlines(result)]
    if len(frame.columns) > MOST_COLUMNS or not per_head:
        print_measures(report)
        return
    per_layer = pd.DataFrame(frame.groupby("layer", as_index=False).mean())
    rows = frame if len(frame) <= MOST_HEADS else per_layer.assign(head="all")
    short_names, legend = headings(report)
    records = [row | {"layer": int(row["layer"])} for row in rows.to_dict("records")]
    foot = {"bold": {"layer": "mean", "head": ""} | head_means(frame)}
    if report.provenance.get("null_seeds"):
        foot["dim"] = {"layer": "null", "head": ""} | head_means(report.frame(null=True))
    columns: dict[str, list[str]] = {}
    for name in map(str, rows.columns):
        values = [row.get(name, "") for row in (*records, *foot.values())]
        heading = short_names.get(name, name)
        heading = name if heading in columns else heading
        columns[heading] = [short(v) if isinstance(v, float) else f"{v}" for v in values]
    wide = taken({name: widest([name, *cells]) for name, cells in columns.items()}, list(columns)) > console.width
    title, gap = f"{report.provenance['model']}: {len(frame)} heads", 1 if wide else 2
    print_columns(console, columns, title, 2, tuple(foot), legend, gap)
    for result in report.values():
        if all(result is not one for one in per_head):
            print_result(console, result)
    print_findings(console, report)


def headlines(result: Result) -> bool:
    """Whether the per-head table shows it."""
    return rows_of(result.dataset) == ("layer", "head") and any(
        one.headline for one in result.measure.variables.values()
    )


def headings(report: Report) -> tuple[dict[str, str], str]:
    """Short headings for the columns of the per-head table, and the legend that spells them out."""
    declared = [one for result in report.results.values() for one in result.measure.variables.values() if one.short]
    short = {"layer": "L", "head": "H"} | {one.headline: one.short for one in declared}
    return short, "; ".join(f"{one.short}: {one.label}" for one in declared)


def print_measures(report: Report) -> None:
    """One table a result, with the null's below it."""
    console = Console(markup=False)
    for result in report.values():
        print_result(console, result)
    print_findings(console, report)


def print_result(console: Console, result: Result) -> None:
    """The short table of a result, with the null's below it; nothing where it has no numbers a row."""
    name = result.name.replace("_", " ")
    sides = [(f"{name}: {model_label(result.dataset)}", False)]
    sides += [] if result.null is None else [(f"{name}: null, {model_label(result.null)}", True)]
    for title, null in sides:
        table = compact(result, null=null)
        if set(table.columns) - set(rows_of(result.dataset)):
            print_frame(console, table, title)


def print_known_measures() -> None:
    """A row a measure that `analyze` takes: its name, its question, and where it comes from."""
    from tl_posgen import registry

    table = empty_table("measures")
    for name in ("name", "question", "source"):
        table.add_column(name, overflow="fold")
    for name in registry.names():
        try:
            measure = registry.find(name)
        except InputError as error:
            table.add_row(name, str(error), "", end_section=True)
            continue
        if measure is not None and (measure.collector or measure.procedure):
            table.add_row(name, measure.question, measure.source, end_section=True)
    Console(markup=False).print(table)


def print_claims(report: Report) -> None:
    """A row a claim: what the paper says, the verdict, the numbers, and the null's."""
    table = empty_table(f"claims on {report.provenance['model']}")
    for name in WIDTHS:
        table.add_column(name, overflow="fold")
    for row in report["claims"].frame().to_dict("records"):
        table.add_row(*(str(row[name]) for name in WIDTHS), end_section=True)
    Console(markup=False).print(table)


def print_frame(console: Console, frame: pd.DataFrame, title: str) -> None:
    """A frame in as many tables as its columns need, the columns that name its rows in front of each."""
    columns = {str(name).replace("_", " "): [cell(value) for value in frame[name]] for name in frame.columns}
    labels = list(takewhile(lambda name: not is_float_dtype(frame[name]), frame.columns))
    print_columns(console, columns, title, len(labels) if 0 < len(labels) < len(columns) else 1)


def cell(value: Any) -> str:
    return unsigned_zero(value, ".3f") if isinstance(value, float) else str(value)


def print_columns(
    console: Console,
    columns: Mapping[str, Sequence[str]],
    title: str,
    n_labels: int,
    foot: Sequence[str] = (),
    caption: str | None = None,
    gap: int = 2,
) -> None:
    """Columns of cells in as many tables as the width needs: one that does not fit whole moves to a further table.

    Headings and text break at spaces where they must; a number is never cut. Where not even the labels and one column
    fit, the table is wider than the terminal.

    Args:
        n_labels: how many of the first columns name the rows: they stand in front of every table.
        foot: styles of the last rows, which a line sets apart.
        caption: below the last table.
        gap: spaces between columns.
    """
    names = list(columns)
    labels, rest = names[:n_labels], names[n_labels:]
    whole = {name: widest([name, *columns[name]]) for name in names}
    by_cell = {name: widest([*name.split(), *columns[name]]) for name in names}
    by_word = by_cell | {
        name: widest([word for one in (name, *columns[name]) for word in one.split()]) for name in labels
    }
    unbroken = all(taken(by_cell, [*labels, name], gap) <= console.width for name in rest)
    needs = by_cell if unbroken else by_word
    groups = fitting(labels, rest, needs, console.width, gap)
    for group in groups:
        widths = whole if taken(whole, group, gap) <= console.width else needs
        table = empty_table(title, caption if group is groups[-1] else None, gap)
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


def print_findings(console: Console, report: Report) -> None:
    """What was found, in words."""
    for sentence in report.findings():
        console.print(f"• {sentence}", highlight=False)


def empty_table(title: str, caption: str | None = None, gap: int = 2) -> Table:
    """Columns stand `gap` spaces apart, and one from either edge."""
    return Table(title=title, box=box.SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), pad_edge=False, caption=caption)


def short(value: float) -> str:
    """Three decimals, and no zero before the point: .917, -.500, but 10.250."""
    text = unsigned_zero(value, ".3f")
    sign, digits = ("-" if text.startswith("-") else ""), text.lstrip("-")
    return sign + (digits[1:] if digits.startswith("0.") else digits)
