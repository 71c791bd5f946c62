"""How much of the scores is the same in every prompt, and what that part looks like."""

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from tl_posgen.views.style import DIVERGING, check_kind, finish, head_maps, model_label, sides

KINDS = ("map", "parts", "maps")


def drawable(dataset: xr.Dataset) -> tuple[str, ...]:
    """Maps of single heads where some were kept."""
    return KINDS if "example_position" in dataset else KINDS[:-1]


def plot(dataset: xr.Dataset, null: xr.Dataset | None = None, kind: str = "map") -> go.Figure:
    """kind "map": share of position; "parts": of it what distance alone and key position alone say; "maps": the mean
    over prompts for the heads with most position."""
    check_kind(kind, KINDS)
    model, prompts = model_label(dataset), dataset.attrs.get("prompts")
    if kind == "map":
        measures = {"position": "position", "position_no_first": "position, first token left out"}
        subtitle = f"share of the score variance within rows that is the same in all {prompts} prompts, chance removed"
        return head_maps(dataset, null, measures, title=f"Position across prompts · {model}", subtitle=subtitle)
    if kind == "parts":
        measures = {
            "by_distance_no_first": "distance alone",
            "by_key_no_first": "key position alone",
            "by_either_no_first": "distance + key position",
        }
        subtitle = (
            "shares of the score variance within rows, first token left out; a straight line counts as both, since "
            "within a row it is the same"
        )
        return head_maps(dataset, null, measures, title=f"Position by distance and by key · {model}", subtitle=subtitle)
    return _maps(dataset, null)


def _maps(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    rows = sides(dataset, null)
    n = max(data.sizes["example"] for _, data in rows)
    figure = make_subplots(
        rows=len(rows),
        cols=n,
        subplot_titles=[_label(data, index, side) for side, data in rows for index in range(n)],
        horizontal_spacing=0.06,
        vertical_spacing=0.14,
    )
    for row, (_, data) in enumerate(rows, start=1):
        for column in range(data.sizes["example"]):
            scores = data["example_position"].isel(example=column).values
            hidden = np.triu(np.ones_like(scores, dtype=bool), 1)
            shown = np.where(hidden, np.nan, scores)
            reach = float(np.nanquantile(np.abs(shown), 0.98))
            heatmap = go.Heatmap(
                z=shown,
                colorscale=DIVERGING,
                reversescale=True,
                zmin=-reach,
                zmax=reach,
                showscale=False,
                hovertemplate="query %{y}, key %{x}: %{z:.3g}<extra></extra>",
            )
            figure.add_trace(heatmap, row=row, col=column + 1)
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title_text="key position", row=len(rows))
    figure.update_yaxes(title_text="query position", col=1)
    figure.update_annotations(font_size=11)
    subtitle = (
        f"mean over {dataset.attrs.get('prompts')} prompts of scores within rows, first token left out; the heads with "
        "most position; red high, blue low, each map on its own scale"
    )
    title = f"What is the same in every prompt · {model_label(dataset)}"
    return finish(figure, title, subtitle, height=130 + 330 * len(rows))


def _label(data: xr.Dataset, index: int, side: str) -> str:
    if index >= data.sizes["example"]:
        return ""
    layer, head = int(data["example_layer"][index]), int(data["example_head"][index])
    share = float(data["position_no_first"].sel(layer=layer, head=head))
    return f"L{layer}H{head}, position {share:.0%} · {side}"
