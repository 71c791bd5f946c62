"""Pictures and prints of an explanation: terms of every key, sources and planes of one; the prompt coloured by each."""

import html
from typing import Any

import numpy as np
import plotly.graph_objects as go
from markupsafe import Markup
from rich.console import Console

from tl_posgen.core.formatting import counted
from tl_posgen.prompt.explanation import Explanation
from tl_posgen.report.circuits import stacked, titled, token_colours
from tl_posgen.report.figures import COLOURS, Panels, plain
from tl_posgen.report.page import InCell, figure_on_page, fill_page, table_on_page
from tl_posgen.report.tables import table_html, title
from tl_posgen.report.terminal import print_frame

_TERM_PATTERNS = {"position": "", "key_part": "/", "query_key": "\\", "interaction": "x"}  # in grey print
_TERM_COLOURS = {"position": "#3b6fb6", "key_part": "#3f9b6b", "query_key": "#9fd3b8", "interaction": "#d1603d"}
_TERM_COLOURS |= {"alibi": "#8b5fa8"}
PARTS = "Terms by key, and those of one key by source and by plane"
MOST_KEYS, MOST_SOURCES, MOST_ROWS, FEW_ROWS = 48, 16, 24, 8
PRINTED_KEYS, PRINTED_TERMS = 12, 8


def _heading(explanation: Explanation) -> tuple[str, str]:
    """Return the title and the subtitle: model, head, query, baseline, reference."""
    attrs = explanation.data.attrs
    title = f"Why {explanation.head} attends from {_quoted(attrs['query_token'])} ({attrs['query']})"
    key, against = attrs["against_key"], attrs["against"]
    subtitle = f"scores less {against if key is None else f'that of key {key}, {_quoted(against)}'}"
    subtitle = "; ".join(filter(None, [subtitle, f"means of {plain(attrs['reference'])}", attrs["note"]]))
    subtitle = f"{subtitle}<br>less the same of another prompt" if "other" in attrs else subtitle
    return f"{title} · {plain(attrs['model'])}", subtitle


def _quoted(token: str) -> str:
    """Return a token as titles and axes of figures show it."""
    return f"“{plain(token.replace(chr(10), '↵'))}”"


def draw_explanation(explanation: Explanation) -> go.Figure:
    """Draw terms of every key, and of the key that stands out its sources and planes, stacked by term."""
    data, key = explanation.data, explanation.stands_out
    shown = sorted(data["score"].to_series().abs().nlargest(MOST_KEYS).index)
    tokens = dict(zip(data["key"].values, data["token"].values, strict=True))
    labels, place = {at: f"{at} {_quoted(tokens[at])}" for at in shown}, f"key {key} {_quoted(tokens[key])}"
    title_of_keys = f"by key ({len(shown)} of {len(tokens)})" if len(shown) < len(tokens) else "by key"
    panels = Panels([title_of_keys, f"{place}, by source of the {data.attrs['side']}", f"{place}, by plane"], columns=1)
    bars = [explanation.frame(("term",)).query("key in @shown").assign(label=lambda rows: rows["key"].map(labels))]
    orders = [list(labels.values())]
    for label in ("source", "plane"):
        rows = explanation.frame(("term", label)).query("key == @key and term != 'alibi'")
        order = list(rows[label].unique())
        if label == "source":
            order = list(rows["contribution"].abs().groupby(rows["source"]).sum().nlargest(MOST_SOURCES).index)
        names = {value: "unrotated" if value == -1 else plain(value) for value in order}
        bars.append(rows.query(f"{label} in @order").assign(label=lambda rows: rows[label].map(names)))  # noqa: B023
        orders.append(list(names.values()))
    for panel, (rows, order) in enumerate(zip(bars, orders, strict=True)):
        for term in rows["term"].unique():
            values = rows.query("term == @term").set_index("label")["contribution"].reindex(order)
            hover = f"%{{x}}, {title(term)}: %{{y:.3f}}<extra></extra>"
            bar = go.Bar(x=order, y=values.values, name=title(term), hovertemplate=hover)
            look = {"color": _TERM_COLOURS.get(term, COLOURS[-1]), "pattern": {"shape": _TERM_PATTERNS.get(term, ".")}}
            panels.add(panel, bar.update(marker=look))
    score = data["score"].sel(key=shown).values
    marks = {"mode": "markers", "marker": {"color": "black", "size": 6, "symbol": "line-ew-open"}}
    template = "%{x}: %{y:.3f}<extra></extra>"
    panels.add(0, go.Scatter(x=orders[0], y=score, name="score", hovertemplate=template, **marks))
    panels.figure.update_layout(barmode="relative", bargap=0.15).update_xaxes(type="category")
    return panels.axes("", "logits").titled(*_heading(explanation))


