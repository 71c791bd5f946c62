"""A report in the terminal: tables with the null's row, what was found in words, and where the page is."""

from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table

from tl_posgen.report import Report
from tl_posgen.report.findings import findings
from tl_posgen.report.summary import MOST_HEADS, compact, means

# the table's headings: short, so that thirteen columns fit a terminal of eighty
HEADINGS = {
    "layer": "L",
    "head": "H",
    "three_axis_r": "r",
    "three_axis_r_no_first": "r-1st",
    "three_axis_r_visible": "r-row",
    "mean_key_r": "r-mk",
}
MOST_COLUMNS = 14  # of one table; where measures have more between them, each gets a table of its own
CAPTION = (
    "r: correlation of the scores with position + query + key; r-1st: first token left out; r-row: within rows, what "
    "softmax sees; q ... qkd: variance shares; r-mk: mean-key split"
)


def print_report(report: Report, page: Path) -> None:
    """The per-head table (per-layer for models of more than 64 heads), what was found, and where the page is."""
    frame = report.frame()
    if len(frame.columns) > MOST_COLUMNS:
        print_experiments(report, page)
        return
    console = Console()
    per_layer = pd.DataFrame(frame.groupby("layer", as_index=False).mean())
    rows = frame if len(frame) <= MOST_HEADS else per_layer.assign(head="all")
    caption = CAPTION if "three_axis" in report else None
    table = empty_table(f"{report.provenance['model']}: {len(frame)} heads", caption)
    for name in rows.columns:
        table.add_column(HEADINGS.get(str(name), str(name).removeprefix("share_")), justify="right", no_wrap=True)

    def cells(values: dict[str, Any]) -> list[str]:
        return [short(v) if isinstance(v, float) else f"{v}" for v in values.values()]

    for row in rows.to_dict("records"):
        table.add_row(*cells(row | {"layer": int(row["layer"])}))
    table.add_section()
    table.add_row(*cells({"layer": "mean", "head": ""} | means(frame)), style="bold")
    if report.provenance.get("null_seed") is not None:
        table.add_row(*cells({"layer": "null", "head": ""} | means(report.frame(null=True))), style="dim")
    console.print(table)
    print_findings(console, report, page)


def print_experiments(report: Report, page: Path) -> None:
    """One table a result, with the null's below it."""
    console = Console()
    for result in report.results.values():
        sides = [(str(result.dataset.attrs.get("model", "model")), False)]
        sides += [("null: random init", True)] if result.null is not None else []
        for title, null in sides:
            print_frame(console, compact(result, null=null), f"{result.name.replace('_', ' ')}: {title}")
    print_findings(console, report, page)


def print_claims(report: Report, page: Path) -> None:
    """A row a claim: what the paper says, the verdict, the numbers, and the null's."""
    table = empty_table(f"claims on {report.provenance['model']}")
    for name in ("claim", "says", "verdict", "measured", "null"):
        table.add_column(name, overflow="fold")
    for row in report["claims"].frame().to_dict("records"):
        table.add_row(*(str(row[str(column.header)]) for column in table.columns), end_section=True)
    console = Console()
    console.print(table)
    console.print(f"\nReport: {page}", highlight=False, soft_wrap=True)


def print_frame(console: Console, frame: pd.DataFrame, title: str) -> None:
    table = empty_table(title)
    for name in frame.columns:
        table.add_column(str(name).replace("_", " "), justify="right")
    for row in frame.to_dict("records"):
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)


def print_findings(console: Console, report: Report, page: Path) -> None:
    """What was found in words, and where the page is: how every command ends."""
    for sentence in findings(report.results):
        console.print(f"• {sentence}", highlight=False)
    console.print(f"\nReport: {page}", highlight=False, soft_wrap=True)


def empty_table(title: str, caption: str | None = None) -> Table:
    return Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, caption=caption)


def short(value: float) -> str:
    """Three decimals, and no zero before the point: .917, -.500, but 10.250."""
    sign, digits = ("-" if value < 0 else ""), f"{abs(value):.3f}"
    return sign + (digits[1:] if digits.startswith("0.") else digits)
