"""The report as one HTML page: words first, then pictures, then tables; every script inside."""

import html
from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.io
from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from tl_posgen.report.circuits import split_script
from tl_posgen.result import Result

MOST_VALUES = 64  # of one list in the provenance
MOST_FINDINGS = 12  # in the box at the top of a page


def render_page(results: Mapping[str, Result], provenance: Mapping[str, Any]) -> str:
    """The page. Every figure carries its title, model and null; every token-level view shares one script."""
    environment = Environment(loader=PackageLoader("tl_posgen.report", "."), autoescape=True)
    template = environment.get_template("page.html.j2")
    scripts: dict[str, None] = {}
    sections = [_section(result, scripts) for result in results.values()]
    findings = [sentence for section in sections for sentence in section["findings"]]
    if len(findings) > MOST_FINDINGS:  # too many to lead with: each section leads with its own
        findings = []
    else:
        for section in sections:
            section["findings"] = []
    return template.render(
        title=f"Position in {provenance.get('model', 'this model')}",
        findings=findings,
        sections=sections,
        provenance=_flat(provenance),
        plotly=Markup(get_plotlyjs()),
        scripts=[Markup(script) for script in scripts],
    )


def _section(result: Result, scripts: dict[str, None]) -> dict[str, Any]:
    measure, frame, table = result.measure, result.frame(intervals=False), result.table()
    labels = [] if measure.tokens is None else measure.tokens.labels(result.dataset)
    return {
        "id": result.name,
        "title": measure.question,
        "explanation": measure.explanation,
        "caveat": result.caveat,
        "findings": result.findings(),
        "figures": [_figure(result, kind) for kind in result.kinds if kind not in measure.off_page],
        "views": [_token_view(result, index, label, scripts) for index, label in enumerate(labels)],
        "short": None if table is None else _table(table),
        "table": _table(frame),
        "variables": _variables(result, frame),
        "rows": len(frame),
    }


def _variables(result: Result, frame: pd.DataFrame) -> list[tuple[str, str]]:
    """What the columns of the long table mean, as the dataset itself says."""
    columns = [(str(name), result.dataset[name].attrs) for name in frame.columns if name in result.dataset]
    return [
        (name, words + (f" [{attrs['units']}]" if "units" in attrs else ""))
        for name, attrs in columns
        if (words := attrs.get("description") or attrs.get("long_name"))
    ]


def _table(frame: pd.DataFrame) -> Markup:
    with pd.option_context("display.max_colwidth", None):
        return Markup(frame.to_html(index=False, float_format="%.3f", border=0, classes="numbers"))


def _figure(result: Result, kind: str) -> Markup:
    figure = result.plot(kind)
    return Markup(plotly.io.to_html(figure, include_plotlyjs=False, full_html=False, config={"responsive": True}))


def _token_view(result: Result, example: int, label: str, scripts: dict[str, None]) -> dict[str, Any]:
    script, page = split_script(result.show(example))
    scripts[script] = None
    return {"label": label, "page": Markup(page)}


def _flat(provenance: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows = []
    for name, value in provenance.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{name} ")
        else:
            told = f"{len(value)} values" if isinstance(value, list) and len(value) > MOST_VALUES else str(value)
            rows.append((f"{prefix}{name}", html.unescape(told)))
    return rows
