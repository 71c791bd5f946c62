"""The figure of planes: how far each turns within the context, how much it is used, in which phase, and its cost."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.colors import cyclical

from tl_posgen.core.formatting import in_ranges
from tl_posgen.core.measure import HEAD
from tl_posgen.core.numbers import intervals_of
from tl_posgen.models.loading.null_kinds import NULL_KINDS
from tl_posgen.report.figures import COLOURS, NULL_COLOUR, Panels, error_bars, line, model_label
from tl_posgen.report.head_figures import head_names

_PHASES = cyclical.HSV  # of angles: the two ends are one colour
_MOST_KINDS = 3  # of layers beside each other
_LEGEND_INSIDE = {"x": 0.99, "xanchor": "right", "y": 0.99, "bgcolor": "rgba(0,0,0,0)"}
_LEGEND_BELOW = {"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top", "font_size": 11}
ACROSS = "second half of short prompts, moved on by a gap"
_BELOW = 0.6  # height of the panels below, of those of use


def kinds_of_layers(data: xr.Dataset, context: int) -> dict[str, list[int]]:
    """Return the layers of each kind, those of one reach and the same frequencies, by its name; those without RoPE are
    left out."""
    at = data[["turns", "reach"]].sel(context=context)
    by_kind: dict[tuple[float, ...], list[int]] = {}
    for layer in at["layer"].values.tolist():
        turns = at["turns"].sel(layer=layer).values
        if np.isfinite(turns).any():
            by_kind.setdefault((float(at["reach"].sel(layer=layer)), *turns[np.isfinite(turns)]), []).append(layer)
    if len(by_kind) == 1:
        return {f"all layers, L = {reach:,.0f} tokens": layers for (reach, *_), layers in by_kind.items()}
    return {f"layers {in_ranges(layers)}, L = {reach:,.0f} tokens": layers for (reach, *_), layers in by_kind.items()}


def draw_plane_use(result: Any) -> go.Figure:
    """Draw the use of each plane over the turns that it makes within the context, beside uniform use and the null
    models, and a mark a head at its longest plane, coloured by phase; below, where they were measured, what each costs,
    and the loss of text and of a copy across a gap.

    Args:
        result: of `PlaneUse`; with costs and gap where `tl_posgen.frequencies.joined_figure.join_costs_and_gap` put
            them into it.
    """
    numbers = result.numbers
    costs: dict[str, xr.DataArray] = {}
    if "cost" in result.trained:
        costs = {edit: result.trained["cost"].sel(edit=edit) for edit in result.trained["edit"].values.tolist()}
    context = result.trained["context"].values.tolist()[0]
    kinds = dict(list(kinds_of_layers(result.trained, context).items())[:_MOST_KINDS])
    across = result.trained.get("across_gap")
    n_below = bool(costs) + (across is not None)
    titles = [*kinds, *([""] * len(kinds) if costs else []), *([ACROSS] if across is not None else [])]
    rows = [1, *[_BELOW] * n_below]
    heights = {"row_heights": rows, "vertical_spacing": 0.3 / len(rows)} if n_below else {}
    height = round(380 * sum(rows) / len(rows))
    panels = Panels(titles, columns=max(1, len(kinds)), row_height=height, horizontal_spacing=0.06, **heights)
    for number, layers in enumerate(kinds.values()):
        data = result.trained.sel(layer=layers)
        turns = data["turns"].sel(context=context).isel(layer=0)
        planes = turns["plane"].values[turns.values > 0]
        x = np.log10(turns.sel(plane=planes).values)
        n_planes = int(turns.notnull().sum())
        use = numbers.array("use").sel(layer=layers, plane=planes) * n_planes
        ends = intervals_of(use.mean(HEAD), (0, n_planes))
        value, low, high = (ends[end].values for end in ("value", "low", "high"))
        texts = [f"plane {plane}: {10**turn:.3g} turns" for plane, turn in zip(planes, x, strict=True)]
        width = 0.8 * float(np.abs(np.diff(x)).min()) if len(x) > 1 else 0.2
        look = {"marker_color": COLOURS[0], "width": width, "error_y": error_bars(value, low, high), "opacity": 0.75}
        hover = {"text": texts, "textposition": "none", "hovertemplate": "%{text}<br>%{y:.2f} x uniform<extra></extra>"}
        panels.add(number, go.Bar(x=x, y=value, name="mean over heads", **look, **hover))
        for kind, null in numbers.by_null.items():
            y = [mean.value for mean in null.along(use, "plane").values()]
            panels.add(number, line(x, y, kind, NULL_KINDS[kind].colour, dash=NULL_KINDS[kind].dash, width=2))
        panels.add(number, _marks_of_heads(data, use, turns))
        for place, named_cost in enumerate(costs.items()):
            offset = (place - (len(costs) - 1) / 2) * width / len(costs)  # of this edit's bars from the plane
            panels.add(len(kinds) + number, _cost(named_cost, place, planes, x + offset, width / len(costs), texts))
    figure: Any = panels.figure
    figure.add_vline(x=np.log10(0.5), line={"color": NULL_COLOUR, "width": 1, "dash": "dot"})
    for number in range(len(kinds)):
        figure.add_hline(y=1, line={"color": NULL_COLOUR, "width": 1}, row=1, col=number + 1)
    panels.axes("", "use, x uniform")
    for number in range(len(kinds)):
        title = "turns within the context (dotted: half a turn)"
        figure.update_xaxes(title_text=title, row=1 + bool(costs), col=number + 1)
    if costs:
        figure.update_yaxes(title_text="rise of the loss, nats", row=2, col=1)
        for column in range(1, len(kinds) + 1):  # a plane stands at one place above and below
            above = figure.get_subplot(1, column).xaxis.plotly_name
            figure.update_xaxes(matches=above.replace("axis", ""), row=2, col=column)
    positions = [float(position) for trace in figure.data if trace.type == "bar" for position in trace.x] or [0.0]
    ticks = np.arange(np.floor(min(positions)), np.ceil(max(positions)) + 1)
    figure.update_xaxes(tickvals=ticks, ticktext=[f"{10.0**tick:,g}" for tick in ticks])
    if across is not None:
        last = {"row": 1 + n_below, "col": 1}
        panels.add(len(kinds) * n_below, *_losses_across(across))
        figure.update_xaxes(title_text="gap over the training context", tickvals=None, ticktext=None, **last)
        figure.update_yaxes(title_text="nats per token", **last)
    bar = {"title": "phase of q<br>before k", "thickness": 12, "tickvals": [-180, -90, 0, 90, 180], "ticksuffix": "°"}
    bar |= {"len": 1 / sum(rows), "lenmode": "fraction", "y": 1, "yanchor": "top"} if n_below else {}
    figure.update_layout(
        coloraxis={"colorscale": _PHASES, "cmin": -180, "cmax": 180, "colorbar": bar},
        legend=_LEGEND_BELOW if n_below else _LEGEND_INSIDE,
        barmode="overlay",
        bargap=0,
    )
    subtitle = "circles: heads at their longest plane, coloured by its phase; first token left out; slow planes left"
    return panels.titled(f"Use of RoPE's planes · {model_label(result.trained)}", subtitle)


def _marks_of_heads(data: xr.Dataset, use: xr.DataArray, turns: xr.DataArray) -> go.Scatter:
    """Return a mark a head at its longest plane: the use of that plane by this head, coloured by phase."""
    heads = data[["longest_plane", "phase"]].stack(place=HEAD).dropna("place")
    plane = heads["longest_plane"].astype(int)
    height = intervals_of(use)["value"].stack(place=HEAD).sel(place=heads["place"])
    y = [float(height.sel(plane=int(at)).isel(place=place)) for place, at in enumerate(plane.values)]
    degrees = np.degrees(heads["phase"].values)
    texts = [f"{name}, plane {at}" for name, at in zip(head_names(heads["place"].values), plane.values, strict=True)]
    colours = {"color": degrees, "coloraxis": "coloraxis", "size": 9, "line": {"width": 1, "color": "white"}}
    hover = "%{text}<br>%{y:.2f} x uniform, phase %{marker.color:.0f}°<extra></extra>"
    x = np.log10(turns.sel(plane=plane.values).values)
    return go.Scatter(x=x, y=y, mode="markers", marker=colours, text=texts, hovertemplate=hover, name="heads")


def _cost(
    named: tuple[str, xr.DataArray], place: int, planes: np.ndarray, x: np.ndarray, width: float, texts: Sequence[str]
) -> go.Bar:
    """Return the bars of one kind of edit."""
    name, rise = named
    ends = intervals_of(rise.reindex(plane=planes))
    value, low, high = (ends[end].values for end in ("value", "low", "high"))
    hover = {"text": texts, "textposition": "none", "hovertemplate": "%{text}<br>%{y:+.3f} nats<extra></extra>"}
    look = {"marker_color": COLOURS[1 + place], "width": width, "error_y": error_bars(value, low, high)}
    return go.Bar(x=x, y=value, name=name, **look, **hover)


def _losses_across(loss: xr.DataArray) -> list[go.Scatter]:
    """Return a curve each of text and copy, by rule."""
    return [
        line(
            loss["contexts"].values,
            loss.sel(rule=rule, task=task).values,
            f"{task}, {rule}",
            COLOURS[(3 + number) % len(COLOURS)],
            dash=dash,
        )
        for number, rule in enumerate(loss["rule"].values.tolist())
        for task, dash in {"text": "solid", "copy": "dash"}.items()
    ]
