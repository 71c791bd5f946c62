"""Coupling, straightness and growth over training."""

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from tl_posgen.views.style import COLOURS, NULL_COLOUR, check_kind, finish, model_label

KINDS = ("headlines", "controls")
PANELS = {
    "headlines": {
        "loss": "loss",
        "coupling": "coupling",
        "line_shape_score": "line-shape score",
        "growth_r2": "R² of growth",
        "expodistance": "expodistance",
    },
    "controls": {
        "swapped": "swapped coupling",
        "trace": "trace normalisation",
        "growth_slope": "growth per layer",
        "linearisation": "linearisation",
    },
}


def plot(dataset: xr.Dataset, null: xr.Dataset | None = None, kind: str = "headlines") -> go.Figure:
    """kind "headlines": the loss, coupling with its chance line, straightness and growth by step; "controls": the
    swapped and the trace version, the growth rate, and the linearisation. Step + 1, logarithmic."""
    check_kind(kind, KINDS)
    panels = PANELS[kind]
    figure = make_subplots(rows=1, cols=len(panels), subplot_titles=list(panels.values()), horizontal_spacing=0.05)
    x = dataset["step"].values + 1
    for column, name in enumerate((name for name in panels if name in dataset), start=1):
        if f"{name}_low" in dataset:
            band = np.concatenate([dataset[f"{name}_high"].values, dataset[f"{name}_low"].values[::-1]])
            area = go.Scatter(x=[*x, *x[::-1]], y=band, fill="toself", fillcolor="rgba(59,111,182,.2)", mode="lines")
            figure.add_trace(area.update(line={"width": 0}, showlegend=False, hoverinfo="skip"), row=1, col=column)
        curves = {name: (model_label(dataset), COLOURS[0])} | (
            {"chance": ("random bases", COLOURS[1])} if name == "coupling" else {}
        )
        for variable, (label, colour) in curves.items():
            line = go.Scatter(x=x, y=dataset[variable].values, mode="lines+markers", line={"color": colour}, name=label)
            figure.add_trace(line.update(showlegend=variable == "chance"), row=1, col=column)
        if null is not None:
            level = np.full(2, float(null[name].squeeze()))
            dotted = go.Scatter(x=x[[0, -1]], y=level, mode="lines", name=model_label(null), legendgroup="null")
            dotted.update(line={"color": NULL_COLOUR, "dash": "dot"}, showlegend=column == 1)
            figure.add_trace(dotted, row=1, col=column)
    figure.update_xaxes(type="log", title_text="step + 1")
    k = dataset.attrs["k"]
    subtitle = f"each checkpoint on the same prompts, 95 % intervals over prompts; top {k} singular vectors"
    return finish(figure, f"Coupling over training · {model_label(dataset)}", subtitle)
