"""Figures of perturbed planes: loss against strength, by frequency band, and by plane against the plane's shares."""

from itertools import product
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.core.formatting import format_number
from tl_posgen.core.numbers import interval_of
from tl_posgen.position.planes.planes_figures import plane_labels
from tl_posgen.report.figures import (
    COLOURS,
    NULL_COLOUR,
    SCALE,
    Panels,
    error_bars,
    heat,
    line_with_intervals,
    model_label,
)

WORDS = {
    "shuffle_magnitudes": "shuffled magnitudes",
    "shuffle_phases": "shuffled phases",
    "shuffle_positions": "shuffled positions",
    "mean_magnitude": "mean magnitude",
    "mean_phase": "mean phase",
    "phase_noise": "phase noise",
}
SIDES = {"q": COLOURS[1], "k": COLOURS[2], "both": COLOURS[0]}
SHARES = {"position": "share in position", "content": "share in content", "energy": "share of its layer's energy"}
RISE = "rise of the loss, nats"
ROTATION = "random rotation of equal energy"


def curves(result: Any) -> go.Figure:
    """Draw the rise of the loss against strength, one panel per edit: q, k, both, the control, and random init."""
    data = result.own
    panels = Panels([WORDS[edit] for edit in data["edit"].values], columns=3, shared_yaxes=True)
    for panel, edit in enumerate(data["edit"].values):
        of_edit = data.sel(edit=edit)
        if result.null is not None:
            null = result.null.sel(edit=edit, of="both", cost="edit")
            panels.add(panel, _against_strength(null, model_label(result.null), NULL_COLOUR))
        for of, colour in SIDES.items():
            panels.add(panel, _against_strength(of_edit.sel(of=of, cost="edit"), of, colour))
        control = of_edit.sel(of="both", cost="control")
        panels.add(panel, _against_strength(control, f"both: {ROTATION}", "black", dash="dot"))
    panels.axes("strength", RISE)
    subtitle = (
        "all planes of all layers, first token as it is; 95 % intervals over prompts; phase noise of strength 1 has a "
        "standard deviation of pi radians"
    )
    return panels.finish(f"Queries and keys perturbed in RoPE's planes · {model_label(data)}", subtitle)


def _against_strength(data: xr.Dataset, name: str, colour: str, dash: str = "solid") -> go.Scatter:
    """Return one curve with its interval from strength 0, where nothing changes."""
    x, *ends = (np.insert(one.values, 0, 0.0) for one in (data["strength"], *interval_of(data["rise"])))
    return line_with_intervals(x, ends, name, colour, dash=dash)


def bands(result: Any) -> go.Figure:
    """Draw the rise of the loss with a third of the planes of all layers perturbed, one panel per edit."""
    data = result.own
    panels = Panels([WORDS[edit] for edit in data["edit"].values], columns=3, shared_yaxes=True)
    shown = [("q and k", data, "edit", COLOURS[0]), (ROTATION, data, "control", COLOURS[1])]
    if result.null is not None:
        shown.append((model_label(result.null), result.null, "edit", NULL_COLOUR))
    for panel, edit in enumerate(data["edit"].values):
        for name, one, cost, colour in shown:
            rise, *ends = (end.values for end in interval_of(one["band_rise"].sel(edit=edit, cost=cost)))
            bar = go.Bar(x=one["band"].values, y=rise, name=name, marker_color=colour, error_y=error_bars(rise, *ends))
            panels.add(panel, bar)
    panels.axes("third of the planes, by frequency", RISE)
    subtitle = "full strength, all layers, first token as it is; 95 % intervals over prompts"
    return panels.finish(f"Which frequencies does it cost? · {model_label(data)}", subtitle)


