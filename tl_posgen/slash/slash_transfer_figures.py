"""Figures of slash heads on text and on random tokens: scores of all heads, attention of the strongest."""

from itertools import product
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.report.figures import Panels, colour_axis, equality, model_label, sides, token_map
from tl_posgen.slash.head_groups import head_points
from tl_posgen.slash.layer_means import SUFFIXES, examples

SOURCES = ("natural", "random")
TOKENS = {"all": "all keys", "without_first_token": "first token left out"}
N_PANELS = 5  # distances drawn in one row
N_HEADS = 2  # heads whose attention is drawn; of the random init only the strongest


def scatter(result: Any) -> go.Figure:
    """Draw scores on random tokens against scores on text: a column per distance, a row per choice of tokens."""
    own, null, distances = result.summary, result.null_summary, result.summary["distances"][:N_PANELS]
    places = list(product(SUFFIXES.values(), distances))
    titles = []
    for place, (end, distance) in enumerate(places):
        r, rho = (own[f"{name}{end}"][place % len(distances)] for name in ("pearson", "spearman"))
        random = "" if null is None else f" (random init {null[f'pearson{end}'][place % len(distances)]:.2f})"
        titles.append(f"D = {distance}: r {r:.2f}{random}<br>ρ {rho:.2f}")
    panels = Panels(titles, columns=len(distances), horizontal_spacing=0.04)
    for panel, (end, distance) in enumerate(places):
        for side, data, colour in sides(result):
            heads = data[f"score{end}"].sel(distance=distance).to_dataset("source").stack(place=("layer", "head"))
            look = {"color": colour, "size": 7, "symbol": "x-thin-open" if data is result.null else "circle"}
            hover = f"D = {distance}<br>text %{{x:.3f}}, random tokens %{{y:.3f}}"
            panels.add(panel, head_points(heads.dropna("place"), *SOURCES, hover, name=side, marker=look))
        panels.add(panel, equality(float(result.dataset[f"score{end}"].sel(distance=distance).max())))
    for row, tokens in enumerate(TOKENS.values(), start=1):
        panels.figure.update_yaxes(title_text=f"random tokens<br>{tokens}", row=row, col=1)
    panels.figure.update_xaxes(title_text="on text", row=2).update_annotations(font_size=11)
    subtitle = "a point a head, a column a distance D; r: Pearson over heads, ρ: Spearman; dotted: equal"
    return panels.finish(f"Slash scores in and out of distribution · {model_label(result.dataset)}", subtitle)


def maps(result: Any) -> go.Figure:
    """Draw attention of the strongest heads on text and on random tokens; the random init's strongest head below."""
    rows = [
        (side, one, number)
        for side, data, _ in sides(result)
        for number, one in enumerate(examples(data)[: 1 if data is result.null else N_HEADS])
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
        f"Slash heads on text and on random tokens · {model_label(result.dataset)}",
        "attention, first tokens of the first prompt and of random tokens in its place; slash scores: means over all "
        "prompts",
    )


def map_title(side: str, one: xr.Dataset, source: str) -> str:
    text, score = ("text" if source == "natural" else "random tokens"), float(one[source])
    place = f"L{int(one['layer'])}H{int(one['head'])} on {text}"
    return f"{place}: slash score {score:.3f} at D = {int(one['best_distance'])} · {side}"


FIGURES = {"scatter": scatter, "maps": maps}
