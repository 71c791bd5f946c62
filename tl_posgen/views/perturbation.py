"""How the loss rises as order is lost, in the text, in the index and in the features."""

from collections.abc import Sequence

import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from tl_posgen.views.style import COLOURS, NULL_COLOUR, check_kind, finish, model_label, sides

KINDS = ("curves", "matched")
NAMES = {
    "tokens": "T: tokens swapped",
    "words": "T: words swapped",
    "positions": "P: index of q and k",
    "key_positions": "P = F: index of k",
    "jitter": "F: distances jittered",
    "position_part": "F': position part only",
}


def drawable(dataset: xr.Dataset) -> tuple[str, ...]:
    """Nothing can be matched where positions were not moved."""
    return KINDS if "gap" in dataset and dataset.sizes["arm"] > 1 else KINDS[:1]


def plot(
    dataset: xr.Dataset, null: xr.Dataset | None = None, kind: str = "curves", target: str = "unmoved"
) -> go.Figure:
    """kind "curves": change of the loss against the ratio; "matched": P and F side by side, and what sets them apart.
    target: all, unmoved, suffix."""
    check_kind(kind, KINDS)
    check_kind(target, [str(name) for name in dataset["target"].values])
    return _curves(dataset, null, target) if kind == "curves" else _matched(dataset, null, target)


def _curves(dataset: xr.Dataset, null: xr.Dataset | None, target: str) -> go.Figure:
    arms = [str(arm) for arm in dataset["arm"].values]
    reaches = [str(reach) for reach in dataset["reach"].values]
    figure = make_subplots(cols=len(reaches), rows=1, subplot_titles=reaches, shared_yaxes=True)
    _draw(figure, dataset, null, arms, reaches, ("change", target), row=1)
    figure.update_xaxes(title_text="% of tokens moved").update_yaxes(title_text="rise of the loss, nats", col=1)
    subtitle = f"{target} targets; 95 % bootstrap intervals over prompts; random weights in grey"
    return finish(figure, f"Loss as order is lost · {model_label(dataset)}", subtitle)


def _matched(dataset: xr.Dataset, null: xr.Dataset | None, target: str) -> go.Figure:
    if "gap" not in dataset:
        raise ValueError("arm 'positions' was not run, so nothing can be matched against it")
    arms = [str(arm) for arm in dataset["arm"].values if arm not in ("tokens", "words")]
    reaches = [str(reach) for reach in dataset["reach"].values]
    figure = make_subplots(
        cols=len(reaches), rows=2, subplot_titles=reaches, shared_yaxes=True, shared_xaxes=True, vertical_spacing=0.08
    )
    _draw(figure, dataset, null, arms, reaches, ("change", target), row=1)
    _draw(figure, dataset, null, [arm for arm in arms if arm != "positions"], reaches, ("gap", target), row=2)
    figure.update_xaxes(title_text="% of tokens (jitter: of pairs) moved", row=2)
    figure.update_yaxes(title_text="rise of the loss, nats", row=1, col=1)
    figure.update_yaxes(title_text="the same less P's", row=2, col=1)
    subtitle = (
        f"{target} targets, the same draws; 95 % bootstrap intervals over prompts, below of the difference from P "
        "within each; random weights in grey"
    )
    return finish(figure, f"Index (P) against features (F) · {model_label(dataset)}", subtitle, height=640)


def _draw(
    figure: go.Figure,
    dataset: xr.Dataset,
    null: xr.Dataset | None,
    arms: Sequence[str],
    reaches: Sequence[str],
    measure: tuple[str, str],
    row: int,
) -> None:
    """One row of panels, a reach each: a variable and target against the ratio, arm by arm, the null's behind."""
    variable, target = measure
    for column, reach in enumerate(reaches, start=1):
        for side, data in reversed(sides(dataset, null)):
            for arm in arms:
                curve = data.sel(reach=reach, arm=arm, target=target)
                mean, low, high = (curve[f"{variable}{end}"].values for end in ("", "_low", "_high"))
                is_null = data is null
                colour = NULL_COLOUR if is_null else COLOURS[list(NAMES).index(arm) % len(COLOURS)]
                trace = go.Scatter(
                    x=100 * curve["ratio"].values,
                    y=mean,
                    error_y={"array": high - mean, "arrayminus": mean - low, "thickness": 1},
                    name=side if is_null else NAMES.get(arm, arm),
                    legendgroup=side if is_null else arm,
                    showlegend=column == 1 and row == 1 and (arm == arms[0] or not is_null),
                    line={"color": colour},
                    mode="lines+markers",
                    marker={"size": 4},
                )
                figure.add_trace(trace, row=row, col=column)
