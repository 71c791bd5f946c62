"""Task scores as order is lost."""

import plotly.graph_objects as go
import xarray as xr

from tl_posgen.views.perturbation import NAMES
from tl_posgen.views.style import COLOURS, NULL_COLOUR, check_kind, finish, model_label, sides

KINDS = ("accuracy_per_byte", "accuracy", "log_likelihood")
LABELS = {
    "accuracy_per_byte": "accuracy, choices by log-likelihood per byte",
    "accuracy": "accuracy, choices by log-likelihood",
    "log_likelihood": "log-likelihood of the right choice, nats per token",
}


def plot(dataset: xr.Dataset, null: xr.Dataset | None = None, kind: str = "accuracy_per_byte") -> go.Figure:
    """kind: which score, against the share of the context's tokens moved."""
    check_kind(kind, KINDS)
    figure = go.Figure()
    for side, data in reversed(sides(dataset, null)):
        is_null = data is null
        for number, arm in enumerate(str(arm) for arm in data["arm"].values):
            mean, low, high = (data[f"{kind}{end}"].sel(arm=arm).values for end in ("", "_low", "_high"))
            trace = go.Scatter(
                x=100 * data["ratio"].values,
                y=mean,
                error_y=None if is_null else {"array": high - mean, "arrayminus": mean - low, "thickness": 1},
                name=side if is_null else NAMES.get(arm, arm),
                legendgroup=side if is_null else arm,
                showlegend=number == 0 or not is_null,
                line={"color": NULL_COLOUR if is_null else COLOURS[number % len(COLOURS)]},
            )
            figure.add_trace(trace)
    if kind != "log_likelihood":
        figure.add_hline(y=float(dataset["chance"]), line_dash="dot", annotation_text="chance")
    figure.update_layout(xaxis_title="% of the context's tokens moved", yaxis_title=LABELS[kind])
    subtitle = f"{dataset.attrs['items']} items; bars: 95 % bootstrap intervals over items; random weights in grey"
    return finish(figure, f"Task scores as order is lost · {model_label(dataset)}", subtitle)
