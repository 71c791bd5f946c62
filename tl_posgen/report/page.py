"""Reports as one HTML page, every script inside, and in a notebook's cell: findings, figures, tables."""

import base64
import gzip
import html
import json
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import plotly.io
from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from tl_posgen.core.formatting import counted, prompts_in_words
from tl_posgen.core.measure import Measure
from tl_posgen.core.report import MOST_SENTENCES, Report
from tl_posgen.core.result import Result
from tl_posgen.models.loading.null_kinds import NULL_KINDS
from tl_posgen.report.circuits import split_script
from tl_posgen.report.heads import heads_of
from tl_posgen.report.tables import MOST_HEADS, compact, labelled, short_table, table_html

QUESTION = "How does attention use position?"
_MOST_VALUES = 64  # a longer list of the provenance is shown as its length
_MOST_SECTIONS = 5  # that are open; of more, all but the first are folded
CELL_ROWS = 16  # of a table in a notebook's cell
_HEADROOM = 54  # pixels above a figure's panels, for their titles
_TEMPLATES = {"light": "plotly_white", "dark": "plotly_dark"}
_VERDICTS = re.compile("<td>(held|partly|detectable|not held|open)</td>")
_WITHOUT_FIRST = re.compile("without (the )?first token")
_FRAME = '<iframe srcdoc="{page}" style="width:100%;height:{height}px;border:0" loading="lazy"></iframe>'
_CONFIG = {"displaylogo": False, "showSendToCloud": False, "toImageButtonOptions": {"format": "svg"}}
_CELL_FIGURE = """<div id="{id}" role="img" aria-label="{title}" style="height:{height}px"></div><script>(() => {{
const unpacked = async () => {{
  const bytes = Uint8Array.from(atob("{script}"), (letter) => letter.charCodeAt(0));
  const text = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  document.head.append(Object.assign(document.createElement("script"), {{ text: await new Response(text).text() }}));
}};
window.tlPosgenPlotly ??= window.Plotly ? Promise.resolve() : unpacked();
const figure = {figure};
window.tlPosgenPlotly.then(() => Plotly.newPlot("{id}", figure.data, figure.layout, {config}));
}})()</script>"""
_HEAD = re.compile(r"L\d+H\d+")
_UNSHOWN = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")  # which HTML drops, or cannot hold


def render_page(report: Report) -> str:
    """Return the page. Figures carry title, model and random init; token-level views share one script."""
    scripts: dict[str, None] = {}
    results, provenance = report.results, report.provenance
    sections = [_section(result, scripts) for result in results.values()]
    findings = report.headlines()
    if {*findings} <= {*(sections[0]["findings"] if sections else [])}:
        findings = []  # they stand right below
    for section in sections:  # every sentence once
        section["findings"] = [sentence for sentence in section["findings"] if sentence not in findings]
    question = question_of(*(result.measure for result in results.values())) if results else QUESTION
    models = (result.trained.attrs.get("model") for result in results.values())
    model = provenance.get("model") or next(models, None)
    title = f"{question} · {model}" if model else question
    if [section["title"] for section in sections] == [question]:
        sections[0]["title"] = ""  # the page's own says it
    # what numbers are also given for
    texts = [*findings, *(text for section in sections for text in section["findings"])]
    texts += [figure["spec"] for section in sections for figure in section["figures"]]
    without_first = any(_WITHOUT_FIRST.search(text) for text in texts)
    phrases = ["without the first token, often an attention sink"] if without_first else []
    by_result = [result.numbers.labels_by_null for result in results.values()]
    n_nulls = {kind: max((len(labels.get(kind, ())) for labels in by_result), default=0) for kind in NULL_KINDS}
    several = {kind: f" of {n} seeds" if n > 1 else "" for kind, n in n_nulls.items()}
    phrases += [f"{kind.description}{several[name]}" for name, kind in NULL_KINDS.items() if n_nulls[name]]
    also = [f"Numbers are also given {', and '.join(phrases)}."] if phrases else []
    cut = _of_the_text(results, provenance)
    remarks = " ".join([*also, *cut, *report.without_null()])
    words = {"title": title, "beside": remarks, "findings": findings}
    if (lead := report.leading_table()) is not None:
        words["lead"] = {**lead.attrs, "table": _table_on_page(lead)}
    return fill_page(sections, scripts, provenance, words, heads_of(results))


def _of_the_text(results: Mapping[str, Result], provenance: Mapping[str, Any]) -> list[str]:
    """Return a sentence on the text and the prompts cut from it, and one on what their first token is, with the
    attention that it takes where a measure has it."""
    cut = prompts_in_words(*(provenance.get(name) for name in ("prompts", "length", "text")))
    sentences = [f"{cut}."] if cut else []
    if not provenance.get("first_token"):
        return sentences
    numbers, takes = results["variance"].numbers if "variance" in results else None, ""
    if numbers is not None and "first_token" in numbers and (share := numbers("first_token")):
        takes = f", which takes {share:.0%} of the attention of the queries behind it"
    return [*sentences, f"First token of each prompt: {provenance['first_token']}{takes}."]


