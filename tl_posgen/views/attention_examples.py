"""The most and the least position-driven heads: true pattern, pattern of the additive fit, and their difference."""

import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from tl_posgen.views.circuits import CROP, attention_maps
from tl_posgen.views.style import check_kind, finish, model_label

KINDS = ("patterns",)
MAPS = {"pattern": "true", "additive_pattern": "additive", "residual": "true - add."}


def show(dataset: xr.Dataset, example: int = 0):
    """A circuitsvis page of one example head: the three maps over the prompt's first 128 tokens."""
    head = dataset.isel(example=example)
    maps = head[list(MAPS)].to_array("map").transpose("map", "query", "key").values
    return attention_maps(maps, [str(token) for token in dataset["token"].values], list(MAPS.values()))


def examples(dataset: xr.Dataset) -> list[str]:
    """Which head each example is, and why it was picked."""
    names = []
    for number in range(dataset.sizes["example"]):
        head = dataset.isel(example=number)
        where = f"layer {int(head['layer'])}, head {int(head['head'])}"
        names.append(f"{where}: {head['why'].item()} (r within rows {float(head['r_visible']):.3f})")
    return names


def drawable(dataset: xr.Dataset) -> tuple[str, ...]:
    """None of them on a page, which has the token-level view."""
    return ()


def plot(dataset: xr.Dataset, null: xr.Dataset | None = None, kind: str = "patterns") -> go.Figure:
    """The same maps as heat maps, a row per example head."""
    check_kind(kind, KINDS)
    n = dataset.sizes["example"]
    titles = [
        f"L{int(dataset['layer'][e])}H{int(dataset['head'][e])} · {name}" for e in range(n) for name in MAPS.values()
    ]
    figure = make_subplots(rows=n, cols=3, subplot_titles=titles, horizontal_spacing=0.05, vertical_spacing=0.25 / n)
    for example in range(n):
        for column, name in enumerate(MAPS, start=1):
            array = dataset[name].isel(example=example, query=slice(CROP), key=slice(CROP))
            colours = (
                {"colorscale": "RdBu", "zmid": 0}
                if name == "residual"
                else {"colorscale": "Viridis", "zmin": 0, "zmax": 1}
            )
            figure.add_trace(go.Heatmap(z=array.values, showscale=False, **colours), row=example + 1, col=column)
    figure.update_yaxes(autorange="reversed")
    figure.update_annotations(font_size=11)
    return finish(figure, f"True and additive attention · {model_label(dataset)}", height=120 + 280 * n)
