"""Beyond the training length: loss, drift of the outputs, entropy and normaliser."""

import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from tl_posgen.views.style import COLOURS, NULL_COLOUR, check_kind, finish, model_label, sides

KINDS = ("loss", "drift", "entropy", "normaliser")


def plot(dataset: xr.Dataset, null: xr.Dataset | None = None, kind: str = "loss") -> go.Figure:
    """kind "loss": by position with intervals; "drift": outputs against their training distribution; "entropy" and
    "normaliser" of attention by position, mean over heads."""
    check_kind(kind, KINDS)
    if kind == "drift":
        return _drift(dataset, null)
    figure = go.Figure()
    inside = int(dataset.attrs["inside"])
    for side, data in reversed(sides(dataset, null)):
        is_null = data is null
        for number, arm in enumerate(str(arm) for arm in data["arm"].values):
            curve = data.sel(arm=arm)
            values = curve[kind] if kind == "loss" else curve[kind].mean(("layer", "head"))
            name = f"{side}, {arm}" if is_null else arm
            line = {"color": NULL_COLOUR if is_null else COLOURS[number], "dash": "dot" if is_null else "solid"}
            trace = go.Scatter(x=data["bin"].values, y=values.values, name=name, line=line, mode="lines")
            if kind == "loss" and not is_null:
                up, down = curve["loss_high"] - values, values - curve["loss_low"]
                trace.update(error_y={"array": up.values, "arrayminus": down.values, "thickness": 1})
            figure.add_trace(trace)
    figure.add_vline(x=inside, line_dash="dash", annotation_text="training length")
    labels = {
        "loss": "loss, nats per token",
        "entropy": "entropy, nats, mean over heads",
        "normaliser": "ln sum exp of the scores, mean over heads",
    }
    figure.update_layout(xaxis_title="position", yaxis_title=labels[kind])
    subtitle = "bars: 95 % bootstrap intervals over prompts. Dotted grey: the randomly initialised model"
    return finish(figure, f"{kind.capitalize()} beyond the training length · {model_label(dataset)}", subtitle)


def _drift(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    measures = {
        "frechet": "Frechet / variance inside",
        "mahalanobis": "Mahalanobis",
        "norm_ratio": "norm ratio",
    }
    figure = make_subplots(cols=len(measures), rows=1, subplot_titles=list(measures.values()))
    for column, name in enumerate(measures, start=1):
        for side, data in reversed(sides(dataset, null)):
            is_null = data is null
            arms = ["vanilla"] if is_null else [str(arm) for arm in data["arm"].values]
            for number, arm in enumerate(arms):
                values = data[name].sel(arm=arm).median(("layer", "head"))
                line = {"color": NULL_COLOUR if is_null else COLOURS[number]}
                trace = go.Scatter(x=1 + values["segment"].values, y=values.values, name=side if is_null else arm)
                figure.add_trace(
                    trace.update(line=line, showlegend=column == 1, mode="lines+markers"), row=1, col=column
                )
        if name == "frechet":
            floor = float(dataset["floor"].sel(arm="vanilla").median())
            figure.add_hline(y=floor, line_dash="dot", annotation_text="noise floor", row=1, col=column)  # pyright: ignore[reportArgumentType]
    figure.update_xaxes(title_text="multiple of the training length")
    subtitle = "outputs o of each head against the untouched model inside the training length; median over heads"
    return finish(figure, f"Drift of the outputs · {model_label(dataset)}", subtitle)
