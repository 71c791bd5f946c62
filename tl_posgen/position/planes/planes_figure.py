"""The figure of phases: where each plane of a head's queries and keys points, and how steadily."""

from itertools import product
from typing import Any

import numpy as np
import plotly.graph_objects as go

from tl_posgen.models.selection import head_name
from tl_posgen.position.planes.numbers.plane_patterns import PARTS
from tl_posgen.report.figures import MARKS, Panels, drawn_models, model_label

SIDES = {"q": "queries", "k": "keys"}
_SYMBOLS = {"q": "circle", "k": "diamond-open"}


def draw_phases(result: Any) -> go.Figure:
    """Draw the heads with the largest share of each part, one marker per plane, its angle the mean phase."""
    highest = {part: result.numbers.extreme("share", part=part) for part in PARTS}
    chosen = {part: (extreme.layer, extreme.head) for part, extreme in highest.items() if extreme.number}
    models = [(side, data.sel(tokens="without first")) for side, data, _ in drawn_models(result)]
    places = [*product(models, chosen.items())]
    titles = [
        f"{f'most {part}: ' * (side == models[0][0])}{head_name(*at)} · {side}" for (side, _), (part, at) in places
    ]
    polar = [[{"type": "polar"}] * len(chosen)] * len(models)
    panels = Panels(titles, columns=len(chosen), row_height=320, specs=polar, vertical_spacing=0.14)
    for number, ((_, data), (_, (layer, head))) in enumerate(places):
        of_head = data.sel(layer=layer, head=head)
        of_head = of_head.isel(plane=np.isfinite(of_head["wavelength"].values))  # the unrotated rest has no phase
        for side, name in SIDES.items():
            marker = {
                "color": np.log10(of_head["wavelength"].values),
                "coloraxis": "coloraxis",
                "symbol": _SYMBOLS[side],
                "size": 9,
            }
            markers = go.Scatterpolar(
                r=of_head["concentration"].sel(side=side).values,
                theta=np.degrees(of_head["phase"].sel(side=side).values),
                mode="markers",
                marker=marker | {"line": {"width": 0 if side == "q" else 2}},
                text=[f"{name}, wavelength {wavelength:.4g}" for wavelength in of_head["wavelength"].values],
                hovertemplate="%{text}<br>concentration %{r:.3f}, %{theta:.0f}°<extra></extra>",
                name=name,
            )
            panels.add(number, markers)
    angles = {"thetaunit": "radians", "dtick": np.pi / 2}
    panels.figure.update_polars(angularaxis=angles, radialaxis={"nticks": 4, "angle": 45, "range": [0, 1.03]})
    finite = np.log10(result.trained["wavelength"].values[np.isfinite(result.trained["wavelength"].values)])
    ticks = np.arange(np.floor(finite.min()), np.ceil(finite.max()) + 1)
    bar = {"title": "wavelength", "thickness": 12, "tickvals": ticks, "ticktext": [f"{10**t:,.0f}" for t in ticks]}
    colours = {"colorscale": MARKS, "cmin": finite.min(), "cmax": finite.max(), "colorbar": bar}
    panels.figure.update_layout(coloraxis=colours, showlegend=False)
    panels.figure.update_annotations(font_size=11, yshift=16)
    subtitle = (
        "one marker a plane, filled of queries, open of keys: angle = mean phase before RoPE, radius = concentration; "
        "first token left out"
    )
    title = f"Phases of queries and keys · {model_label(result.trained)}"
    figure: Any = panels.titled(title, subtitle)
    return figure.update_layout(margin_t=figure.layout.margin.t + 20)  # labels of angles
