"""Figures of slash heads on text beside random tokens: scores of all heads, attention of the strongest."""

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.core.measure import HEAD
from tl_posgen.models.selection import head_name
from tl_posgen.report.figures import Panels, colour_axis, equality, model_label, sides, token_map
from tl_posgen.report.head_figures import head_points
from tl_posgen.slash.layer_means import examples

SOURCES = ("natural", "random")
KEYS = {"all": "all keys", "without first": "first token left out"}
N_PANELS = 5  # distances drawn in one row
N_HEADS = 2  # whose attention is drawn; of the random init the strongest


def scatter(result: Any) -> go.Figure:
    """Draw random tokens against text, a point a head: a column a distance, a row with and without the first token."""
    own, distances = result.numbers, result.own["short_distance"].values[:N_PANELS].tolist()
    places, titles = list(product(KEYS, distances)), []
    for tokens, distance in places:
        r, rho = (own(name, tokens=tokens, short_distance=distance) for name in ("pearson", "spearman"))
        random = f" (random init {r.of_inits.value:.2f})" if own.inits else ""
        titles.append(f"D = {distance}: r {r.value:.2f}{random}<br>ρ {rho.value:.2f}")
    panels = Panels(titles, columns=len(distances), horizontal_spacing=0.04)
    for panel, (tokens, distance) in enumerate(places):
        at = {"tokens": tokens, "distance": distance}
        for side, data, colour in sides(result):
            heads = data["score"].sel(at).stack(place=HEAD).dropna("place")
            look = {"color": colour, "size": 7, "symbol": "x-thin-open" if data is not result.own else "circle"}
            hover = f"D = {distance}<br>text %{{x:.3f}}, random tokens %{{y:.3f}}"
            text, random_tokens = (heads.sel(source=source) for source in SOURCES)
            panels.add(panel, head_points(text, random_tokens, hover, name=side, marker=look))
        panels.add(panel, equality(float(result.own["score"].sel(at).max())))
    for row, words in enumerate(KEYS.values(), start=1):
        panels.figure.update_yaxes(title_text=f"random tokens<br>{words}", row=row, col=1)
    panels.figure.update_xaxes(title_text="on text", row=2).update_annotations(font_size=11)
    subtitle = "a point a head, a column a distance D; r: Pearson over heads, ρ: Spearman; dotted: equal"
    return panels.finish(f"Slash scores in and out of distribution · {model_label(result.own)}", subtitle)


def maps(result: Any) -> go.Figure:
    """Draw the attention of the strongest heads on text and on random tokens; below, the random init's strongest."""
    rows = [
        (side, one, number)
        for side, data, _ in sides(result)
        for number, one in enumerate(examples(data)[: 1 if data is not result.own else N_HEADS])
    ]
    titles = [map_title(side, one, source) for side, one, _ in rows for source in SOURCES]
    panels = Panels(titles, columns=2, row_height=480, horizontal_spacing=0.08)
    for row, (_, one, number) in enumerate(rows):
        patterns = one["pattern"].isel(example=number).transpose("source", "query", "key")
        seen = patterns.where(np.tri(*patterns.shape[1:], dtype=bool))
        for column, source in enumerate(SOURCES):
            panels.add(2 * row + column, token_map(seen.sel(source=source)).update(coloraxis="coloraxis"))
    panels.figure.update_yaxes(type="linear", autorange="reversed").update_xaxes(type="linear")
    panels.figure.update_layout(coloraxis=colour_axis(0.0, 1.0))
    return panels.axes("key position", "query position").finish(
        f"Slash heads on text and on random tokens · {model_label(result.own)}",
        "attention, first tokens of the first prompt and of random tokens in its place; slash scores: means over all "
        "prompts",
    )


def map_title(side: str, one: xr.Dataset, source: str) -> str:
    """Return the title of one head's attention."""
    text, score = "text" if source == "natural" else "random tokens", one["best_score"].sel(source=source, tokens="all")
    place = f"{head_name(one['layer'], one['head'])} on {text}"
    return f"{place}: slash score {float(score):.3f} at D = {int(one['best_distance'])} · {side}"


FIGURES: Mapping[str, Callable[[Any], go.Figure]] = {"scatter": scatter, "maps": maps}
