"""Where the variance of the scores comes from: query, key, distance and their interactions."""

import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from tl_posgen.views.style import NULL_COLOUR, check_kind, finish, head_maps, model_label, sides

KINDS = ("atlas", "shares", "map")
SHARES = {
    "share_q": ("q", "#c4cad3"),
    "share_k": ("k", "#3f9b6b"),
    "share_qk": ("q k", "#9fd3b8"),
    "share_d": ("d", "#3b6fb6"),
    "share_qd": ("q d", "#9dbde6"),
    "share_kd": ("k d", "#d1603d"),
    "share_qkd": ("q k d", "#eeb39d"),
}


def plot(dataset: xr.Dataset, null: xr.Dataset | None = None, kind: str = "atlas") -> go.Figure:
    """kind "atlas": each head in the triangle position / meaning / interaction; "shares": stacked shares per head;
    "map": the three as head maps."""
    check_kind(kind, KINDS)
    if kind == "atlas":
        return _atlas(dataset, null)
    if kind == "shares":
        return _shares(dataset, null)
    measures = {"position": "position", "meaning": "meaning", "interaction": "interaction"}
    subtitle = "shares of the variance that softmax can see"
    return head_maps(
        dataset, null, measures, title=f"Position, meaning, interaction · {model_label(dataset)}", subtitle=subtitle
    )


def _atlas(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    figure = go.Figure()
    for side, data in reversed(sides(dataset, null)):
        is_null = data is null
        heads = data[["position", "meaning", "interaction"]].stack(unit=("layer", "head")).dropna("unit")
        names = [
            f"layer {layer}, head {head}"
            for layer, head in zip(heads["layer"].values, heads["head"].values, strict=True)
        ]
        marker = {"color": NULL_COLOUR, "size": 8, "symbol": "diamond-open"}
        if not is_null:
            marker = {"color": heads["layer"].values, "size": 10, "colorscale": "Viridis", "showscale": True}
            marker["colorbar"] = {"title": "layer", "thickness": 12, "x": 1.02, "dtick": 1}
        figure.add_trace(
            go.Scatterternary(
                a=heads["position"].values,
                b=heads["meaning"].values,
                c=heads["interaction"].values,
                text=names,
                mode="markers",
                marker=marker,
                name=side,
                hovertemplate="%{text}<br>position %{a:.2f}<br>meaning %{b:.2f}<br>interaction %{c:.2f}<extra></extra>",
            )
        )
    axis = {"tickformat": ".0%", "min": 0.0, "gridcolor": "#e5e7eb", "linecolor": "#9ca3af"}
    figure.update_layout(
        ternary={
            "sum": 1,
            "aaxis": axis | {"title": {"text": "position: d + qd"}},
            "baxis": axis | {"title": {"text": "meaning: k + qk"}},
            "caxis": axis | {"title": {"text": "interaction: kd + qkd"}},
        },
        legend={"orientation": "h", "y": -0.08, "x": 0},
    )
    subtitle = "one point a head; shares of the score variance that softmax can see, over all (query, key, distance)"
    return finish(figure, f"Head atlas · {model_label(dataset)}", subtitle, height=620)


def _shares(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    panels = sides(dataset, null)
    figure = make_subplots(
        rows=len(panels), cols=1, shared_xaxes=True, subplot_titles=[side for side, _ in panels], vertical_spacing=0.12
    )
    for row, (_, data) in enumerate(panels, start=1):
        heads = data[list(SHARES)].stack(unit=("layer", "head"))
        names = [f"L{layer}H{head}" for layer, head in zip(heads["layer"].values, heads["head"].values, strict=True)]
        for share, (label, colour) in SHARES.items():
            bar = go.Bar(
                x=names,
                y=heads[share].values,
                name=label,
                marker_color=colour,
                legendgroup=share,
                showlegend=row == 1,
                hovertemplate=f"%{{x}}, {label}: %{{y:.3f}}<extra></extra>",
            )
            figure.add_trace(bar, row=row, col=1)
    figure.update_layout(barmode="stack", bargap=0.15)
    figure.update_yaxes(range=[0, 1], tickformat=".0%")
    figure.update_xaxes(type="category")
    subtitle = "q moves whole rows, which softmax cannot see; green: meaning, blue: position, orange: interaction"
    return finish(
        figure, f"Variance shares per head · {model_label(dataset)}", subtitle, height=140 + 230 * len(panels)
    )
