"""Figures beyond the training length: loss, drift of the outputs, entropy and normaliser."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.core.formatting import format_number
from tl_posgen.core.numbers import interval_of
from tl_posgen.report.figures import COLOURS, NULL_COLOUR, Panels, line, line_with_intervals, model_label, sides

WORDS = {
    "vanilla": "unchanged",
    "lm_infinite": "LM-Infinite",
    "retrieval": "block retrieval",
    "interpolation": "position interpolation",
}
ATTENTION = ("entropy", "normaliser")
DASHES = ("solid", "dash", "dot", "dashdot")
DRIFTS = {
    "frechet": "Frechet distance / noise level",
    "mahalanobis": "Mahalanobis, of the inside's",
    "norm_ratio": "norm, of the inside's",
}


def _draw_loss(result: Any) -> go.Figure:
    """Draw the loss by position with intervals, one panel per model and one colour per condition."""
    both = sides(result)
    panels = Panels([side for side, *_ in both], columns=2, row_height=280)
    for panel, (_, data, _) in enumerate(both):
        for number, condition in enumerate(str(condition) for condition in data["condition"].values):
            ends = interval_of(data["loss"].sel(condition=condition))
            panels.add(panel, line_with_intervals(data["bin"].values, ends, WORDS[condition], COLOURS[number]))
    _mark_length(panels, result)
    subtitle = "bars: 95 % intervals over prompts; the axes differ"
    title = f"Loss beyond {_length_of(result)} · {model_label(result.own)}"
    return panels.axes("position", "loss, nats per token").finish(title, subtitle)


def _draw_drift(result: Any) -> go.Figure:
    """Draw the drift of outputs from their distribution inside the training length by segment, median over heads."""

    def median(data: xr.Dataset, name: str) -> xr.DataArray:
        values = data[name] / data["noise_level"] if name == "frechet" else data[name]
        return values.median(("layer", "head"))

    panels = Panels(list(DRIFTS.values()), columns=3, row_height=280)
    for panel, name in enumerate(DRIFTS):
        panels.add(panel, *_curves(result, "segment", partial(median, name=name), mode="lines+markers"))
        note: Any = {"annotation_text": "noise level" if name == "frechet" else "no drift", "row": 1, "col": panel + 1}
        panels.figure.add_hline(y=1, line_dash="dot", **note)
    panels.axes(f"segment of {result.measure.inside:,} tokens").figure.update_xaxes(dtick=1)
    subtitle = (
        f"outputs o of each head against those of the unchanged model inside {_length_of(result)}; median over heads; "
        "random init in grey"
    )
    return panels.finish(f"Drift of the outputs · {model_label(result.own)}", subtitle)


def _draw_attention(result: Any) -> go.Figure:
    """Draw entropy and normaliser by position, mean over heads."""
    panels = Panels(["entropy, nats", "normaliser, ln sum exp"], columns=2, row_height=280)
    for panel, name in enumerate(ATTENTION):
        panels.add(panel, *_curves(result, "bin", lambda data, name=name: data[name].mean(("layer", "head"))))
    _mark_length(panels, result)
    title = f"Attention beyond {_length_of(result)} · {model_label(result.own)}"
    return panels.axes("position").finish(title, "mean over heads; random init in grey")


def _draw_outputs(result: Any) -> go.Figure:
    """Draw outputs on the first two principal components of the unchanged ones inside, coloured by position."""
    both, inside = sides(result), result.measure.inside
    conditions = [str(condition) for condition in result.own["condition"].values]
    rows = [(side, data.sel(shown_layer=layer)) for side, data, _ in both for layer in data["shown_layer"].values]
    titles = [_plane_title(side, data, condition) for side, data in rows for condition in conditions]
    panels = Panels(titles, columns=len(conditions), row_height=260)
    for row, (_, data) in enumerate(rows):
        points = data["plane_coordinates"].isel(position=slice(None, None, 2)).stack(point=("prompt", "position"))
        lengths = (points["position"].values + 1) / inside
        for column, condition in enumerate(conditions):
            x, y = points.sel(condition=condition).transpose("axis", "point").values
            marker = {"color": lengths, "coloraxis": "coloraxis", "size": 3, "opacity": 0.7}
            hover = "%{x:.2f}, %{y:.2f}<br>position over the length: %{marker.color:.2f}<extra></extra>"
            look = {"mode": "markers", "marker": marker, "showlegend": False, "hovertemplate": hover}
            panels.add(row * len(conditions) + column, go.Scatter(x=x, y=y, **look), _circle(2))
        reach = max(2.2, 1.1 * float(abs(points).quantile(0.999)))
        panels.figure.update_xaxes(range=[-reach, reach], row=row + 1).update_yaxes(range=[-reach, reach], row=row + 1)
    times = result.own.sizes["segment"]
    bar = {"title": "position<br>over the length", "thickness": 12, "len": 400, "lenmode": "pixels", "y": 1}
    colours = {"colorscale": _scale(times), "cmin": 0, "cmax": times, "colorbar": bar | {"yanchor": "top"}}
    panels.figure.update_layout(coloraxis=colours).update_annotations(font_size=11)
    subtitle = (
        "a layer's outputs, all heads side by side, on the first two principal components of the unchanged model's in "
        f"the second half of {_length_of(result)},<br>in standard deviations there (ring: 2). Blue inside, red beyond. "
        "Share: of the variance inside, in this plane. Off: how far the centroid beyond is"
    )
    title = f"Outputs inside and beyond {_length_of(result)} · {model_label(result.own)}"
    return panels.axes("component 1", "component 2").finish(title, subtitle).update_layout(margin_t=125)


def _plane_title(side: str, data: xr.Dataset, condition: str) -> str:
    """Return the title of one panel: condition, layer, share of the variance, and distance of the centroid."""
    offsets = data["plane_offset"].sel(condition=condition).isel(segment=slice(1, None))
    off = format_number(float(offsets.mean()) if offsets.size else None, ".2f")
    share = format_number(float(data["plane_share"]), ".0%")
    return f"{WORDS[condition]}, layer {int(data['shown_layer'])}<br>{side}: share {share}, off {off}"


def _circle(radius: int | float) -> go.Scatter:
    angle = np.linspace(0, 2 * np.pi, 61)
    x, y = radius * np.cos(angle), radius * np.sin(angle)
    return line(x, y, "", "black", dash="dot", width=1, hoverinfo="skip", showlegend=False)


def _scale(times: int) -> list[tuple[float, str]]:
    """Return a colour scale: blue up to the length, red beyond."""
    blues = [(0.0, "#c6dbef"), (1 / times, "#08519c")]
    return blues + ([(1 / times, "#fdd0a2"), (1.0, "#a50f15")] if times > 1 else [])


def _curves(result: Any, along: str, reduce: Callable[[xr.Dataset], xr.DataArray], **look: Any) -> list[go.Scatter]:
    """Return one line per condition; the random init's are grey, with a dash style per condition."""
    traces = []
    for side, data, _ in reversed(sides(result)):
        is_null = data is not result.own
        for number, condition in enumerate(str(condition) for condition in data["condition"].values):
            values = reduce(data.sel(condition=condition))
            name = f"{side}, {WORDS[condition]}" if is_null else WORDS[condition]
            style: dict[str, Any] = {"dash": DASHES[number % len(DASHES)], "opacity": 0.7} if is_null else {}
            x = values[along].values + (1 if along == "segment" else 0)
            traces.append(line(x, values.values, name, NULL_COLOUR if is_null else COLOURS[number], **style, **look))
    return traces


def _length_of(result: Any) -> str:
    """Return the length that prompts went beyond, in words."""
    return in_training_lengths(result.measure.inside, result.own.attrs)


def in_training_lengths(inside: int, attrs: Mapping[str, Any]) -> str:
    """Return a length beside the training length, where it is another.

    Example:
        >>> in_training_lengths(256, {"training_length": 8192})
        '256 tokens (trained on 8,192)'
    """
    trained = attrs.get("training_length", inside)
    return "the training length" if inside == trained else f"{inside:,} tokens (trained on {trained:,})"


def _mark_length(panels: Panels, result: Any) -> None:
    note: Any = {"annotation_text": _length_of(result).removeprefix("the "), "annotation_font_size": 10}
    panels.figure.add_vline(x=result.measure.inside, line_dash="dash", line_color=NULL_COLOUR, **note)


FIGURES = {"loss": _draw_loss, "drift": _draw_drift, "outputs": _draw_outputs, "attention": _draw_attention}
