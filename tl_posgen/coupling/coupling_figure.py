"""The figure of trajectories: tokens' paths through the layers in their top two principal components."""

from typing import Any

import plotly.graph_objects as go

from tl_posgen.report.figures import COLOURS, Panels, drawn_models, line, model_label

_MOST_TOKENS = 16  # paths drawn of a prompt


def draw_trajectories(result: Any) -> go.Figure:
    """Draw the last tokens of the first prompt in their top two principal components."""
    models, score = drawn_models(result), result.numbers("line_shape_score")
    scores = (score.value, *(values[0] for values in score.by_null.values()))
    titles = [f"{label}: line-shape score {value:.2f}" for (label, *_), value in zip(models, scores, strict=True)]
    panels, n_blocks = Panels(titles, columns=len(models), row_height=320), result.trained.sizes["state"] - 1
    for number, (_, data, _) in enumerate(models):
        first = data.isel(prompt=0)
        paths = first["trajectory"].dropna("position")
        for place, position in enumerate(paths["position"].values[-_MOST_TOKENS:]):
            x, y = paths.sel(position=position).transpose("component", "state").values
            colour = COLOURS[place % len(COLOURS)]
            marker = {"size": [7] + [4] * n_blocks, "color": ["white"] + [colour] * n_blocks}
            marker["line"] = {"color": "black", "width": [1] + [0] * n_blocks}
            states = [f"x{state}" for state in paths["state"].values]
            style = {"mode": "lines+markers", "marker": marker, "text": states, "showlegend": False}
            panels.add(number, line(x, y, f"token {position}", colour, width=1.0, **style))
        for axis, update in enumerate((panels.figure.update_xaxes, panels.figure.update_yaxes)):
            share = float(first["trajectory_explained"].values[axis])
            update(title_text=f"principal component {axis + 1} ({share:.0%} of the variance)", row=1, col=number + 1)
    subtitle = f"x0 (white) to x{n_blocks}, last {_MOST_TOKENS} tokens of the first prompt; 1 is a line"
    return panels.titled(f"Trajectories through the layers · {model_label(result.trained)}", subtitle)
