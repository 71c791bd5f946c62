"""How the loss rises as order is lost, in the text, in the index and in the features."""

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


def plot(
    dataset: xr.Dataset, null: xr.Dataset | None = None, kind: str = "curves", target: str = "unmoved"
) -> go.Figure:
    """kind "curves": change of the loss against the ratio; "matched": every arm against P. target: all, unmoved,
    suffix."""
    check_kind(kind, KINDS)
    check_kind(target, [str(name) for name in dataset["target"].values])
    return _curves(dataset, null, target) if kind == "curves" else _matched(dataset, null, target)


def _curves(dataset: xr.Dataset, null: xr.Dataset | None, target: str) -> go.Figure:
    reaches = [str(reach) for reach in dataset["reach"].values]
    figure = make_subplots(cols=len(reaches), rows=1, subplot_titles=reaches, shared_yaxes=True)
    for column, reach in enumerate(reaches, start=1):
        for side, data in reversed(sides(dataset, null)):
            for number, arm in enumerate(str(arm) for arm in data["arm"].values):
                curve = data.sel(reach=reach, arm=arm, target=target)
                mean, low, high = (curve[name].values for name in ("change", "change_low", "change_high"))
                is_null = data is null
                trace = go.Scatter(
                    x=100 * curve["ratio"].values,
                    y=mean,
                    error_y={"array": high - mean, "arrayminus": mean - low, "thickness": 1},
                    name=side if is_null else NAMES.get(arm, arm),
                    legendgroup=side if is_null else arm,
                    showlegend=column == 1 and (number == 0 or not is_null),
                    line={"color": NULL_COLOUR if is_null else COLOURS[number % len(COLOURS)]},
                )
                figure.add_trace(trace, row=1, col=column)
    figure.update_xaxes(title_text="% of tokens moved").update_yaxes(title_text="rise of the loss, nats", col=1)
    subtitle = f"{target} targets; 95 % bootstrap intervals over prompts; the randomly initialised model in grey"
    return finish(figure, f"Loss as order is lost · {model_label(dataset)}", subtitle)


def _matched(dataset: xr.Dataset, null: xr.Dataset | None, target: str) -> go.Figure:
    if "positions" not in dataset["arm"].values:
        raise ValueError("arm 'positions' was not run, so nothing can be matched against it")
    reaches = [str(reach) for reach in dataset["reach"].values]
    figure = make_subplots(cols=len(reaches), rows=1, subplot_titles=reaches)
    change = dataset["change"].sel(target=target)
    others = [str(arm) for arm in dataset["arm"].values if arm != "positions"]
    for column, reach in enumerate(reaches, start=1):
        x = change.sel(reach=reach, arm="positions").values
        for number, arm in enumerate(others):
            trace = go.Scatter(x=x, y=change.sel(reach=reach, arm=arm).values, name=NAMES.get(arm, arm))
            trace.update(mode="lines+markers", legendgroup=arm, showlegend=column == 1)
            figure.add_trace(trace.update(line={"color": COLOURS[number]}), row=1, col=column)
        end = float(max(x.max(), 0))
        diagonal = go.Scatter(x=[0, end], y=[0, end], mode="lines", line={"dash": "dot", "color": NULL_COLOUR})
        figure.add_trace(diagonal.update(name="equal", showlegend=column == 1), row=1, col=column)
    figure.update_xaxes(title_text="rise of the loss under P").update_yaxes(title_text="under the other arm", col=1)
    subtitle = f"{target} targets, at the same ratios and draws; on the dotted line an arm costs what P costs"
    return finish(figure, f"Index against features · {model_label(dataset)}", subtitle)
