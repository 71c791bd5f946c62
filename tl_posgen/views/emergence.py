"""How measures form over training."""

from collections.abc import Sequence

import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from tl_posgen.views.style import COLOURS, NULL_COLOUR, check_kind, finish, model_label

KINDS = ("means", "heads")
MEASURES = ("three_axis_r", "three_axis_r_visible", "variance_position", "variance_meaning", "variance_interaction")


def plot(
    dataset: xr.Dataset,
    null: xr.Dataset | None = None,
    kind: str = "means",
    measures: Sequence[str] | None = None,
) -> go.Figure:
    """kind "means": the loss and each measure's mean over heads; "heads": one line a head. Step + 1, logarithmic."""
    check_kind(kind, KINDS)
    shown = [name for name in measures or MEASURES if name in dataset] or [
        str(name) for name, array in dataset.data_vars.items() if "head" in array.dims
    ][:6]
    panels = ["loss", *shown]
    figure = make_subplots(cols=len(panels), rows=1, subplot_titles=[name.replace("_", " ") for name in panels])
    x = dataset["step"].values + 1
    for column, name in enumerate(panels, start=1):
        array = dataset[name]
        if name == "loss" or kind == "means":
            values = array if name == "loss" else array.mean(("layer", "head"))
            line = go.Scatter(x=x, y=values.values, mode="lines+markers", line={"color": COLOURS[0]}, name="mean")
            figure.add_trace(line.update(showlegend=False), row=1, col=column)
        else:
            heads = array.stack(unit=("layer", "head"))
            for unit in range(heads.sizes["unit"]):
                layer, head = heads["unit"].values[unit]
                trace = go.Scatter(x=x, y=heads.isel(unit=unit).values, mode="lines", name=f"layer {layer}")
                trace.update(line={"color": COLOURS[int(layer) % len(COLOURS)], "width": 1})
                trace.update(legendgroup=f"layer {layer}", showlegend=column == 2 and int(head) == 0)
                trace.update(hovertemplate=f"layer {layer}, head {head}: %{{y:.3f}}<extra></extra>")
                figure.add_trace(trace, row=1, col=column)
        if null is not None:
            level = float(null[name].mean())
            figure.add_hline(y=level, line_dash="dot", line_color=NULL_COLOUR, row=1, col=column)  # pyright: ignore[reportArgumentType]
    figure.update_xaxes(type="log", dtick=1, title_text="step + 1")
    subtitle = "each checkpoint on the same prompts; dotted: mean of a randomly initialised model of the same shape"
    return finish(figure, f"Emergence over training · {model_label(dataset)}", subtitle)
