"""Beyond the training length: loss, drift of the outputs, entropy and normaliser."""

import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from tl_posgen.views.style import COLOURS, NULL_COLOUR, check_kind, finish, model_label, sides

KINDS = ("loss", "drift", "attention")
DASHES = ("solid", "dash", "dot", "dashdot")


def plot(dataset: xr.Dataset, null: xr.Dataset | None = None, kind: str = "loss") -> go.Figure:
    """kind "loss": by position with intervals; "drift": outputs against their training distribution; "attention":
    entropy and normaliser by position, mean over heads."""
    check_kind(kind, KINDS)
    return {"loss": _loss, "drift": _drift, "attention": _attention}[kind](dataset, null)


def _loss(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    both = sides(dataset, null)
    figure = make_subplots(cols=len(both), rows=1, subplot_titles=[side for side, _ in both])
    for column, (_, data) in enumerate(both, start=1):
        for number, arm in enumerate(str(arm) for arm in data["arm"].values):
            mean, low, high = (data[name].sel(arm=arm).values for name in ("loss", "loss_low", "loss_high"))
            trace = go.Scatter(x=data["bin"].values, y=mean, name=arm, legendgroup=arm, showlegend=column == 1)
            trace.update(error_y={"array": high - mean, "arrayminus": mean - low, "thickness": 1})
            trace.update(line={"color": COLOURS[number]}, mode="lines+markers", marker={"size": 4})
            figure.add_trace(trace, row=1, col=column)
    _mark_training_length(figure, dataset)
    figure.update_xaxes(title_text="position").update_yaxes(title_text="loss, nats per token", col=1)
    subtitle = "bars: 95 % bootstrap intervals over prompts; the axes differ"
    return finish(figure, f"Loss beyond the training length · {model_label(dataset)}", subtitle)


def _attention(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    labels = {"entropy": "entropy, nats", "normaliser": "normaliser, ln sum exp"}
    figure = make_subplots(cols=2, rows=1, subplot_titles=list(labels.values()))
    for column, name in enumerate(labels, start=1):
        for trace in _traces(dataset, null, "bin", lambda data, name=name: data[name].mean(("layer", "head"))):
            figure.add_trace(trace.update(showlegend=column == 1, mode="lines"), row=1, col=column)
    _mark_training_length(figure, dataset)
    figure.update_xaxes(title_text="position")
    subtitle = "mean over heads; grey: random weights"
    return finish(figure, f"Attention beyond the training length · {model_label(dataset)}", subtitle)


def _drift(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    measures = {
        "frechet": "Frechet distance / noise floor",
        "mahalanobis": "Mahalanobis, of the inside's",
        "norm_ratio": "norm, of the inside's",
    }
    figure = make_subplots(cols=len(measures), rows=1, subplot_titles=list(measures.values()))

    def of(data: xr.Dataset, name: str) -> xr.DataArray:
        values = data[name] / data["floor"] if name == "frechet" else data[name]
        return values.median(("layer", "head"))

    for column, name in enumerate(measures, start=1):
        for trace in _traces(dataset, null, "segment", lambda data, name=name: of(data, name)):
            figure.add_trace(trace.update(showlegend=column == 1, mode="lines+markers"), row=1, col=column)
        note = "noise floor" if name == "frechet" else "no drift"
        figure.add_hline(y=1, line_dash="dot", annotation_text=note, row=1, col=column)  # pyright: ignore[reportArgumentType]
    figure.update_xaxes(title_text="segment, in training lengths", dtick=1)
    subtitle = (
        "outputs o of each head against those of the untouched model inside the training length; median over heads; "
        "grey: random weights"
    )
    return finish(figure, f"Drift of the outputs · {model_label(dataset)}", subtitle)


def _traces(dataset: xr.Dataset, null: xr.Dataset | None, along: str, of) -> list[go.Scatter]:
    """A line an arm; the null's in grey behind them, told apart by their dashes."""
    traces = []
    for side, data in reversed(sides(dataset, null)):
        is_null = data is null
        for number, arm in enumerate(str(arm) for arm in data["arm"].values):
            values = of(data.sel(arm=arm))
            colour = NULL_COLOUR if is_null else COLOURS[number]
            line = {"color": colour, "dash": DASHES[number % len(DASHES)] if is_null else "solid"}
            x = values[along].values + (1 if along == "segment" else 0)
            name = f"{side}, {arm}" if is_null else arm
            traces.append(go.Scatter(x=x, y=values.values, name=name, line=line, opacity=0.7 if is_null else 1))
    return traces


def _mark_training_length(figure: go.Figure, dataset: xr.Dataset) -> None:
    note = {"annotation_text": "training length", "annotation_font_size": 10}
    figure.add_vline(x=int(dataset.attrs["inside"]), line_dash="dash", line_color=NULL_COLOUR, **note)
