"""Figures of RoPE's planes: phases of queries and keys, magnitude by wavelength, and shares of each plane."""

from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.models.selection import head_name
from tl_posgen.position.planes.numbers.plane_patterns import PARTS
from tl_posgen.report.figures import MARKS, Panels, colour_axis, colours_of, heat, model_label, sides
from tl_posgen.report.head_figures import curve, head_rows, said_of_rows

OUT = "first token left out"
MARKERS = {"q": ("queries", "circle"), "k": ("keys", "diamond-open")}
NEVER = 10  # a plane that does not rotate is drawn at this multiple of the longest wavelength


def phases(result: Any) -> go.Figure:
    """Draw the heads with the largest share of each part, one marker per plane, its angle the mean phase."""
    highest = {part: result.numbers.extreme("share", part=part) for part in PARTS}
    chosen = {part: (one.layer, one.head) for part, one in highest.items() if one.number}
    both = _sides_without_first(result)
    titles = [f"most {part}: {head_name(*place)} · {both[0][0]}" for part, place in chosen.items()]
    titles += [f"{head_name(*place)} · {side}" for side, *_ in both[1:] for place in chosen.values()]
    polar = [[{"type": "polar"}] * len(chosen)] * len(both)
    panels = Panels(titles, columns=len(chosen), row_height=320, specs=polar, vertical_spacing=0.14)
    for row, (_, data, _) in enumerate(both):
        for column, (layer, head) in enumerate(chosen.values()):
            one = data.sel(layer=layer, head=head)
            one = one.isel(plane=np.isfinite(one["wavelength"].values))  # the unrotated rest has no phase
            for side, (name, symbol) in MARKERS.items():
                marker = {"color": np.log10(one["wavelength"].values), "coloraxis": "coloraxis", "symbol": symbol}
                markers = go.Scatterpolar(
                    r=one["concentration"].sel(side=side).values,
                    theta=np.degrees(one["phase"].sel(side=side).values),
                    mode="markers",
                    marker=marker | {"size": 9, "line": {"width": 0 if side == "q" else 2}},
                    text=[f"{name}, wavelength {wavelength:.4g}" for wavelength in one["wavelength"].values],
                    hovertemplate="%{text}<br>concentration %{r:.3f}, %{theta:.0f}°<extra></extra>",
                    name=name,
                )
                panels.add(row * len(chosen) + column, markers)
    angles = {"thetaunit": "radians", "dtick": np.pi / 2}
    panels.figure.update_polars(angularaxis=angles, radialaxis={"nticks": 4, "angle": 45, "range": [0, 1.03]})
    finite = np.log10(result.own["wavelength"].values[np.isfinite(result.own["wavelength"].values)])
    ticks = np.arange(np.floor(finite.min()), np.ceil(finite.max()) + 1)
    bar = {"title": "wavelength", "thickness": 12, "tickvals": ticks, "ticktext": [f"{10**t:,.0f}" for t in ticks]}
    colours = {"colorscale": MARKS, "cmin": finite.min(), "cmax": finite.max(), "colorbar": bar}
    panels.figure.update_layout(coloraxis=colours, showlegend=False)
    panels.figure.update_annotations(font_size=11, yshift=16)
    subtitle = (
        "one marker a plane, filled of queries, open of keys: angle = mean phase before RoPE, radius = concentration; "
        f"{OUT}"
    )
    title = f"Phases of queries and keys · {model_label(result.own)}"
    return panels.finish(title, subtitle).update_layout(margin={"t": 120})


def magnitude(result: Any) -> go.Figure:
    """Draw the mean length of queries and of keys in each plane by wavelength, one line per layer, mean over heads."""
    dataset = result.own
    both, layers, still = _sides_without_first(result), dataset["layer"].values, np.isinf(dataset["wavelength"])
    drawn = dataset["wavelength"].where(~still, NEVER * dataset["wavelength"].where(~still).max("plane"))
    titles = [f"{name} · {side}" for side, *_ in both for name, _ in MARKERS.values()]
    panels = Panels(titles, columns=2, row_height=250, shared_yaxes="columns")
    for row, (_, data, _) in enumerate(both):
        for column, (side, (name, _)) in enumerate(MARKERS.items()):
            values = data["magnitude"].sel(side=side).mean("head")
            for layer, colour in zip(layers, colours_of(len(layers)), strict=True):
                x, y = drawn.sel(layer=layer).values, values.sel(layer=layer).values
                order = np.argsort(x)
                trace = curve(x[order], y[order], layer, f"layer {layer}", colour, "wavelength")
                hover = f"{name}, layer {layer}<br>wavelength %{{x:.4g}}: %{{y:.3f}}<extra></extra>"
                panels.add(2 * row + column, trace | {"mode": "lines+markers", "hovertemplate": hover})
    panels.axes("wavelength 2 pi / theta, tokens", "mean |z|, mean over heads", log_x=True)
    panels.figure.update_xaxes(exponentformat="power").update_yaxes(rangemode="tozero")
    subtitle = f"length of queries and keys in each plane, before RoPE; {OUT}"
    if still.any():
        subtitle += f"; what never turns stands {NEVER} times beyond the longest wavelength"
    return panels.finish(f"Magnitude by wavelength · {model_label(dataset)}", subtitle)


def shares(result: Any) -> go.Figure:
    """Draw the share of each plane in the variance of the position part and of the content part, one row per head; of
    many heads, one per layer."""
    dataset = result.own
    both, names = _sides_without_first(result), ("position", "content")
    titles = [f"{name} · {side}" for side, *_ in both for name in names]
    rows = []
    for _, data, _ in both:
        ordered = data.isel(plane=np.argsort(data["wavelength"].min("layer").values))
        labels = plane_labels(ordered["wavelength"])
        for name in names:
            shown = ordered["share_by_plane"].sel(part=name, drop=True)
            rows.append(head_rows(shown.assign_coords(plane=labels).rename(plane="wavelength"), "wavelength"))
    panels = Panels(titles, columns=2, row_height=max(220, min(11 * len(rows[0]), 900)), horizontal_spacing=0.09)
    for panel, one in enumerate(rows):
        panels.add(panel, heat(one))
    panels.axes("wavelength of the plane, tokens").figure.update_xaxes(type="category")
    panels.figure.update_yaxes(type="category", autorange="reversed").update_layout(coloraxis=colour_axis(0.0, 1.0))
    subtitle = f"share of each plane in the variance of the head's position part and content part; {OUT}"
    subtitle += said_of_rows(rows[0])
    return panels.finish(f"What each plane carries · {model_label(dataset)}", subtitle)


def _sides_without_first(result: Any) -> list[tuple[str, xr.Dataset, str]]:
    """Return the model and its first random init, the first token left out."""
    return [(side, data.sel(tokens="without first", drop=True), colour) for side, data, colour in sides(result)]


def plane_labels(wavelength: xr.DataArray) -> list[str]:
    """Return the wavelengths as labels; plane numbers where layers differ.

    Planes with the same wavelength (inf: not rotated) are numbered.
    """
    if bool((wavelength.max("layer") != wavelength.min("layer")).any()):
        return [f"plane {plane}" for plane in wavelength["plane"].values]
    values = wavelength.min("layer").values
    names = [f"{value:.3g}" if value < 1000 else f"{value:.0f}" for value in values]
    return [name if names.count(name) == 1 else f"{name} ({plane})" for plane, name in enumerate(names)]