def fill_page(
    sections: Sequence[Mapping[str, Any]],
    scripts: Iterable[str],
    provenance: Mapping[str, Any],
    words: Mapping[str, Any],
    heads: Any = None,
) -> str:
    """Return the page of these sections, under these words: title, beside, findings."""

    def shipped(*names: str) -> Markup:
        return Markup("".join(files("tl_posgen.report").joinpath(name).read_text(encoding="utf-8") for name in names))

    environment = Environment(loader=PackageLoader("tl_posgen.report", "."), autoescape=True)
    templates = {name: plotly.io.templates[template].to_plotly_json() for name, template in _TEMPLATES.items()}
    sections = [{"n_open": 1, **section} for section in sections]
    is_folded = len(sections) > _MOST_SECTIONS
    page = environment.get_template("page.html.j2").render(
        **words,
        sections=sections,
        is_folded=is_folded,
        most=MOST_SENTENCES,
        provenance=list(_flat(provenance)),
        plotly=Markup(get_plotlyjs()),
        scripts=[Markup(script) for script in scripts],
        heads=None if heads is None else _json(json.dumps(heads)),
        null_kinds=[] if heads is None else heads["nulls"],
        templates=_json(to_json_plotly(templates)),
        style=shipped("page.css"),
        behaviour=shipped("panels.js", "page.js"),
    )
    return _UNSHOWN.sub(
        lambda match: f"\\u{ord(match[0]):04x}", page
    )  # scripts read the letter, readers see its number


def question_of(first: Measure, *others: Measure) -> str:
    """Return the question of the first measure where the others are read by it or belong to the subject that has its
    name, or that of all measures."""
    subject, used = type(first).__module__.rpartition(".")[0], {kind.name for kind in first.after}
    leads = first.name == subject.rpartition(".")[2]  # slash.slash, planes.planes
    is_one = all(other.name in used or (leads and type(other).__module__.startswith(f"{subject}.")) for other in others)
    return first.question if is_one or first.name == "claims" else QUESTION


def _section(result: Result, scripts: dict[str, None]) -> dict[str, Any]:
    """Return what the template shows of a result; scripts of token-level views are added to `scripts`."""
    measure, frame, table = result.measure, result.frame(), short_table(result)
    n_heads = result.trained.sizes.get("layer", 0) * result.trained.sizes.get("head", 0)
    left = measure.by_head if n_heads > MOST_HEADS else frozenset()
    views = []
    for index, label in enumerate(result.token_labels()):
        script, page = split_script(result.show(index))
        scripts[script] = None
        head = _HEAD.search(label)
        views.append({"label": label, "head": head[0] if head else "", "page": Markup(page)})
    names = dict.fromkeys(str(column).partition(", ")[0] for column in frame)  # "r" of "r, without first"
    described = [result.trained[name].attrs for name in names if name in result.trained]
    return {
        "id": result.name,
        "title": measure.question,
        "explanation": measure.explanation,
        "notes": result.notes,
        "findings": result.sentences,
        "figures": [figure_on_page(result.plot(kind)) for kind in result.kinds if kind not in left],
        "n_open": measure.n_headlines,
        "of_heads": ", ".join(measure.variables[name].label for name in measure.curves) if left else "",
        "views": views,
        "short": None if table is None else _table_on_page(table),
        "legend": result.legend,
        "table": _table_on_page(labelled(result, frame)),
        "variables": [
            (result.worded(attrs["long_name"]), description + (f" [{attrs['units']}]" if "units" in attrs else ""))
            for attrs in described
            if "long_name" in attrs and (description := attrs.get("description"))
        ],
        "rows": len(frame),
    }


def _table_on_page(frame: pd.DataFrame) -> Markup:
    """Return the table in HTML; a cell that holds a verdict says so, for its colour."""
    return Markup(_VERDICTS.sub(r'<td data-verdict="\1">\1</td>', table_html(frame)))


def figure_on_page(drawn: go.Figure) -> dict[str, Any]:
    """Return a figure for the page: the title as wrapping text of the page, and the layout without its
    template."""
    figure = drawn.to_dict()
    layout = figure["layout"]
    title = (layout.pop("title", None) or {}).get("text", "")
    titles = layout.pop("meta", None) or {"title": re.sub(r"<[^>]*>", " ", str(title)), "subtitle": ""}
    titles = {name: html.unescape(text) for name, text in titles.items()}  # plotly's are HTML; the page escapes its own
    layout.pop("template", None)
    margin = layout.get("margin", {})
    height = layout.get("height", 450) - max(0, margin.get("t", _HEADROOM) - _HEADROOM)
    layout |= {"margin": {**margin, "t": _HEADROOM}, "height": height}
    traces = [dict(trace) for trace in figure["data"]]
    for trace in traces:  # packed numbers in single precision, which halves the page
        for key, value in trace.items():
            if isinstance(value, dict) and value.get("dtype") == "f8":
                numbers = np.frombuffer(base64.b64decode(value["bdata"]), "<f8").astype("<f4")
                trace[key] = {**value, "dtype": "f4", "bdata": base64.b64encode(numbers.tobytes()).decode()}
    return {
        **titles,
        "height": height,
        "spec": _json(to_json_plotly({"data": traces, "layout": layout})),
    }


