"""The report as one HTML page: words first, then pictures, then tables; every script inside."""

import html
from collections.abc import Mapping
from importlib import import_module, util
from typing import Any

import pandas as pd
import plotly.io
from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from tl_posgen.report.encodings import note
from tl_posgen.report.findings import findings, heading
from tl_posgen.report.summary import short_table
from tl_posgen.results import Result

MOST_FINDINGS = 12  # in the box at the top of a page


def render_page(results: Mapping[str, Result], provenance: Mapping[str, Any]) -> str:
    """The page. Every figure carries its title, model and null; every token-level view shares one script."""
    environment = Environment(loader=PackageLoader("tl_posgen.report", "."), autoescape=True)
    template = environment.get_template("page.html.j2")
    scripts: dict[str, None] = {}
    sections = [_section(result, scripts) for result in results.values()]
    said = findings(results)
    if len(said) > MOST_FINDINGS:  # too many to lead with: each section leads with its own
        said = []
        for section, (name, result) in zip(sections, results.items(), strict=True):
            section["findings"] = findings({name: result})
    return template.render(
        title=f"Position in {provenance.get('model', 'this model')}",
        findings=said,
        sections=sections,
        provenance=_flat(provenance),
        plotly=Markup(get_plotlyjs()),
        scripts=[Markup(script) for script in scripts],
    )


def _section(result: Result, scripts: dict[str, None]) -> dict[str, Any]:
    title, question = heading(result.name)
    module = f"tl_posgen.views.{result.name}"
    view = import_module(module if util.find_spec(module) else "tl_posgen.views.head_map")
    section: dict[str, Any] = {"id": result.name, "title": title, "question": question, "note": note(result)}
    section["figures"] = [_figure(result, kind) for kind in _kinds(view, result)]
    labels = view.examples(result.dataset) if hasattr(view, "examples") else []
    section["views"] = [_token_view(result, index, label, scripts) for index, label in enumerate(labels)]
    short, frame = short_table(result), result.frame()
    section["short"] = None if short is None else _table(short)
    section["table"] = _table(frame)
    section["rows"] = len(frame)
    return section


def _table(frame: pd.DataFrame) -> Markup:
    with pd.option_context("display.max_colwidth", None):
        return Markup(frame.to_html(index=False, float_format="%.3f", border=0, classes="numbers"))


def _kinds(view: Any, result: Result) -> tuple[str, ...]:
    """The pictures this result has data for: a view whose pictures depend on options says so in `drawable`."""
    return view.drawable(result.dataset) if hasattr(view, "drawable") else view.KINDS


def _figure(result: Result, kind: str) -> Markup:
    figure = result.plot(kind=kind)
    return Markup(plotly.io.to_html(figure, include_plotlyjs=False, full_html=False, config={"responsive": True}))


def _token_view(result: Result, example: int, label: str, scripts: dict[str, None]) -> dict[str, Any]:
    from tl_posgen.views.circuits import split_script

    script, page = split_script(result.show(example=example))
    scripts[script] = None
    return {"label": label, "page": Markup(page)}


def _flat(provenance: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows = []
    for name, value in provenance.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{name} ")
        else:
            rows.append((f"{prefix}{name}", html.unescape(str(value))))
    return rows
