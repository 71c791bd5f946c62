"""Reports in the terminal: up to three sentences and a table; all sentences and tables where they are asked for."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, TypeAlias

import pandas as pd
from pandas.api.types import is_float_dtype
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from tl_posgen.core.formatting import counted
from tl_posgen.core.measure import HEAD
from tl_posgen.core.numbers import TRAINED
from tl_posgen.core.report import Report
from tl_posgen.core.result import Result
from tl_posgen.errors import InputError
from tl_posgen.models.selection import head_name
from tl_posgen.report.figures import model_name
from tl_posgen.report.tables import as_text, cell, compact, head_means, title

_MOST_COLUMNS = 15  # of the table of all measures; with more columns each measure has its own table
MOST_LINES = 42  # of the default output; the path of the page takes two more
_TABLE_LINES = 28  # of these for the table, or fewer where sentences are long
_MOST_RANKED = 5  # heads of each quantity that ranks them


def print_report(report: Report, *, full: bool = False) -> None:
    """Print one row per head with all headlines, then the other results as `print_measures` does."""
    per_head = [
        name
        for name, result in report.items()
        if any(variable.headline for variable in result.measure.variables.values())
        and result.headline_frame() is not None
    ]
    if not per_head or len(report.frame().columns) > _MOST_COLUMNS:
        print_measures(report, full=full)
        return
    other_results = [result for name, result in report.items() if name not in per_head]
    _print_blocks(partial(print_heads, report=report), other_results, report, full)


def print_measures(report: Report, *, full: bool = False) -> None:
    """Print up to three sentences, the leading table or that of the first result, and how much is left out.

    Args:
        full: print all sentences, and one table per result with those of its null models below it.
    """
    results, first = list(report.values()), None
    if (lead := report.leading_table()) is not None:
        heading, legend = (lead.attrs.get(name, "") for name in ("title", "legend"))
        first = lambda console, most=None: print_frame(console, lead, heading, legend, most)  # noqa: E731
    elif not full and (first_result := next(filter(_has_table, results), None)) is not None:
        first = partial(print_own, result=first_result)
        results = [result for result in results if result is not first_result]
    _print_blocks(first, results, report, full)


# prints a table, or at most so many rows and the columns that fit; returns how many are left out
_Printer: TypeAlias = Callable[[Console, int | None], dict[str, int]]


def _print_blocks(first: _Printer | None, results: Sequence[Result], report: Report, full: bool) -> None:
    """Print three sentences and the first table; or (full) all sentences and every result's table."""
    console = Console(markup=False)

    def print_tables(most: int | None = None) -> None:
        if first is not None:
            first(console, most)
        for result in filter(_has_table, results) if full else ():
            for side in result.by_kind:
                print_own(console, result=result, of=side)

    def printed(show: Callable[[], Any]) -> list[str]:
        with console.capture() as captured:
            show()
        return captured.get().rstrip().splitlines()

    try:
        sentences = [*report.findings(), *report.without_null()] if full else [*report.headlines(), *report.notes()]
    except Exception:  # of a measure's own sentences: what was measured is still shown
        print_tables(None if full else _TABLE_LINES)
        raise
    sentence_lines = printed(lambda: [console.print(f"• {sentence}", highlight=False) for sentence in sentences])
    if sentence_lines:
        print(*sentence_lines, "", sep="\n")
    if full:
        print_tables()
        return
    missing = dict[str, int]()
    if first is not None:
        room = max(1, min(_TABLE_LINES, MOST_LINES - len(sentence_lines) - 3))
        for most in range(room, 0, -1):  # until the table fits, if its first row does
            lines = printed(lambda: missing.update(first(console, most)))  # noqa: B023
            if len(lines) <= room or most == 1:
                print(*lines, "", sep="\n")
                break
    missing |= {"sentence": len({*report.findings()} - {*sentences}), "table": sum(map(_has_table, results))}
    if counts := [counted(n, what) for what, n in missing.items() if n]:
        print(f"Not shown: {', '.join(counts)}; --full shows all.")


