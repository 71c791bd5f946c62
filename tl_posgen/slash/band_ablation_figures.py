"""Figures of bands ablated in the running model: the loss, the slash heads that are left, the strongest heads."""

from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.core.measure import in_words
from tl_posgen.report.figures import (
    COLOURS,
    NULL_COLOUR,
    Panels,
    colour_axis,
    finish,
    heat,
    model_label,
)
from tl_posgen.slash.head_groups import mean_of_slash_heads, n_slash_heads, n_slash_heads_kept
from tl_posgen.slash.layer_means import strongest_named
from tl_posgen.slash.slash_ablation import WHOLE_KINDS

N_HEADS = 12  # the strongest, drawn one by one


def slash_bars(result: Any) -> go.Figure:
    """Draw the mean slash score and the number of the slash heads under every condition."""
    data, null, height = result.own, result.null, 90 + 30 * result.own.sizes["condition"]
    titles = ["mean slash score of the slash heads", "slash heads"]
    panels = Panels(titles, columns=2, row_height=height, shared_yaxes=True, horizontal_spacing=0.04)
    panels.add(
        0,
        bar(mean_of_slash_heads(data).mean("prompt"), "in the running model", COLOURS[0]),
        bar(mean_of_slash_heads(data, "score_alone"), "one layer alone", COLOURS[5]),
        *([] if null is None else [bar(mean_of_slash_heads(null).mean("prompt"), model_label(null), NULL_COLOUR)]),
    )
    panels.add(
        1,
        bar(n_slash_heads(data), "slash-dominant", COLOURS[1]),
        bar(n_slash_heads_kept(data), "of those before", COLOURS[4]),
        *([] if null is None else [bar(n_slash_heads(null), model_label(null), NULL_COLOUR)]),
    )
    panels.figure.update_yaxes(autorange="reversed", automargin=True).update_layout(barmode="group", bargap=0.25)
    subtitle = (
        f"each head at its own distance; dominant: a score of {result.measure.kappa} at one of the distances "
        f"{', '.join(map(str, sorted(result.measure.distances)))}"
    )
    return panels.finish(f"Slash heads without a band of RoPE · {model_label(data)}", subtitle)


def strongest_heads(result: Any) -> go.Figure:
    """Draw the strongest heads, condition by condition."""
    data = result.own[["score", "best_distance"]].mean("prompt")
    heads = strongest_named(data, data["score"].sel(condition="unchanged"), N_HEADS)
    scores = np.stack([one["score"].values for one in heads.values()], 1)
    words = [in_words(condition, WHOLE_KINDS) for condition in data["condition"].values]
    grid = xr.DataArray(scores, {"condition": words, "head": [*heads]}, ("condition", "head"))
    figure = go.Figure(heat(grid, texttemplate="%{z:.2f}"))
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_layout(coloraxis=colour_axis(0.0, float(grid.max())))
    subtitle = "slash score in the running model, each head at its best distance D of the unchanged one"
    title = f"The strongest slash heads, ablated · {model_label(result.own)}"
    return finish(figure, title, subtitle, height=160 + 24 * data.sizes["condition"])


def bar(array: xr.DataArray, name: str, colour: str, **more: Any) -> go.Bar:
    """Return a bar for every condition."""
    y = [in_words(condition, WHOLE_KINDS) for condition in array["condition"].values]
    return go.Bar(x=array.values, y=y, orientation="h", name=name, marker_color=colour, **more)