def _json(text: str | None) -> Markup:
    """Return JSON in which no token can close the script."""
    return Markup(str(text).replace("<", "\\u003c"))


def _flat(provenance: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in provenance.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name} ")
        else:
            is_long = isinstance(value, list) and len(value) > _MOST_VALUES
            yield f"{prefix}{name}", f"{len(value)} values" if is_long else html.unescape(str(value))


# In a notebook's cell


@dataclass(frozen=True)
class InCell:
    """What a notebook's cell shows of an object.

    Attributes:
        words: HTML without a script.
        figure: below it.
    """

    words: str
    figure: go.Figure | None = None

    def html(self) -> str:
        """Return both as HTML that needs nothing else: the figure carries plotly's script, of 2 MB."""
        return self.words + ("" if self.figure is None else _alone(self.figure))

    def display(self, plain: str) -> None:
        """Show it by IPython; the figure as plotly shows any figure, whose script a notebook then has once. A terminal
        shows the plain text alone."""
        from IPython.core.getipython import get_ipython
        from IPython.display import display

        shell: Any = get_ipython()
        draws = self.figure is not None and shell is not None and "text/html" in shell.display_formatter.active_types
        if draws and find_spec("nbformat") is None:  # which plotly's own way needs
            display({"text/plain": plain, "text/html": self.html()}, raw=True)
            return
        display({"text/plain": plain, "text/html": self.words}, raw=True)
        if draws:
            display(self.figure)


class Page:
    """HTML page that displays itself in a notebook cell, in a frame that keeps its styles apart.

    Attributes:
        source: the whole page, which loads nothing from the network.
        height: of the frame, in pixels.
    """

    def __init__(self, source: str, height: int):
        self.source, self.height = source, height

    def _repr_html_(self) -> str:
        return _FRAME.format(page=html.escape(self.source), height=self.height)

    def __repr__(self) -> str:
        return f"a page of {len(self.source.encode()) / 1e6:.1f} MB: the last line of a notebook's cell shows it"


def cell_of_result(result: Result) -> InCell:
    """Return a result for a cell: findings, its short table, its first figure."""
    model = result.trained.attrs.get("model")
    return _cell(result.measure.question, model, result.findings(), MOST_SENTENCES, compact(result), [result])


def cell_of_report(report: Report) -> InCell:
    """Return a report for a cell: its findings, the table with a row per head, the first figure."""
    first = [*report.headlines(), *report.notes()]
    findings = [*first, *(sentence for sentence in report.findings() if sentence not in first)]
    question = question_of(*(result.measure for result in report.values()))
    return _cell(question, report.provenance.get("model"), findings, len(first), report.frame(), report.values())


def _cell(
    question: str, model: Any, findings: list[str], n_shown: int, table: pd.DataFrame, results: Iterable[Result]
) -> InCell:
    """Return a heading, the first sentences, the others folded below, rows of a table, and the first figure of
    results."""

    def listed(sentences: list[str]) -> str:
        return f"<ul>{''.join(f'<li>{html.escape(sentence)}</li>' for sentence in sentences)}</ul>" if sentences else ""

    parts = [f"<h4>{html.escape(question)} · {html.escape(str(model or 'model'))}</h4>", listed(findings[:n_shown])]
    if more := findings[n_shown:]:
        parts.append(f"<details><summary>{counted(len(more), 'more sentence')}</summary>{listed(more)}</details>")
    if len(table):
        parts.append(table_html(table.head(CELL_ROWS)))
    if len(table) > CELL_ROWS:
        parts.append(f"<p>{len(table) - CELL_ROWS} rows more: .frame()</p>")
    drawn = next((result for result in results if result.kinds), None)
    return InCell("".join(parts), None if drawn is None else drawn.plot())


@cache
def _packed_plotlyjs() -> str:
    """Return plotly's script, compressed to a third, in base64."""
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def _alone(figure: go.Figure) -> str:
    """Return a figure with plotly's script, which loads nothing from the network; of several, the first that is shown
    unpacks the script."""
    layout: Any = figure.layout
    return _CELL_FIGURE.format(
        id=f"tl-posgen-{uuid.uuid4().hex}",
        height=layout.height or 450,
        title=html.escape(str((layout.meta or {}).get("title", ""))),
        figure=_json(to_json_plotly(figure)),
        config=json.dumps(_CONFIG),
        script=_packed_plotlyjs(),
    )
