"""How well position + row + key explain the attention scores, head by head."""

import plotly.graph_objects as go
import xarray as xr

from tl_posgen.views.style import check_kind, head_maps, layer_curves, model_label

KINDS = ("map", "curves", "prompts")
GAUGES = {
    "flat_keys": "sum b = sum c = 0, c without a linear trend",
    "flat_distance": "sum b = sum c = 0, a without a linear trend",
    "flat_queries": "sum b = sum c = 0, b without a linear trend",
}


def plot(dataset: xr.Dataset, null: xr.Dataset | None = None, kind: str = "map") -> go.Figure:
    """kind "map": r of every head; "curves": a over distance; "prompts": how r differs between prompts."""
    check_kind(kind, KINDS)
    model = model_label(dataset)
    if kind == "map":
        measures = {"r": "r", "r_no_first": "r, first token left out", "r_visible": "r within rows"}
        subtitle = "correlation of the scores with a(i-j) + b(i) + c(j); within rows is what softmax can see"
        return head_maps(dataset, null, measures, title=f"Three-axis fit · {model}", subtitle=subtitle)
    if kind == "curves":
        gauge = str(dataset.attrs.get("gauge", ""))
        return layer_curves(
            dataset,
            null,
            "a",
            "distance",
            title=f"Score by distance, a(i-j) · {model}",
            subtitle=f"gauge: {GAUGES.get(gauge, gauge)}. Curvature is identified; level and slope are not",
            y_title="a",
            log_x=True,
        )
    return _prompts(dataset, null)


def _prompts(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    return layer_curves(
        dataset,
        null,
        "r_per_prompt",
        "prompt",
        title=f"Three-axis r prompt by prompt · {model_label(dataset)}",
        subtitle="one line a head; the interval over prompts is in r_low, r_high of the table",
        y_title="r",
    )
