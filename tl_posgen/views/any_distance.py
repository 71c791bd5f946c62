"""Functions of distance that RoPE can take on, and how additive the heads are that were trained instead."""

import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from tl_posgen.views.style import COLOURS, NULL_COLOUR, check_kind, finish, model_label, sides

KINDS = ("functions", "heads")
EXACT = "inverse DFT"


def plot(dataset: xr.Dataset, null: xr.Dataset | None = None, kind: str = "functions") -> go.Figure:
    """kind "functions": each function with the scores of the head made for it, and of the fits with the model's own
    frequencies; "heads": how near each head's scores are to f(q, d) + g(q, k), beside those functions'."""
    check_kind(kind, KINDS)
    return _functions(dataset) if kind == "functions" else _heads(dataset, null)


def _functions(dataset: xr.Dataset) -> go.Figure:
    names = [str(name) for name in dataset["function"].values]
    figure = make_subplots(
        rows=len(names), cols=1, shared_xaxes=True, subplot_titles=names, vertical_spacing=0.3 / len(names)
    )
    x = dataset["distance"].values
    for row, name in enumerate(names, start=1):
        one = dataset.sel(function=name)
        target = go.Scatter(x=x, y=one["values"].values, mode="lines", line={"color": "black", "width": 5})
        figure.add_trace(target.update(opacity=0.25, name="the function", showlegend=row == 1), row=row, col=1)
        for number, planes in enumerate(str(planes) for planes in dataset["planes"].values):
            at = one.sel(planes=planes)
            trace = go.Scatter(x=x, y=at["scores"].values, line={"color": COLOURS[number % len(COLOURS)], "width": 1.5})
            trace.update(mode="lines+markers" if planes == EXACT else "lines", marker={"size": 4})
            trace.update(name=planes, legendgroup=planes, showlegend=row == 1)
            trace.update(hovertemplate=f"{planes}, distance %{{x}}: %{{y:.3f}}<extra></extra>")
            figure.add_trace(trace, row=row, col=1)
        errors = [f"{float(one['error'].sel(planes=planes)):.2g}" for planes in dataset["planes"].values]
        figure.layout.annotations[row - 1].text = f"{name}: errors {', '.join(errors)}"  # pyright: ignore[reportAttributeAccessIssue]
    figure.update_xaxes(title_text="distance", row=len(names)).update_annotations(font_size=11)
    figure.update_layout(legend={"orientation": "h", "y": -0.06, "x": 0})
    subtitle = (
        "errors in the order of the legend, relative to the function's standard deviation; fits with the model's own "
        "frequencies, the larger rcond with smaller logits; of token pairs the first is drawn"
    )
    title = f"RoPE can take on any function of distance · {model_label(dataset)}"
    return finish(figure, title, subtitle, height=160 + 130 * len(names))


def _heads(dataset: xr.Dataset, null: xr.Dataset | None) -> go.Figure:
    figure = go.Figure()
    for side, data in sides(dataset, null):
        heads = data["head_two_axis_r"].to_series().dropna()
        box = go.Box(x=heads.values, name=side, boxpoints="all", pointpos=0, jitter=0.6, fillcolor="rgba(0,0,0,0)")
        box.update(marker={"color": NULL_COLOUR if data is null else COLOURS[0], "size": 6}, line={"width": 1})
        box.update(text=[f"layer {layer} head {head}" for layer, head in heads.index.to_list()], showlegend=False)
        figure.add_trace(box.update(hovertemplate="%{text}: %{x:.3f}<extra></extra>"))
    made = dataset["two_axis_r"].sel(planes=EXACT).to_series()
    most = str(made.idxmin())
    marker = {"symbol": "star", "size": 13, "color": COLOURS[1]}
    point = go.Scatter(x=[made.min()], y=[f"made by {EXACT}:<br>{most}"], mode="markers", marker=marker)
    figure.add_trace(point.update(showlegend=False, hovertemplate="%{x:.3f}<extra></extra>"))
    figure.update_xaxes(title_text="correlation of the scores with the best f(q, d) + g(q, k)", range=[0, 1.02])
    figure.update_yaxes(autorange="reversed")
    subtitle = "a point a head, over all (query, key, distance); below, the least additive of the functions"
    figure = finish(figure, f"What was learned instead · {model_label(dataset)}", subtitle)
    return figure.update_layout(margin={"l": 150})
