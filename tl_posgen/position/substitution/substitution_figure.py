"""The figure of stand-ins: what each costs against how well it correlates with the scores."""

from typing import Any

import numpy as np
import plotly.graph_objects as go

from tl_posgen.core.measure import HEAD
from tl_posgen.interventions import UNTOUCHED
from tl_posgen.position.substitution.conditions import NOT_OF_ALL
from tl_posgen.report.figures import drawn_models, model_label, named_points, titled


def draw_correlation(result: Any) -> go.Figure:
    """Draw the rise of the loss against the correlation of stand-in and scores, each point with its name."""
    figure, numbers = go.Figure(), result.numbers
    points, named = np.empty((2, 0)), []
    for side, data, colour in reversed(drawn_models(result)):
        stand_ins = data.drop_sel(condition=list(NOT_OF_ALL))
        x = stand_ins["r"].mean(HEAD).values
        y = (stand_ins["loss"] - data["loss"].sel(condition=UNTOUCHED)).mean("prompt").values
        names = [result.measure.in_words(name) for name in stand_ins["condition"].values]
        is_own = data is result.trained
        look = {"mode": "markers", "marker": {"size": 10 if is_own else 7, "color": colour}, "name": side}
        figure.add_trace(go.Scatter(x=x, y=y, hovertext=names, **look))
        if is_own:
            valid = np.isfinite(x) & np.isfinite(y)
            points, named = np.stack([x, y])[:, valid], [name for name, ok in zip(names, valid, strict=True) if ok]
    worth, label = result.measure.worth(numbers).value, "uniform attention"
    figure.add_hline(y=worth, line_dash="dot", annotation_text=label, annotation_position="bottom left")
    figure.update_layout(xaxis_title="r of stand-in and scores, mean over heads", yaxis_title="rise of the loss, nats")
    r, kl = (result.measure.rank(numbers, name).plain for name in ("r", "attention_kl"))
    subtitle = (
        "each point a stand-in; were correlation enough, they would fall from left to right; rank correlation of r "
        f"and share recovered {r:.2f}, of attention KL {kl:.2f}"
    )
    figure = titled(figure, f"Correlation is not mechanism · {model_label(result.trained)}", subtitle, height=560)
    return named_points(figure, points, named, top=worth, height=420) if named else figure
