"""The figure of a slash toy's attention over training: one prompt at the steps that are kept."""

from itertools import product
from typing import Any

import plotly.graph_objects as go

from tl_posgen.report.figures import Panels, colour_axis, heat

DESCRIPTION = "slash toy, D = {distance}, planes: {planes}"  # options of the measure


def draw_maps(result: Any) -> go.Figure:
    """Draw small multiples: a row for each kind of features, a column a snapshot; the first seed."""
    data = result.trained
    places = list(product(data["features"].values, data["snapshot"].values))
    titles = [f"step {step}" + ("" if kind == "trained" else ", unseen") for kind, step in places]
    panels = Panels(titles, columns=data.sizes["snapshot"], row_height=190, horizontal_spacing=0.01)
    for number, (kind, step) in enumerate(places):
        panels.add(number, heat(data["pattern"].isel(seed=0).sel(features=kind, snapshot=step, drop=True)))
    panels.figure.update_xaxes(showticklabels=False).update_yaxes(showticklabels=False, autorange="reversed")
    panels.figure.update_layout(coloraxis=colour_axis(0.0, 1.0)).update_annotations(font_size=11)
    subtitle = f"attention of one prompt, queries down, keys across; seed {data['seed'].values[0]}"
    return panels.titled(f"Attention over training · {DESCRIPTION.format(**result.measure.options())}", subtitle)
