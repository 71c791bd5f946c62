"""Figures of bands ablated in the running model: the loss, the slash heads that are left, the strongest heads."""

from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.core.measure import in_words
from tl_posgen.report.figures import colour_axis, finish, heat, model_label
from tl_posgen.report.kinds import bars
from tl_posgen.slash.head_groups import mean_of_slash_heads, n_slash_heads, n_slash_heads_kept
from tl_posgen.slash.layer_means import strongest_named
from tl_posgen.slash.slash_ablation import WHOLE_KINDS

N_HEADS = 12  # the strongest, drawn one by one


slash_bars = bars(
    {
        "mean slash score of the slash heads": [
            ("in the running model", lambda own: mean_of_slash_heads(own.dataset)),
            ("one layer alone", lambda own: mean_of_slash_heads(own.dataset, "score_alone")),
        ],
        "slash heads": [
            ("slash-dominant", lambda own: n_slash_heads(own.dataset)),
            ("of those before", lambda own: n_slash_heads_kept(own.dataset)),
        ],
    },
    "condition",
    title="Slash heads without a band of RoPE",
    subtitle="each head at its own distance; dominant: a score of {kappa} at one of the distances {distances}",
    form=".3g",
)


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
