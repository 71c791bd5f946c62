"""Results and reports as notebook cells: findings, a table and the first figure, or the whole page."""

import html
from collections.abc import Iterable
from typing import Any

import plotly.io

from tl_posgen.core.formatting import counted
from tl_posgen.core.report import MOST_SENTENCES, Report
from tl_posgen.core.result import Result
from tl_posgen.report.columns import table_html
from tl_posgen.report.tables import compact, head_table

MOST_ROWS = 16
FRAME = '<iframe srcdoc="{page}" style="width:100%;height:{height}px;border:0" loading="lazy"></iframe>'


class Page:
    """HTML page that displays itself in a notebook cell, in a frame that keeps its styles apart.

    Attributes:
        source: the whole page, which loads nothing from the network.
        height: of the frame, in pixels.
    """

    def __init__(self, source: str, height: int):
        self.source, self.height = source, height

    def _repr_html_(self) -> str:
        return FRAME.format(page=html.escape(self.source), height=self.height)

    def __repr__(self) -> str:
        return f"a page of {len(self.source.encode()) / 1e6:.1f} MB: the last line of a notebook's cell shows it"


def result_html(result: Result) -> str:
    """Return a result for a cell: findings, its short table, its first figure."""
    parts = [_heading(result.measure.question, result.own.attrs.get("model")), _sentences(result.findings())]
    return "".join([*parts, _table(compact(result)), _first_figure([result])])


def report_html(report: Report) -> str:
    """Return a report for a cell: its findings, the table with a row per head, the first figure."""
    first = [*report.headlines(), *report.notes()]
    told = [*first, *(one for one in report.findings() if one not in first)]
    parts = [_heading("Position", report.provenance.get("model")), _sentences(told, len(first))]
    table = head_table(report.results)
    if len(table):
        parts.append(_table(table))
    return "".join([*parts, _first_figure(report.results.values())])


def _heading(question: str, model: Any) -> str:
    return f"<h4>{html.escape(question)} · {html.escape(str(model or 'model'))}</h4>"


def _sentences(findings: list[str], n_shown: int = MOST_SENTENCES) -> str:
    """Return the first sentences as a list, and the others folded below it."""
    shown, more = (
        f"<ul>{''.join(f'<li>{html.escape(one)}</li>' for one in some)}</ul>" if some else ""
        for some in (findings[:n_shown], findings[n_shown:])
    )
    folded = f"<details><summary>{counted(len(findings[n_shown:]), 'more sentence')}</summary>{more}</details>"
    return shown + folded if more else shown


def _table(table: Any) -> str:
    more = f"<p>{len(table) - MOST_ROWS} rows more: .frame()</p>" if len(table) > MOST_ROWS else ""
    return table_html(table.head(MOST_ROWS)) + more


def _first_figure(results: Iterable[Result]) -> str:
    """Return the first figure that results have; plotly's script is loaded from its CDN, once for all cells."""
    drawn = next((result for result in results if result.kinds), None)
    how: dict[str, Any] = {"include_plotlyjs": "cdn", "full_html": False}
    return "" if drawn is None else plotly.io.to_html(drawn.plot(), **how)
