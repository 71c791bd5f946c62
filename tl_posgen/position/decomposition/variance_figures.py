"""Figures of the variance decomposition: the triangle of heads, and where the key stands, as a bar a head."""

from typing import Any

import plotly.graph_objects as go
import xarray as xr

from tl_posgen.models.loading.null_kinds import NULL_KINDS
from tl_posgen.position.decomposition.numbers.token_places import BY_KEY
from tl_posgen.position.decomposition.numbers.variance_shares import PARTS
from tl_posgen.report.figures import MARKS, PATTERNS, Panels, at_usual_labels, drawn_models, evenly, model_label, titled
from tl_posgen.report.head_figures import by_head, head_names, said_of_rows


def draw_atlas(result: Any) -> go.Figure:
    """Draw each head in the triangle position, content, interaction."""
    figure = go.Figure()
    hover = "%{text}<br>position %{a:.2f}<br>content %{b:.2f}<br>interaction %{c:.2f}<extra></extra>"
    for kind, (side, data, colour) in reversed([*zip(result.by_kind, drawn_models(result), strict=True)]):
        parts = xr.Dataset({part: at_usual_labels(result, data[part]) for part in PARTS})
        heads = parts.stack(unit=("layer", "head")).dropna("unit")
        is_trained = data is result.trained
        if is_trained:
            bar = {"title": "layer", "thickness": 12, "x": 1.02, "len": 0.8, "y": 1, "yanchor": "top"}
            bar["tickvals"] = evenly(data["layer"].values.tolist())
            marker = {"color": heads["layer"].values, "size": 10, "colorscale": MARKS, "colorbar": bar}
        else:
            marker = {"color": colour, "size": 8, "symbol": NULL_KINDS[kind].symbol, "line": {"width": 1.5}}
        corners = {corner: heads[part].values for corner, part in zip("abc", PARTS, strict=True)}
        points = {"text": head_names(heads["unit"].values), "mode": "markers", "marker": marker, "name": side}
        points |= {"meta": "heads"} if is_trained else {}  # a click on the page opens that head
        figure.add_trace(go.Scatterternary(**corners, **points, hovertemplate=hover))
    axis = {"tickformat": ".0%", "min": 0.0, "gridcolor": "rgba(156,163,175,.35)", "linecolor": "#9ca3af"}
    inner = {"tickvals": [0.2, 0.4, 0.6, 0.8]}  # at a corner the numbers of two sides would meet
    titles = (
        "position: distance alone or with query",
        "content:<br>key alone<br>or with query",
        "interaction:<br>key with distance",
    )
    axes = {
        f"{corner}axis": axis | inner | {"title": {"text": title}} for corner, title in zip("abc", titles, strict=True)
    }
    figure.update_layout(ternary={"sum": 1, **axes}, legend={"x": 0, "y": -0.17, "yanchor": "top", "orientation": "h"})
    subtitle = "one point a head; shares of the score variance that softmax can see, over all (query, key, distance)"
    return titled(figure, f"Head atlas · {model_label(result.trained)}", subtitle, height=640).update_layout(
        margin_b=120
    )


def draw_places(result: Any) -> go.Figure:
    """Draw the shares that the key's place has in content and interaction of every head, beside what takes none, as a
    bar a head, the random init below."""
    bars: dict[str, Any] = {"position": ("#3b6fb6", {"part": list(PARTS["position"])})}
    for part, dark, light in (("content", "#1f6b45", "#9fd3b8"), ("interaction", "#a8431a", "#eeb39d")):
        for aspect, colour, places in (("place", dark, BY_KEY["place"]), ("token", light, ["none", "query"])):
            bars[f"{part}, key's {aspect}"] = colour, {"part": list(PARTS[part]), "place": places}
    models, note = drawn_models(result), ""
    panels = Panels([side for side, _, _ in models], columns=1, shared_xaxes=True)
    for number, (_, data, _) in enumerate(models):
        heads = by_head(at_usual_labels(result, data["by_place"] / (1 - data["share"].sel(part="q"))))
        row = "layer" if "layer" in heads.dims else "head"
        heads, note = heads.dropna(row, how="all"), said_of_rows(heads)
        for name, (colour, labels) in bars.items():
            shares = heads.sel(labels)
            y = shares.sum([dim for dim in shares.dims if dim != row]).values
            hover = f"%{{x}}, {name}: %{{y:.3f}}<extra></extra>"
            look = {"color": colour, "pattern": {"shape": PATTERNS[name.partition(",")[0]]}}
            panels.add(number, go.Bar(x=heads[row].values, y=y, name=name, marker=look, hovertemplate=hover))
    panels.figure.update_layout(barmode="stack", bargap=0.15)
    panels.figure.update_yaxes(range=[0, 1], tickformat=".0%").update_xaxes(type="category")
    subtitle = "shares of the score variance that softmax can see; dark: where the key stands; light: what the key is"
    return panels.titled(f"Where the key stands, per head · {model_label(result.trained)}", subtitle + note)
