"""Pictures of an explanation: terms of every key, sources and planes of one; the prompt coloured by each."""

from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.models.selection import head_name
from tl_posgen.report.circuits import on_one_line, token_colours
from tl_posgen.report.figures import COLOURS, Panels, plain
from tl_posgen.report.tables import title

ALIBI = "alibi"
_TERM_PATTERNS = {"position": "", "key_part": "/", "query_key": "\\", "interaction": "x"}  # in grey print
_TERM_COLOURS = {"position": "#3b6fb6", "key_part": "#3f9b6b", "query_key": "#9fd3b8", "interaction": "#d1603d"}
_TERM_COLOURS |= {ALIBI: "#8b5fa8"}
MOST_KEYS, MOST_SOURCES = 48, 16


def heading_of(data: xr.Dataset) -> tuple[str, str]:
    """Return the title and the subtitle: model, head, query, baseline, reference."""
    attrs, head = data.attrs, head_name(data.attrs["layer"], data.attrs["head"])
    title = f"Why {head} attends from {_quoted(attrs['query_token'])} ({attrs['query']})"
    key, against = attrs.get("against_key"), attrs["against"]
    subtitle = f"scores less {against if key is None else f'that of key {key}, {_quoted(against)}'}"
    subtitle = "; ".join(filter(None, [subtitle, f"means of {plain(attrs['reference'])}", attrs["note"]]))
    subtitle = f"{subtitle}<br>less the same of another prompt" if "other" in attrs else subtitle
    return f"{title} · {plain(attrs['model'])}", subtitle


def _quoted(token: str) -> str:
    """Return a token as titles and axes of figures show it."""
    return f"“{plain(on_one_line(token))}”"


def draw_explanation(explanation: Any) -> go.Figure:
    """Draw terms of every key, and of the key that stands out its sources and planes, stacked by term."""
    data, key = explanation.trained, explanation.key
    always = [at for at in (key, data.attrs.get("against_key")) if at is not None]  # the largest, and these
    sizes = data["score"].to_series().abs()
    shown = sorted({*always, *sizes.drop(always).nlargest(MOST_KEYS - len(set(always))).index})
    tokens = dict(zip(data["key"].values, data["token"].values, strict=True))
    labels, place = {at: f"{at} {_quoted(tokens[at])}" for at in shown}, f"key {key} {_quoted(tokens[key])}"
    titles = ["by key", f"{place}, by source of the {data.attrs['side']}", f"{place}, by plane"]
    for panel, (n, of) in enumerate([(len(shown), len(tokens)), (MOST_SOURCES, data.sizes["source"])]):
        titles[panel] += f" (the largest, {n} of {of})" if n < of else ""
    panels = Panels(titles, columns=1)
    bars = [explanation.frame(("term",)).query("key in @shown").assign(label=lambda rows: rows["key"].map(labels))]
    orders = [list(labels.values())]
    for label in ("source", "plane"):
        rows = explanation.frame(("term", label), key).query("term != @ALIBI")
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
    return panels.axes("", "logits").titled(*heading_of(data))


def shown_terms(data: xr.Dataset) -> list[str]:
    """Return score and terms, in the order of pictures and tables."""
    return ["score", *data["term"].values.tolist(), *([ALIBI] if ALIBI in data else [])]


def colour_tokens(data: xr.Dataset, example: int) -> Any:
    """Return a circuitsvis page with the prompt coloured by the score or by one term; all are on one scale."""
    terms = data["contribution"].sum(("plane", "source"))
    values = np.stack([data["score"], *terms.transpose("term", "key"), *([data[ALIBI]] if ALIBI in data else [])])
    reach = float(np.quantile(abs(values), 0.98)) or 1.0
    tokens = [str(token) for token in data["token"].values]
    return token_colours(tokens, values[example], min_value=-reach, max_value=reach)