def print_heads(console: Console, most: int | None = None, *, report: Report) -> dict[str, int]:
    """Print the headlines of every measure, one row per head, with the mean and the null models' means below.

    Where not all heads fit, those with most of each ranked quantity are shown, such as position and interaction.
    """
    rows = frame = report.frame()
    heading = f"{report.provenance.get('model', 'model')}: {counted(len(frame), 'head')}"
    labelled = [item for result in report.values() for item in result.headline_labels().items()]
    variables = [variable for result in report.values() for variable in result.measure.variables.values()]
    ranked = [variable.headline for variable in variables if variable.ranked and variable.headline in frame]
    room = most if most is None or not ranked else min(most, _MOST_RANKED * len(ranked))
    if room is not None and room < len(frame):
        labels, by = {name: label for name, (_, label) in labelled}, ranked or [str(frame.columns[2])]
        n = max(1, room // len(by))
        rows = pd.concat([frame.nlargest(n, name) for name in by]).drop_duplicates(list(HEAD))
        heading += ", " + ", ".join(f"the {n} of {'most' if ranked else 'highest'} {labels[name]}" for name in by)
        if shared := n * len(by) - len(rows):
            heading += f" ({counted(shared, 'head')} in both)" if len(by) == 2 else f" ({len(rows)} in all)"
    headings = {name: (short, label) for name, (short, label) in labelled if short and name in frame}
    short_names = {name: short for name, (short, _) in headings.items()}
    legend = "; ".join(f"{short}: {label}" for short, label in headings.values() if short != label)
    table = as_text(rows.drop(columns=list(HEAD)))
    table.insert(0, "head", [head_name(*place) for place in zip(rows["layer"], rows["head"], strict=True)])
    foot = {"mean": frame}
    for kind in report.provenance.get("nulls", {}):
        foot[kind] = report.frame(kind)
    for kind, of_kind in foot.items():
        means = {title(name): cell(value) for name, value in head_means(of_kind).items()}
        table.loc[kind] = pd.Series({"head": kind.split()[0]} | means).reindex(table.columns, fill_value="")
    styles = ["bold" if name == "mean" else "dim" for name in foot]
    new = {"head": "head"} | {title(name): short_names.get(name, title(name)) for name in rows.columns[2:]}
    columns = {new[name] if [*new.values()].count(new[name]) == 1 else name: [*table[name]] for name in table}
    left_out = _print_columns(console, columns, heading, 1, styles, legend, whole=most is None)
    return {"row": len(frame) - len(rows), "column": left_out}


def _has_table(result: Result) -> bool:
    """Return whether a result has numbers a row."""
    return bool(set(compact(result).columns) - set(result.measure.rows))


def print_own(console: Console, most: int | None = None, *, result: Result, of: str = TRAINED) -> dict[str, int]:
    """Print the short table of the model, or of its null models of a kind."""
    table, name = compact(result, of), title(result.name)
    side = model_name(result.by_kind[of])
    return print_frame(console, table, f"{name}: {side}", result.legend, most)


def print_known_measures(*, full: bool = False) -> None:
    """Print one row per measure that `analyze` accepts: its name and its question, and its source where all is asked
    for."""
    from tl_posgen.core import registry

    columns = ("name", "question", "source") if full else ("name", "question")
    table = _empty_table("")
    for name in columns:
        table.add_column(name, overflow="fold")
    foreign = {
        point.name: f" (of {point.dist.name if point.dist else 'another package'})" for point in registry.plug_ins()
    }
    for name in registry.names():
        try:
            kind = registry.find(name)
        except InputError as error:
            table.add_row(name, str(error), end_section=full)
            continue
        if kind is not None and (kind.is_fed or kind.runs_model):
            name, *cells = (getattr(kind, column) for column in columns)
            table.add_row(name + foreign.get(name, ""), *cells, end_section=full)
    Console(markup=False).print(table)
    if not full:
        print("tl-posgen NAME runs one; --full adds who proposed it.")


def print_claims(report: Report, *, full: bool = False) -> None:
    """Print one row per claim: the paper's claim, the verdict, the numbers, the random init's; by default one line."""
    console, rows = Console(markup=False), report["claims"].frame()
    if full:
        for row in rows.astype(str).to_dict("records"):
            console.print(f"{row['claim']}: {row['verdict']}", style="bold", highlight=False)
            for name in row:
                if name not in ("claim", "verdict", "criterion") and row[name]:
                    console.print(Padding(f"{name}: {row[name]}", (0, 0, 0, 2), expand=False), highlight=False)
        for sentence in report["claims"].findings():
            print(sentence)
        return
    rows = rows[["claim", "verdict", "says"]].astype(str)
    room = console.width - sum(_widest([name, *rows[name]]) + 2 for name in ("claim", "verdict")) - 2
    table = _empty_table(f"claims on {report.provenance['model']}")
    for name in rows.columns:
        table.add_column(name, no_wrap=True)
    for row in rows.to_dict("records"):
        table.add_row(row["claim"], row["verdict"], textwrap.shorten(row["says"], max(room, 10), placeholder=" ..."))
    console.print(table)
    print(*[*report["claims"].findings(), "The numbers that verdicts rest on: --full, or the page."], sep="\n")


# Frames and columns


def print_frame(
    console: Console, frame: pd.DataFrame, heading: str, legend: str = "", most: int | None = None
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
    left_out = _print_columns(console, columns, heading, n_labels, (), legend, whole=most is None)
    return {"row": n_rows - len(frame), "column": left_out}


def _print_columns(
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
    labels, value_names = names[:n_labels], names[n_labels:]

    def width(widths: Mapping[str, int], group: Sequence[str], gap: int) -> int:
        return sum(widths[name] + gap for name in group) + 2 - gap

    uncut = {name: _widest([name, *columns[name]]) for name in names}
    gap = 2 if width(uncut, names, 2) <= console.width else 1
    needs = {name: _widest([*name.split(), *columns[name]]) for name in names}
    if any(width(needs, [*labels, name], gap) > console.width for name in value_names):  # labels are broken, too
        needs |= {name: _widest([word for text in (name, *columns[name]) for word in text.split()]) for name in labels}
    groups = [[*labels]]  # of columns that fit the width, each with the labels and at least one other
    for name in value_names:
        if len(groups[-1]) > n_labels and width(needs, [*groups[-1], name], gap) > console.width:
            groups.append([*labels])
        groups[-1].append(name)
    for group in groups if whole else groups[:1]:
        widths = uncut if width(uncut, group, gap) <= console.width else needs
        table = _empty_table(title, gap)
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


def _widest(texts: Sequence[str]) -> int:
    return max(map(cell_len, texts), default=1)


def _empty_table(title: str, gap: int = 2) -> Table:
    """Return an empty table whose columns are `gap` spaces apart, and one space from either edge."""
    return Table(title=title, box=box.SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), pad_edge=False)
