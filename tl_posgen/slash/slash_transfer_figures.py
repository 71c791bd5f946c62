"""Figures of slash heads on text beside random tokens: scores of all heads, attention of the strongest."""

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.models.selection import head_name
from tl_posgen.report.figures import Panels, colour_axis, model_label, sides, token_map
from tl_posgen.report.kinds import points
from tl_posgen.slash.layer_means import examples

SOURCES = ("natural", "random")
KEYS = {"all": "all keys", "without first": "first token left out"}
N_PANELS = 5  # distances drawn in one row
N_HEADS = 2  # whose attention is drawn; of the random init the strongest


def scatter_panels(result: Any) -> Mapping[str, Mapping[str, Any]]:
    """Return a panel a distance, with and without the first token, titled by its correlations over heads."""
    own, panels = result.numbers, {}
    for tokens, distance in product(KEYS, result.own["short_distance"].values[:N_PANELS].tolist()):
        r, rho = (own(name, tokens=tokens, short_distance=distance) for name in ("pearson", "spearman"))
        random = f" (random init {r.of_inits.value:.2f})" if own.inits else ""
        title = f"D = {distance}: r {r.value:.2f}{random}<br>ρ {rho.value:.2f}, {KEYS[tokens]}"
        panels[title] = {"tokens": tokens, "distance": distance}
    return panels


scatter = points(
    ("score", {"source": "natural"}),
    ("score", {"source": "random"}),
    scatter_panels,
    title="Slash scores in and out of distribution",
    subtitle="a panel a distance D; r: Pearson over heads, ρ: Spearman",
    x_title="on text",
    y_title="on random tokens",
    equal=True,
    columns=N_PANELS,
)


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
