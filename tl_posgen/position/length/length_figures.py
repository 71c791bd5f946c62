"""Figures beyond the training length: loss, drift of the outputs, entropy and normaliser."""

from collections.abc import Callable
from functools import partial
from typing import Any

import plotly.graph_objects as go
import xarray as xr

from tl_posgen.report.figures import COLOURS, NULL_COLOUR, Panels, line, model_label, sides
from tl_posgen.report.intervals import error_bars

ATTENTION = ("entropy", "normaliser")
DASHES = ("solid", "dash", "dot", "dashdot")
DRIFTS = {
    "frechet": "Frechet distance / noise level",
    "mahalanobis": "Mahalanobis, of the inside's",
    "norm_ratio": "norm, of the inside's",
}


def loss(result: Any) -> go.Figure:
    """Loss by position with intervals, a panel a side and a colour a condition."""
    both = sides(result)
    panels = Panels([side for side, *_ in both], columns=2, row_height=280)
    for panel, (_, data, _) in enumerate(both):
        for number, condition in enumerate(str(condition) for condition in data["condition"].values):
            one, look = data.sel(condition=condition), {"mode": "lines+markers", "marker": {"size": 4}}
            curve = line(data["bin"].values, one["loss"].values, condition, COLOURS[number], **look)
            panels.add(panel, curve.update(error_y=error_bars(one, "loss")))
    mark_training_length(panels, result)
    subtitle = "bars: 95 % bootstrap intervals over prompts; the axes differ"
    title = f"Loss beyond the training length · {model_label(result.dataset)}"
    return panels.axes("position", "loss, nats per token").finish(title, subtitle)


def drift(result: Any) -> go.Figure:
    """Outputs against their distribution inside the training length, by segment: median over heads."""

    def median(data: xr.Dataset, name: str) -> xr.DataArray:
        values = data[name] / data["noise_level"] if name == "frechet" else data[name]
        return values.median(("layer", "head"))

    panels = Panels(list(DRIFTS.values()), columns=3, row_height=280)
    for panel, name in enumerate(DRIFTS):
        panels.add(panel, *curves(result, "segment", partial(median, name=name), mode="lines+markers"))
        note: Any = {"annotation_text": "noise level" if name == "frechet" else "no drift", "row": 1, "col": panel + 1}
        panels.figure.add_hline(y=1, line_dash="dot", **note)
    panels.axes("segment, in training lengths").figure.update_xaxes(dtick=1)
    subtitle = (
        "outputs o of each head against those of the untouched model inside the training length; median over heads; "
        "random init in grey"
    )
    return panels.finish(f"Drift of the outputs · {model_label(result.dataset)}", subtitle)


def attention(result: Any) -> go.Figure:
    """Entropy and normaliser by position, mean over heads."""
    panels = Panels(["entropy, nats", "normaliser, ln sum exp"], columns=2, row_height=280)
    for panel, name in enumerate(ATTENTION):
        panels.add(panel, *curves(result, "bin", lambda data, name=name: data[name].mean(("layer", "head"))))
    mark_training_length(panels, result)
    title = f"Attention beyond the training length · {model_label(result.dataset)}"
    return panels.axes("position").finish(title, "mean over heads; random init in grey")


def curves(result: Any, along: str, of: Callable[[xr.Dataset], xr.DataArray], **look: Any) -> list[go.Scatter]:
    """A line a condition; the null's in grey behind them, told apart by their dashes."""
    traces = []
    for side, data, _ in reversed(sides(result)):
        is_null = data is result.null
        for number, condition in enumerate(str(condition) for condition in data["condition"].values):
            values = of(data.sel(condition=condition))
            name = f"{side}, {condition}" if is_null else condition
            style: dict[str, Any] = {"dash": DASHES[number % len(DASHES)], "opacity": 0.7} if is_null else {}
            x = values[along].values + (1 if along == "segment" else 0)
            traces.append(line(x, values.values, name, NULL_COLOUR if is_null else COLOURS[number], **style, **look))
    return traces


def mark_training_length(panels: Panels, result: Any) -> None:
    note: Any = {"annotation_text": "training length", "annotation_font_size": 10}
    panels.figure.add_vline(x=result.summary["inside"], line_dash="dash", line_color=NULL_COLOUR, **note)


FIGURES = {"loss": loss, "drift": drift, "attention": attention}
