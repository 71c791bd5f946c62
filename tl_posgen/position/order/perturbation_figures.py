"""Figures of disturbed order: rise of the loss by text, index and features, and accuracy of the cloze."""

from collections.abc import Iterator, Sequence
from typing import Any

import plotly.graph_objects as go
import xarray as xr

from tl_posgen.position.order.disturbance import CONDITIONS, OF_TEXT
from tl_posgen.report.figures import COLOURS, Panels, line, model_label, sides
from tl_posgen.report.intervals import error_bars

TARGET = "unmoved"
NAMES = {
    "tokens": "T: tokens swapped",
    "words": "T: words swapped",
    "positions": "P: index of q and k",
    "key_positions": "P = F: index of k",
    "jitter": "F: distances jittered",
    "position_part": "F': position part only",
}


def drawn(data: xr.Dataset) -> list[str]:
    """Return the kinds of figures that have data: `matched` needs moved positions."""
    return ["curves", "matched"] if "gap" in data and data.sizes["condition"] > 1 else ["curves"]


def curves(result: Any) -> go.Figure:
    """Draw the change of the loss against the ratio, one panel per reach, and the accuracy of the cloze."""
    data, summary = result.dataset, result.summary
    reaches, conditions = ([str(one) for one in data[dim].values] for dim in ("reach", "condition"))
    cloze = [f"cloze accuracy, {summary['reach']}"] if summary["cloze_items"] else []
    panels = Panels(reaches + cloze, shared_yaxes=True)
    for panel, reach in enumerate(reaches):
        panels.add(panel, *by_ratio(result, "change", conditions, reach=reach, target=TARGET))
    panels.axes("% of tokens moved", "rise of the loss, nats")
    if cloze:
        chance = [summary["cloze_chance"]] * 2
        x = [100 * summary["ratio_least"], 100 * summary["ratio_most"]]
        panels.add(len(reaches), *by_ratio(result, "cloze_accuracy", conditions))
        panels.add(len(reaches), line(x, chance, "chance of the cloze", "black", dash="dot", width=1.2))
        panels.figure.update_yaxes(matches=None, showticklabels=True, range=[0, 1], col=panels.n_columns)
    subtitle = f"{TARGET} targets; 95 % intervals over prompts"
    subtitle += f", of the cloze over {summary['cloze_items']} items" if cloze else ""
    subtitle += "; random init in grey" if result.nulls else ""
    return panels.finish(f"Loss as order is lost · {model_label(data)}", subtitle)


def matched(result: Any) -> go.Figure:
    """Draw conditions P and F in the same panels, and their differences from P below."""
    data = result.dataset
    reaches = [str(reach) for reach in data["reach"].values]
    conditions = [str(one) for one in data["condition"].values if one not in OF_TEXT]
    panels = Panels(reaches + [""] * len(reaches), columns=len(reaches), shared_yaxes=True, shared_xaxes=True)
    for panel, reach in enumerate(reaches):
        panels.add(panel, *by_ratio(result, "change", conditions, reach=reach, target=TARGET))
        others = [condition for condition in conditions if condition != "positions"]
        panels.add(panel + len(reaches), *by_ratio(result, "gap", others, reach=reach, target=TARGET))
    panels.axes("% of tokens (jitter: of pairs) moved", "rise of the loss, nats")
    panels.figure.update_yaxes(title_text="the same less P's", row=2, col=1)
    subtitle = (
        f"{TARGET} targets, the same draws; 95 % intervals over prompts, below of the difference from P "
        "within each" + ("; random init in grey" if result.nulls else "")
    )
    return panels.finish(f"Index (P) against features (F) · {model_label(data)}", subtitle)


def by_ratio(result: Any, name: str, conditions: Sequence[str], **where: str) -> Iterator[go.Scatter]:
    """Yield curves of a variable against the ratio with intervals, one per condition, the random init's first."""
    for side, data, colour in reversed(sides(result)):
        for condition in conditions:
            curve, own = data.sel({"condition": condition, **where}), data is result.dataset
            shade = COLOURS[CONDITIONS.index(condition) % len(COLOURS)] if own else colour
            look = {"mode": "lines+markers", "marker": {"size": 4}, "error_y": error_bars(curve, name)}
            label = NAMES[condition] if own else side
            yield line(100 * curve["ratio"].values, curve[name].values, label, shade, **look)