def colour_terms(explanation: Explanation) -> Any:
    """Return a circuitsvis page with the prompt coloured by the score and by each term, one below the other, on one
    scale."""
    heading, subtitle = _heading(explanation)
    tokens = [str(token) for token in explanation.data["token"].values]
    terms = explanation.frame(("term",)).pivot(index="key", columns="term", values="contribution")
    named = {"score": explanation.data["score"].values}
    named |= {str(name): np.asarray(terms[name]) for name in terms}
    order = ["score", *(name for name in _TERM_COLOURS if name in named)]
    reach = float(np.quantile(abs(np.stack([named[name] for name in order])), 0.98)) or 1.0  # one scale for all
    ends = {"min_value": -reach, "max_value": reach}
    pages = [titled(token_colours(tokens, np.asarray(named[name]), **ends), title(name)) for name in order]
    return stacked(pages, f"<p><b>{heading}</b><br>{subtitle}</p>")


def page_of(explanation: Explanation) -> str:
    """Return an HTML page that loads nothing: the figure, the coloured prompt, and the largest terms."""
    heading, subtitle = _heading(explanation)
    label = "the prompt, coloured by the score and by each term"
    key = explanation.stands_out
    few, most = (
        frame.assign(term=frame["term"].map(title))
        for frame in (explanation.largest(FEW_ROWS, key), explanation.largest(MOST_ROWS))
    )
    contents = [
        {
            "id": "terms",
            "title": "Which terms make the score of each key?",
            "explanation": "Nothing is fitted or left over: the terms of a key add up to its score less the baseline.",
            "figures": [figure_on_page(explanation.plot()) | {"title": PARTS, "subtitle": ""}],  # the page has both
            "views": [{"label": label, "page": Markup(explanation.show().local_src)}],
        },
        {
            "id": "sources",
            "title": f"Which sources write key {key}?",
            "explanation": f"The {len(few)} largest terms of key {key}, by the source that wrote them; folded, the "
            f"{len(most)} largest over all keys.",
            "short": table_on_page(few),
        },
    ]
    sections = [  # each with its table folded, whole
        {"findings": [], "figures": [], "views": [], "table": table_on_page(rows), "rows": len(rows), **content}
        for content, rows in zip(contents, (explanation.table(), most), strict=True)
    ]
    heading_and_subtitle = {"title": Markup(heading), "beside": Markup(subtitle), "findings": []}
    return fill_page(sections, (), explanation.data.attrs, heading_and_subtitle)


def cell_of_explanation(explanation: Explanation) -> InCell:
    """Return an explanation for a notebook's cell: a sentence, the keys of most attention, the figure."""
    table = explanation.table().head(FEW_ROWS).assign(token=lambda rows: rows["token"].map(repr))
    return InCell(f"<p>{html.escape(explanation.sentence())}</p>{table_html(table)}", explanation.plot())


def print_explanation(explanation: Explanation, *, full: bool = False) -> None:
    """Print a table of keys and a table of the largest terms and sources of the key that stands out.

    Args:
        full: print every key and every term.
    """
    console, attrs, key = Console(markup=False), explanation.data.attrs, explanation.stands_out
    against = attrs["against"] if attrs["against_key"] is None else f"key {attrs['against_key']}, {attrs['against']!r}"
    heading = f"{attrs['model']}, {explanation.head}: scores, in logits, of query {attrs['query']}, "
    heading += (
        f"{attrs['query_token']!r}, less {against}{', less the same of the other prompt' if 'other' in attrs else ''}"
    )
    table, terms = explanation.table(), explanation.largest(len(explanation.frame(("term", "source"))), key)
    for frame in (table, terms):
        frame["token"] = [repr(token) for token in frame["token"]]
    named = table["key"].isin([key, attrs["against_key"]])  # shown whatever attention they have
    printed = table if full else table.loc[named | (np.arange(len(table)) < PRINTED_KEYS)]
    print_frame(console, printed, heading)
    token = table.set_index("key")["token"][key]
    name = f"largest terms of key {key}, {token}, in logits, by source of the {attrs['side']}"
    terms = terms.assign(term=terms["term"].map(title)).drop(columns=["key", "token"])
    print_frame(console, terms.head(len(terms) if full else PRINTED_TERMS), name)
    left = len(table) - len(printed)
    if left > 0 and not full:
        print(f"Not shown: {counted(left, 'key')} with less attention; --full shows all.")
    note = f" {attrs['note'][0].upper()}{attrs['note'][1:]}." if attrs["note"] else ""
    print(f"Means of {attrs['reference']}.{note}")
