"""Figures of dummy distances: agreement of the key part, refits, tables, curves of the intervention, and the loss."""

from functools import partial
from typing import Any

import plotly.graph_objects as go
import xarray as xr

from tl_posgen.core.measure import OUT
from tl_posgen.core.result import Result
from tl_posgen.models.selection import parse_head
from tl_posgen.report.figures import DIVERGING, Panels, colour_axis, colours_of, heat, line, model_label, sides
from tl_posgen.report.head_figures import MOST_CURVES, layer_curves, thinned

TABLE_LABELS = {"example": ("most", "least"), "query_shown": ("last query", "mean over queries")}
PARTS = ("distance", "key", "distance × key")
TITLES = {"without first": "first token out", "all": "all tokens"}


def draw_agreement(result: Result) -> go.Figure:
    """Draw the correlation of the key parts of every two distances, mean over heads."""
    shown = [(side, data, tokens) for side, data, _ in sides(result) for tokens in TITLES]
    panels = Panels([f"{side}, {TITLES[tokens]}" for side, _, tokens in shown], columns=2, row_height=380)
    for panel, (_, data, tokens) in enumerate(shown):
        matrix = data["key_agreement"].sel(tokens=tokens).mean(("layer", "head"))
        panels.add(panel, heat(matrix, texttemplate="%{z:.2f}" if matrix.size <= 144 else None))
    panels.figure.update_yaxes(autorange="reversed", type="category").update_xaxes(type="category")
    panels.figure.update_layout(coloraxis=colour_axis(-1.0, 1.0, DIVERGING))
    subtitle = "correlation over keys of the scores at two distances, mean over queries, heads and prompts"
    return panels.axes("d0", "d0").finish(f"Does the key part stay? · {model_label(result.own)}", subtitle)


draw_refits = partial(
    layer_curves,
    measure="refit_r",
    along="d0",
    at=OUT,
    title="The key part, fitted again",
    subtitle="correlation of c at the true distances with c where every pair is at d0; no trend, first token out",
    y_title="correlation",
    log_x=True,
    share=1.0,
)


def draw_curves(result: Result) -> go.Figure:
    """Draw the distance curve of the intervention beside the fitted one, a panel a layer and a colour a head; of many
    heads the medians."""
    layers, data = result.own["layer"].values, thinned(result.own, share=1.0)
    panels = Panels([f"layer {layer}" for layer in layers], row_height=250)
    shown = {dash: data[name] - result.own[name].mean("distance") for name, dash in (("curve", "solid"), ("a", "dot"))}
    names = [f"head {head}" for head in data["head"].values]
    if len(names) > MOST_CURVES:
        names = ["median over heads"]
        shown = {dash: curves.median("head").expand_dims("head") for dash, curves in shown.items()}
    for panel, layer in enumerate(layers):
        for number, (name, colour) in enumerate(zip(names, colours_of(len(names)), strict=True)):
            for dash, curves in shown.items():
                y = curves.sel(layer=layer).isel(head=number).values
                panels.add(panel, line(data["distance"].values + 1, y, name, colour, dash=dash, width=1.5))
    panels.axes("distance + 1", "score less its mean", log_x=True)
    subtitle = "solid: every pair put at d, which fixes the slope; dotted: a of the fit, its slope a convention"
    return panels.finish(f"Score by distance · {model_label(result.own)}", subtitle)


def draw_losses(result: Result) -> go.Figure:
    """Draw the model's loss with every pair at one distance, and with distances frozen beyond a limit."""
    panels = Panels(["every pair at d0", "distances frozen beyond the limit"], columns=2, row_height=280)
    for side, data, colour in sides(result):
        for panel, (name, along) in enumerate((("loss_at", "d0"), ("loss_beyond", "limit"))):
            y = data[name].mean("prompt").values
            panels.add(panel, line(data[along].values + 1, y, side, colour, mode="lines+markers"))
            untouched: Any = {"row": 1, "col": panel + 1, "line_dash": "dot", "line_color": colour}
            panels.figure.add_hline(y=float(data["loss"].mean()), **untouched)
    panels.axes(y="loss, nats per token", log_x=True)
    panels.figure.update_xaxes(title_text="d0 + 1", col=1).update_xaxes(title_text="limit + 1", col=2)
    subtitle = f"{result.own.attrs['heads']} edited; dotted: the untouched model"
    return panels.finish(f"Loss at dummy distances · {model_label(result.own)}", subtitle)


def draw_tables(result: Result) -> go.Figure:
    """Draw the tables as heat maps: horizontal stripes are the distance part, vertical ones the key part."""
    every = [(side, data.isel(example=n)) for side, data, _ in sides(result) for n in range(data.sizes["example"])]
    shown = [(side, one) for side, one in every if one["example_head"].item()]
    queries = TABLE_LABELS["query_shown"]
    titles = [f"{_head_title(one)} · {query} · {side}" for side, one in shown for query in queries]
    panels = Panels(titles, columns=2, row_height=300, horizontal_spacing=0.08)
    for row, (_, one) in enumerate(shown):
        for column, query in enumerate(queries):
            picture = heat(one["table"].sel(query_shown=query).drop_vars(("example", "query_shown")))
            panels.add(2 * row + column, picture.update(coloraxis=None, showscale=False, colorscale=DIVERGING, zmid=0))
    panels.figure.update_annotations(font_size=11).update_yaxes(autorange="reversed", type="category")
    subtitle = (
        "first prompt, each panel on its own scale; r over all, first token out: do rows share a pattern of columns?"
    )
    return panels.axes("key", "distance").finish(f"Scores by distance and key · {model_label(result.own)}", subtitle)


def _head_title(data: xr.Dataset) -> str:
    """Return "L3H6, key part r .64" of an example, over all prompts."""
    name = str(data["example_head"].item())
    layer, head = parse_head(name)
    r = float(data["key_part_r"].sel(layer=layer, head=head, tokens="without first"))
    return f"{name}, key part r {r:.2f}"
