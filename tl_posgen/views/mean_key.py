"""How well the mean-key split f(q, i-j) + g(q, k) reproduces the scores, by dummy distance."""

import plotly.graph_objects as go
import xarray as xr

from tl_posgen.views.style import check_kind, head_maps, layer_curves, model_label

KINDS = ("map", "curves")


def plot(dataset: xr.Dataset, null: xr.Dataset | None = None, kind: str = "map") -> go.Figure:
    """kind "map": r of every head at the headline distance; "curves": r against the dummy distance."""
    check_kind(kind, KINDS)
    model, d0 = model_label(dataset), dataset.attrs.get("d0")
    if kind == "map":
        measures = {"mean_key_r": "r", "mean_key_r_no_first": "r, first token left out"}
        subtitle = f"f + g with the head's mean key and dummy distance d0 = {d0} (our reconstruction)"
        return head_maps(dataset, null, measures, title=f"Mean-key split · {model}", subtitle=subtitle)
    return layer_curves(
        dataset,
        null,
        "r_by_distance",
        "d0",
        title=f"Mean-key split by dummy distance · {model}",
        subtitle="correlation of the scores with f(q, i-j) + g(q, k); one line a head",
        y_title="r",
        log_x=True,
    )
