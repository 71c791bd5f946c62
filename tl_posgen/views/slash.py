"""Slash scores: who is slash-dominant, and how attention falls off with distance."""

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.views.style import check_kind, head_maps, layer_curves, model_label

KINDS = ("map", "profiles", "distance")
N_POINTS = 96  # distances drawn per curve, evenly spread on the logarithmic axis


def plot(dataset: xr.Dataset, null: xr.Dataset | None = None, kind: str = "map") -> go.Figure:
    """kind "map": scores of every head; "profiles": score over distance; "distance": mean attention distance."""
    check_kind(kind, KINDS)
    model = model_label(dataset)
    if kind == "map":
        measures = {
            "best_score": "highest slash score",
            "previous_token": "previous token, D = 1",
            "first_token": "attention to the first token",
        }
        subtitle = "slash score: mean attention along the D-th sub-diagonal; highest over D below half the prompt"
        return head_maps(dataset, null, measures, title=f"Slash scores · {model}", subtitle=subtitle)
    if kind == "distance":
        measures = {"attention_distance": "all keys", "attention_distance_without_first": "first token left out"}
        title, subtitle = f"Attention distance · {model}", "mean distance of the attended keys, in tokens"
        return head_maps(dataset, null, measures, title=title, subtitle=subtitle, limits=None)
    return _profiles(dataset, null)


def _profiles(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    shown = _thinned(dataset)
    figure = layer_curves(
        shown,
        None if null is None else _thinned(null),
        "score",
        "distance",
        title=f"Slash score by distance · {model_label(dataset)}",
        subtitle="mean attention paid D tokens back, D below half the prompt; dotted: uniform attention",
        y_title="slash score",
        log_x=True,
    )
    n_columns = min(4, shown.sizes["layer"])
    for index, layer in enumerate(shown["layer"].values):
        baseline = go.Scatter(
            x=shown["distance"].values + 1,
            y=shown["baseline"].sel(layer=layer).values,
            mode="lines",
            line={"color": "black", "dash": "dot", "width": 1.2},
            name="uniform attention",
            legendgroup="uniform attention",
            showlegend=index == 0,
        )
        figure.add_trace(baseline, row=index // n_columns + 1, col=index % n_columns + 1)
    return figure


def _thinned(dataset: xr.Dataset) -> xr.Dataset:
    """Score and baseline at a choice of D < N/2: all the short ones, ever fewer of the long; beyond, few queries are
    left to take a mean over."""
    places = np.unique(np.geomspace(1, max(1, dataset.sizes["distance"] // 2), N_POINTS).round().astype(int)) - 1
    return dataset[["score", "baseline"]].isel(distance=places)