def cost_map(result: Any) -> go.Figure:
    """Draw maps of layer x plane: the cost of each edit, the cost of its control, and the shares of the plane.

    Each edit has one colour scale from minus to plus its largest cost, given in the title; each share has its own.
    """
    data, edits = result.own, [str(edit) for edit in result.own["map_edit"].values]
    sides = [("", data, "edit"), ("equal-energy rotation: ", data, "control")]
    sides += [] if result.null is None else [(f"{model_label(result.null)}: ", result.null, "edit")]
    n_columns = max(len(edits), len(SHARES))
    most = {edit: float(abs(data["map_rise"].sel(map_edit=edit).mean("prompt")).max()) for edit in edits}
    top = {share: float(data["share"].sel(part=share).max()) for share in SHARES}
    rows = [[f"{words}{WORDS[edit]}, ±{most[edit]:.3f}" for edit in edits] for words, *_ in sides]
    rows.append([f"{words}, up to {top[share]:.2f}" for share, words in SHARES.items()])
    titles = [title for row in rows for title in (*row, *[""] * (n_columns - len(row)))]
    height = max(170, min(24 * data.sizes["layer"] + 80, 540))
    panels = Panels(titles, columns=n_columns, row_height=height, horizontal_spacing=0.05)
    for row, (_, one, cost) in enumerate(sides):
        for column, edit in enumerate(edits):
            shown = heat(_labelled(one["map_rise"].sel(map_edit=edit, cost=cost).mean("prompt"), data))
            scale: dict[str, Any] = {"colorscale": "RdBu_r", "zmin": -most[edit], "zmax": most[edit]}
            panels.add(row * n_columns + column, shown.update(coloraxis=None, showscale=False, **scale))
    for column, share in enumerate(SHARES):
        scale = {"colorscale": SCALE, "zmin": 0.0, "zmax": top[share]}
        shown = heat(_labelled(data["share"].sel(part=share), data)).update(coloraxis=None, showscale=False, **scale)
        panels.add(len(sides) * n_columns + column, shown)
    panels.figure.update_xaxes(type="category", tickfont_size=9).update_yaxes(type="category")
    panels.figure.update_yaxes(title_text="layer", col=1)
    panels.figure.update_xaxes(title_text="plane: its wavelength, tokens", row=panels.n_rows)
    subtitle = "rise of the loss in nats, q and k of one plane of one layer at a time; red: cost, up to what titles say"
    return panels.finish(f"What each plane costs, and what it carries · {model_label(data)}", subtitle)


def _labelled(array: xr.DataArray, data: xr.Dataset) -> xr.DataArray:
    """Return [layer, planes] with planes named by their wavelengths (`plane_labels`), or bands by their names."""
    array = array.transpose("layer", "planes")
    if data["planes"].dtype.kind == "U":
        return array
    return array.assign_coords(planes=plane_labels(data["wavelength"].rename(planes="plane")))


def scatter(result: Any) -> go.Figure:
    """Draw cost against share, one point per plane of a layer and one row per edit.

    The control's costs are open circles, the random init is grey.
    """
    data = result.own
    edits = [str(edit) for edit in data["map_edit"].values]

    def rho(edit: str, share: str, cost: str = "edit") -> str:
        return format_number(float(data["rho"].sel(map_edit=edit, part=share, cost=cost, end="value")), ".2f")

    titles = [
        f"{WORDS[edit]}<br>rho {rho(edit, share)}, control {rho(edit, share, 'control')}"
        for edit, share in product(edits, SHARES)
    ]
    panels = Panels(titles, columns=len(SHARES), row_height=270)
    shown = [] if result.null is None else [(model_label(result.null), result.null, "edit", NULL_COLOUR)]
    shown += [(ROTATION, data, "control", COLOURS[1]), ("edit", data, "edit", COLOURS[0])]
    for panel, (edit, share) in enumerate(product(edits, SHARES)):
        panels.add(panel, *(_points(one, edit, share, cost, name, colour) for name, one, cost, colour in shown))
    for column, words in enumerate(SHARES.values(), 1):
        panels.figure.update_xaxes(title_text=words, row=len(edits), col=column)
    panels.figure.update_yaxes(title_text=RISE, col=1)
    subtitle = "a point a plane of a layer, full strength, q and k; rho: Spearman over the points of the model"
    return panels.finish(f"Do planes cost what they carry? · {model_label(data)}", subtitle)


def _points(data: xr.Dataset, edit: str, share: str, cost: str, name: str, colour: str) -> go.Scatter:
    """Return one cost of every plane of every layer against its share."""
    costs, shares = data["map_rise"].sel(map_edit=edit, cost=cost).mean("prompt"), data["share"].sel(part=share)
    cells = xr.Dataset({"x": shares, "y": costs}).stack(cell=("layer", "planes")).dropna("cell")
    marker = {"color": colour, "size": 6, "symbol": "circle-open" if cost == "control" else "circle"}
    text = [f"layer {layer}, planes {planes}" for layer, planes in cells["cell"].values]
    hover = "%{text}<br>share %{x:.4f}: %{y:+.4f} nats<extra></extra>"
    look: dict[str, Any] = {"mode": "markers", "marker": marker, "name": name, "text": text, "hovertemplate": hover}
    return go.Scatter(x=cells["x"].values, y=cells["y"].values, **look)
