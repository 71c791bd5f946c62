"""Figures of the variance decomposition: the triangle of heads, stacked shares, and shares by where the key stands."""

from collections.abc import Callable, Mapping
from typing import Any

import plotly.graph_objects as go
import xarray as xr

from tl_posgen.position.decomposition.numbers.token_places import BY_KEY
from tl_posgen.position.decomposition.numbers.variance_shares import PARTS
from tl_posgen.report.figures import MARKS, Panels, at_labels, evenly, finish, model_label, sides
from tl_posgen.report.head_figures import by_head, head_names, said_of_rows

COLOURS = {"q": "#c4cad3", "k": "#3f9b6b", "qk": "#9fd3b8", "d": "#3b6fb6", "qd": "#9dbde6", "kd": "#d1603d"}
COLOURS |= {"qkd": "#eeb39d"}


def draw_atlas(result: Any) -> go.Figure:
    """Draw each head in the triangle position, content, interaction."""
    figure = go.Figure()
    hover = "%{text}<br>position %{a:.2f}<br>content %{b:.2f}<br>interaction %{c:.2f}<extra></extra>"
    for side, data, colour in reversed(sides(result)):
        parts = xr.Dataset({part: at_labels(result, data[part]) for part in PARTS})
        heads = parts.stack(unit=("layer", "head")).dropna("unit")
        marker = {"color": colour, "size": 8, "symbol": "diamond-open"}
        if data is result.own:
            bar = {"title": "layer", "thickness": 12, "x": 1.02, "len": 0.8, "y": 1, "yanchor": "top"}
            bar["tickvals"] = evenly(data["layer"].values.tolist())
            marker = {"color": heads["layer"].values, "size": 10, "colorscale": MARKS, "colorbar": bar}
        corners = {corner: heads[part].values for corner, part in zip("abc", PARTS, strict=True)}
        points = {"text": head_names(heads["unit"].values), "mode": "markers", "marker": marker, "name": side}
        figure.add_trace(go.Scatterternary(**corners, **points, hovertemplate=hover))
    axis = {"tickformat": ".0%", "min": 0.0, "gridcolor": "rgba(156,163,175,.35)", "linecolor": "#9ca3af"}
    inner = {"tickvals": [0.2, 0.4, 0.6, 0.8]}  # at a corner the numbers of two sides would meet
    breaks = (" ", "<br>", "<br>")  # below the corners there is little room
    titles = (f"{part}:{gap}{' + '.join(PARTS[part])}" for part, gap in zip(PARTS, breaks, strict=True))
    axes = {f"{corner}axis": axis | inner | {"title": {"text": one}} for corner, one in zip("abc", titles, strict=True)}
    figure.update_layout(ternary={"sum": 1, **axes}, legend={"x": 0, "y": -0.12, "yanchor": "top", "orientation": "h"})
    subtitle = "one point a head; shares of the score variance that softmax can see, over all (query, key, distance)"
    return finish(figure, f"Head atlas · {model_label(result.own)}", subtitle, height=640).update_layout(margin_b=90)


def draw_shares(result: Any) -> go.Figure:
    """Draw all seven shares of every head, stacked."""
    subtitle = "q moves whole rows, which softmax cannot see; green: content, blue: position, orange: interaction"
    colours = {" ".join(name): (colour, {"part": name}) for name, colour in COLOURS.items()}
    return _stacked_bars(result, "share", colours, "Variance shares per head", subtitle)


def draw_places(result: Any) -> go.Figure:
    """Draw the shares that the key's place has in content and interaction of every head, beside what takes none."""
    subtitle = "shares of the score variance that softmax can see; dark: where the key stands; light: what the key is"
    colours: dict[str, Any] = {"position": (COLOURS["d"], {"part": list(PARTS["position"])})}
    for part, dark, light in (("content", "#1f6b45", COLOURS["qk"]), ("interaction", "#a8431a", COLOURS["qkd"])):
        for words, colour, places in (("place", dark, BY_KEY["place"]), ("token", light, ["none", "query"])):
            colours[f"{part}, key's {words}"] = colour, {"part": list(PARTS[part]), "place": places}
    title = "Where the key stands, per head"
    return _stacked_bars(result, "by_place", colours, title, subtitle, lambda data: 1 - data["share"].sel(part="q"))


def _stacked_bars(
    result: Any,
    variable: str,
    bars: Mapping[str, tuple[str, Mapping[str, Any]]],
    title: str,
    subtitle: str,
    whole: Callable[[xr.Dataset], Any] = lambda data: 1,
) -> go.Figure:
    """Draw sums of a variable at labels, name -> (colour, labels), as a bar a head, the random init below.

    Args:
        whole: of a side's dataset, by which the variable is divided.
    """
    both, said = sides(result), ""
    panels = Panels([side for side, _, _ in both], columns=1, shared_xaxes=True)
    for number, (_, data, _) in enumerate(both):
        heads = by_head(at_labels(result, data[variable] / whole(data)))
        row = "layer" if "layer" in heads.dims else "head"
        heads, said = heads.dropna(row, how="all"), said_of_rows(heads)
        for name, (colour, labels) in bars.items():
            shares = heads.sel(labels)
            shares = shares.sum([dim for dim in shares.dims if dim != row])
            hover = f"%{{x}}, {name}: %{{y:.3f}}<extra></extra>"
            panels.add(
                number,
                go.Bar(x=heads[row].values, y=shares.values, name=name, marker_color=colour, hovertemplate=hover),
            )
    panels.figure.update_layout(barmode="stack", bargap=0.15)
    panels.figure.update_yaxes(range=[0, 1], tickformat=".0%").update_xaxes(type="category")
    return panels.finish(f"{title} · {model_label(result.own)}", subtitle + said)
