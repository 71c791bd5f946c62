"""Figures of disturbed order: rise of the loss by text, index and features, and by token; accuracy of the cloze."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.core.numbers import interval_of
from tl_posgen.position.order import cloze
from tl_posgen.position.order.cloze import N_CHOICES
from tl_posgen.position.order.hooks import CONDITIONS, OF_TEXT
from tl_posgen.report.circuits import token_colours
from tl_posgen.report.figures import COLOURS, Panels, line, line_with_intervals, model_label, sides

TARGET = "unmoved"
RISE = f"rise of the loss, {TARGET} targets, nats"
BEYOND = 2  # spans of the means that intervals are shown beyond these
SHOWN = 0.1  # the ratio nearest to this is shown by token
WORDS = {
    "tokens": "swapped tokens (T)",
    "words": "swapped words (T)",
    "positions": "swapped positions (P)",
    "key_positions": "swapped positions of keys alone (P = F)",
    "jitter": "jittered distances (F)",
    "position_part": "swapped positions in the position part alone (F')",
}


def draw_curves(result: Any) -> go.Figure:
    """Draw the change of the loss against the ratio, one panel per reach, and the accuracy of the cloze."""
    data = result.own
    reaches, conditions = ([str(one) for one in data[dim].values] for dim in ("reach", "condition"))
    items = data.sizes.get("item", 0)
    panels = Panels(reaches + [f"cloze accuracy, {result.measure.widest}"] * bool(items), shared_yaxes=True)
    for panel, reach in enumerate(reaches):
        panels.add(panel, *_by_ratio(result, lambda data, at=reach: _change_of(data, at), conditions))
    panels.axes("% of tokens moved", RISE)
    _show_bars(panels)
    if items:
        x = [100 * float(end) for end in (min(result.measure.ratios), max(result.measure.ratios))]
        panels.add(len(reaches), *_by_ratio(result, lambda data: data["cloze_accuracy"], conditions, (0, 1)))
        chance = line(x, [1 / N_CHOICES] * 2, "chance of the cloze", "black", dash="dot", width=1.2)
        panels.add(len(reaches), chance)
        shown = span_of_bars(panels.figure.select_traces(row=1, col=panels.n_columns))
        panels.figure.update_yaxes(matches=None, showticklabels=True, range=shown, col=panels.n_columns)
    subtitle = f"{TARGET} targets; 95 % intervals over prompts"
    subtitle += f", of the cloze over {items} items" if items else ""
    subtitle += f"{cloze.fewer_of_inits(items)}; random init in grey" if result.nulls else ""
    return panels.finish(f"Loss as order is lost · {model_label(data)}", subtitle)


def draw_matched(result: Any) -> go.Figure:
    """Draw conditions P and F in the same panels, and their differences from P below."""
    data = result.own
    reaches = [str(reach) for reach in data["reach"].values]
    conditions = [str(one) for one in data["condition"].values if one not in OF_TEXT]
    others = [condition for condition in conditions if condition != "positions"]
    panels = Panels(reaches + [""] * len(reaches), columns=len(reaches), shared_yaxes=True, shared_xaxes=True)
    for panel, reach in enumerate(reaches):
        panels.add(panel, *_by_ratio(result, lambda data, at=reach: _change_of(data, at), conditions))
        gaps = _by_ratio(result, lambda data, at=reach: gap_of(_change_of(data, at)), others)
        panels.add(panel + len(reaches), *gaps)
    panels.axes("% of tokens (jitter: of pairs) moved", RISE)
    _show_bars(panels)
    panels.figure.update_yaxes(title_text="the same less P's", row=2, col=1)
    subtitle = (
        f"{TARGET} targets, the same draws; 95 % intervals over prompts, below of the difference from P "
        "within each" + ("; random init in grey" if result.nulls else "")
    )
    return panels.finish(f"Index (P) against features (F) · {model_label(data)}", subtitle)


def _show_bars(panels: Panels) -> None:
    """Let the y axis of every row span its means with their intervals."""
    for row in range(1, panels.n_rows + 1):
        panels.figure.update_yaxes(range=span_of_bars(panels.traces(row), 0.0), row=row)


def span_of_bars(traces: Iterable[Any], *more: float) -> list[float]:
    """Return ends between which curves, their intervals and further values lie, but no more than twice the span of the
    means beyond these: intervals of few prompts may be so wide that the means could not be told apart."""
    drawn = [(trace["y"], trace["error_y"]) for trace in traces]
    means = np.concatenate([list(more), *(y for y, _ in drawn)])
    bottoms = [y - bar["arrayminus"] for y, bar in drawn if bar["arrayminus"] is not None]
    tops = [y + bar["array"] for y, bar in drawn if bar["array"] is not None]
    low, high = float(np.nanmin(means)), float(np.nanmax(means))
    most = BEYOND * (high - low) or 1.0
    low = max(float(np.nanmin(np.concatenate([means, *bottoms]))), low - most)
    high = min(float(np.nanmax(np.concatenate([means, *tops]))), high + most)
    room = 0.05 * (high - low) or 1.0
    return [low - room, high + room]


def _change_of(data: xr.Dataset, reach: str) -> xr.DataArray:
    """Return the change of the loss at one reach, mean over draws."""
    return data["change"].sel(reach=reach, target=TARGET, drop=True).mean("draw")


def gap_of(change: xr.DataArray) -> xr.DataArray:
    """Return changes less that of swapped positions."""
    return change - change.sel(condition="positions", drop=True)


def _by_ratio(
    result: Any,
    of_side: Callable[[xr.Dataset], xr.DataArray],
    conditions: Sequence[str],
    bounds: tuple[int, int] | None = None,
) -> Iterator[go.Scatter]:
    """Yield curves of an array [condition, ratio, and prompt or item] against the ratio with intervals, one per
    condition, the random init's first."""
    for side, data, colour in reversed(sides(result)):
        ends, own = interval_of(of_side(data), bounds), data is result.own
        for condition in conditions:
            shade = COLOURS[CONDITIONS.index(condition) % len(COLOURS)] if own else colour
            drawn, name = (one.sel(condition=condition) for one in ends), WORDS[condition] if own else side
            yield line_with_intervals(100 * data["ratio"].values, drawn, name, shade)


def shown_ratio(ratios: Sequence[float]) -> float:
    """Return the ratio whose changes are shown by token: of those above 0, if there are any, the nearest to SHOWN.

    Example:
        >>> shown_ratio([0.0, 0.02, 0.2, 0.5]), shown_ratio([0.0])
        (0.02, 0.0)
    """
    return min([ratio for ratio in ratios if ratio] or ratios, key=lambda ratio: abs(ratio - SHOWN))


def token_labels(data: xr.Dataset) -> list[str]:
    """Return the condition of each example."""
    share = f"{shown_ratio(data['ratio'].values.tolist()):.0%}"
    words = [WORDS[condition] for condition in data["condition"].values]
    return [f"{one}, {share} moved: change of each token's loss, first prompt; red: worse" for one in words]


def token_page(data: xr.Dataset, example: int) -> Any:
    """Return the tokens of the first prompt in the order the model saw them, coloured by the change of their loss."""
    one = data[["token_change", "token_text"]].isel(condition=example)
    return token_colours([str(token) for token in one["token_text"].values], one["token_change"].values)
