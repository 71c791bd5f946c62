"""Functions of distance with the heads made for them, and how additive the model's own heads are."""

from typing import Any

import plotly.graph_objects as go

from tl_posgen.core.formatting import format_number
from tl_posgen.position.planes.made_scores import INVERSE_DFT, least_additive
from tl_posgen.report.figures import COLOURS, Panels, finish, line, model_label, sides
from tl_posgen.report.head_figures import head_names


def functions(result: Any) -> go.Figure:
    """Draw each function with the scores of the head made for it, and of the fits with the model's own frequencies."""
    data = result.own
    names = [str(name) for name in data["function"].values]
    errors = {
        name: ", ".join(format_number(error, ".2g") for error in data["error"].sel(function=name).values.tolist())
        for name in names
    }
    look: dict[str, Any] = {"row_height": 130, "shared_xaxes": True, "vertical_spacing": 0.3 / len(names)}
    panels = Panels([f"{name}: errors {errors[name]}" for name in names], columns=1, **look)
    x = data["distance"].values
    for panel, name in enumerate(names):
        one = data.sel(function=name)
        panels.add(panel, line(x, one["values"].values, "the function", "black", width=5, opacity=0.25))
        for number, planes in enumerate(str(planes) for planes in data["planes"].values):
            look = {"mode": "lines+markers" if planes == INVERSE_DFT else "lines", "marker": {"size": 4}}
            look["hovertemplate"] = f"{planes}, distance %{{x}}: %{{y:.3f}}<extra></extra>"
            scores = one["scores"].sel(planes=planes).values
            panels.add(panel, line(x, scores, planes, COLOURS[number % len(COLOURS)], width=1.5, **look))
    panels.axes("distance").figure.update_annotations(font_size=11)
    panels.figure.update_layout(legend={"orientation": "h", "y": -0.06, "x": 0})
    subtitle = (
        "errors in the order of the legend, relative to the function's standard deviation; fits with the model's own "
        "frequencies, the larger rcond with smaller logits; of token pairs the first is drawn"
    )
    return panels.finish(f"RoPE can take on any function of distance · {model_label(data)}", subtitle)


def heads(result: Any) -> go.Figure:
    """Draw how near each head's scores are to f(q, d) + g(q, k), beside the least additive of the functions."""
    figure = go.Figure()
    for side, data, colour in sides(result):
        values = data["head_additive_r"].to_series().dropna()
        box = go.Box(x=values.values, name=side, boxpoints="all", pointpos=0, jitter=0.6, fillcolor="rgba(0,0,0,0)")
        box.update(marker={"color": colour, "size": 6}, line={"width": 1}, text=head_names(values.index))
        figure.add_trace(box.update(hovertemplate="%{text}: %{x:.3f}<extra></extra>", showlegend=False))
    least = least_additive(result.own)
    marker = {"symbol": "star", "size": 13, "color": COLOURS[1]}
    x, y = [float(least["additive_r"])], [f"made by {INVERSE_DFT}:<br>{least['function'].item()}"]
    point = go.Scatter(x=x, y=y, mode="markers", marker=marker, showlegend=False)
    figure.add_trace(point.update(hovertemplate="%{x:.3f}<extra></extra>"))
    figure.update_xaxes(title_text="correlation of the scores with the best f(q, d) + g(q, k)", range=[0, 1.02])
    figure.update_yaxes(autorange="reversed")
    subtitle = "a point a head, over all (query, key, distance); below, the least additive of the functions"
    title = f"What was learned instead · {model_label(result.own)}"
    return finish(figure, title, subtitle).update_layout(margin={"l": 150})
