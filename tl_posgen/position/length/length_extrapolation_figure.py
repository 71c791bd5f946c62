"""The figure of outputs inside and beyond the training length, in the plane of those inside."""

from typing import Any

import numpy as np
import plotly.graph_objects as go

from tl_posgen.core.formatting import format_number
from tl_posgen.report.figures import Panels, drawn_models, line, model_label


def draw_outputs(result: Any) -> go.Figure:
    """Draw outputs on the first two principal components of the unchanged ones inside, coloured by position."""
    models, inside = drawn_models(result), result.measure.inside
    conditions = [str(condition) for condition in result.trained["condition"].values]
    rows = [(side, data.sel(shown_layer=layer)) for side, data, _ in models for layer in data["shown_layer"].values]
    titles = [
        f"{result.measure.in_words(condition)}, layer {int(data['shown_layer'])}<br>{side}: share "
        f"{format_number(float(data['plane_share']), '.0%')}"
        for side, data in rows
        for condition in conditions
    ]
    angle = np.linspace(0, 2 * np.pi, 61)
    ring = line(
        2 * np.cos(angle), 2 * np.sin(angle), "", "black", dash="dot", width=1, hoverinfo="skip", showlegend=False
    )
    panels = Panels(titles, columns=len(conditions), row_height=260)
    for row, (_, data) in enumerate(rows):
        points = data["plane_coordinates"].isel(position=slice(None, None, 2)).stack(point=("prompt", "position"))
        lengths = (points["position"].values + 1) / inside
        for column, condition in enumerate(conditions):
            x, y = points.sel(condition=condition).transpose("axis", "point").values
            marker = {"color": lengths, "coloraxis": "coloraxis", "size": 3, "opacity": 0.7}
            hover = "%{x:.2f}, %{y:.2f}<br>position over the length: %{marker.color:.2f}<extra></extra>"
            look = {"mode": "markers", "marker": marker, "showlegend": False, "hovertemplate": hover}
            panels.add(row * len(conditions) + column, go.Scatter(x=x, y=y, **look), ring)
        reach = max(2.2, 1.1 * float(abs(points).quantile(0.999)))
        panels.figure.update_xaxes(range=[-reach, reach], row=row + 1).update_yaxes(range=[-reach, reach], row=row + 1)
    times = result.trained.sizes["segment"]
    bar = {"title": "position<br>over the length", "thickness": 12, "len": 400, "lenmode": "pixels", "y": 1}
    scale = [(0.0, "#c6dbef"), (1 / times, "#08519c")]  # blue up to the length, red beyond
    scale += [(1 / times, "#fdd0a2"), (1.0, "#a50f15")] if times > 1 else []
    colours = {"colorscale": scale, "cmin": 0, "cmax": times, "colorbar": bar | {"yanchor": "top"}}
    panels.figure.update_layout(coloraxis=colours).update_annotations(font_size=11)
    subtitle = (
        "a layer's outputs, all heads side by side, on the first two principal components of the unchanged model's in "
        "the second half of the training length,<br>in standard deviations there (ring: 2). Blue inside, red beyond. "
        "Share: of the variance inside, in this plane"
    )
    title = f"Outputs inside and beyond the training length · {model_label(result.trained)}"
    return panels.axes("component 1", "component 2").titled(title, subtitle)
