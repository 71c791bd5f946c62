"""Figures of slash scores: by distance, and token by token for the strongest heads."""

from typing import Any

import plotly.graph_objects as go
import xarray as xr

from tl_posgen.report.circuits import attention_maps
from tl_posgen.report.figures import layer_curves, line
from tl_posgen.slash.layer_means import examples


def profiles(result: Any) -> go.Figure:
    """Draw the slash score of every head by distance, and that of uniform attention, a panel a layer."""

    def uniform(data: xr.Dataset, layer: Any) -> list[go.Scatter]:
        scores = data["uniform"].sel(tokens="all", layer=layer).values
        return [line(data["distance"].values + 1, scores, "uniform attention", "black", dash="dot", width=1.2)]

    return layer_curves(
        result,
        "score",
        "distance",
        title="Slash score by distance",
        subtitle="mean attention paid D tokens back, D below half the prompt; dotted: uniform attention",
        y_title="slash score",
        log_x=True,
        beside=uniform,
    )


def example_labels(data: xr.Dataset) -> list[str]:
    """Return a line for each example: its head, with its score."""
    return [
        f"layer {int(one['layer'])}, head {int(one['head'])}: slash score {float(one['best_score']):.3f} at D = "
        f"{int(one['best_distance'])}"
        for one in examples(data)
    ]


def show_example(data: xr.Dataset, example: int) -> Any:
    """Return circuitsvis' page of the attention of one example."""
    pattern = data["pattern"].isel(example=[example]).transpose("example", "query", "key").values
    return attention_maps(pattern, list(data["token_text"].values), ["attention"])
