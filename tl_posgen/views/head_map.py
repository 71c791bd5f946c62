"""Head maps of every scalar of a result: the view of results that have none of their own."""

import plotly.graph_objects as go
import xarray as xr

from tl_posgen.views.style import check_kind, head_maps, model_label

KINDS = ("map",)


def plot(dataset: xr.Dataset, null: xr.Dataset | None = None, kind: str = "map", title: str = "") -> go.Figure:
    """A layer x head map for each variable with just these two dimensions."""
    check_kind(kind, KINDS)
    scalars = {
        str(name): str(name) for name, array in dataset.data_vars.items() if set(array.dims) == {"layer", "head"}
    }
    if not scalars:
        raise ValueError("nothing to map: the result has no variable with just the dimensions layer and head")
    return head_maps(dataset, null, scalars, title=title or f"Per head · {model_label(dataset)}", limits=None)
