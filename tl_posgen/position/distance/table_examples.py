"""Tables of distance and key for the heads whose key part agrees most and least."""

from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.model import Model
from tl_posgen.models.selection import head_name, parse_head
from tl_posgen.position.distance.numbers.distance_table import distance_table
from tl_posgen.report.figures import DIVERGING, Panels, heat, model_label, sides
from tl_posgen.report.head_figures import thinned

TABLE = ("example", "query_shown", "table_distance", "key")
TABLE_LABELS = {"example": ("most", "least"), "query_shown": ("last query", "mean over queries")}


def table_examples(model: Model, tokens: Int[Tensor, " pos"], key_part_r: xr.DataArray, n_distances: int) -> xr.Dataset:
    """Return M_dj of one prompt, for the heads of highest and lowest `key_part_r`: of the last query, and mean over
    queries.

    M is linear in the query, so the mean over queries is the table of the mean query. Of the distances that the
    table's numbers are of, a choice is kept: all the short ones, ever fewer of the long. NaN for heads without an r.
    """
    ranked = key_part_r.to_series().dropna().sort_values()
    picks = [(int(layer), int(head)) for layer, head in dict.fromkeys([*ranked.index[-1:], *ranked.index[:1]])]
    every = xr.Dataset(coords={"distance": np.arange(min(len(tokens), n_distances))})
    distances = thinned(every, share=1.0)["distance"].values
    found: dict[tuple[int, int], np.ndarray] = {}

    def add_tables(layer: LayerCapture) -> None:
        geometry, q, k = layer.geometry, double(layer.q), double(layer.k)
        at = torch.tensor(distances, device=q.device)
        both = torch.stack(
            [distance_table(one, k, geometry.rope, geometry.scale, at) for one in (q[:, -1], q.mean(1))], 1
        )
        hidden = at >= (geometry.window or torch.inf)  # the table's statistics are over distances in the window
        tables_of_layer = both.masked_fill(hidden[:, None], torch.nan).float().cpu().numpy()
        found.update(zip([(layer.layer, head) for head in layer.heads], tables_of_layer, strict=True))

    if picks:
        run_capture(model, tokens[None], add_tables, heads=picks)
    labels = {name: list(one) for name, one in TABLE_LABELS.items()}
    labels["example"] = labels["example"][: key_part_r.size]  # the same of every random init
    tables = np.full((*map(len, labels.values()), len(distances), len(tokens)), np.nan, dtype=np.float32)
    for place, pick in enumerate(picks):
        tables[place] = found[pick]
    names = [head_name(*pick) for pick in picks] + [""] * (len(tables) - len(picks))
    data = {"table": (TABLE, tables), "example_head": ("example", np.array(names, dtype=object))}
    return xr.Dataset(data, {**labels, "table_distance": distances})


def draw_tables(result: Any) -> go.Figure:
    """Draw the tables as heat maps: horizontal stripes are the distance part, vertical ones the key part."""
    every = [(side, data.isel(example=n)) for side, data, _ in sides(result) for n in range(data.sizes["example"])]
    shown = [(side, one) for side, one in every if one["example_head"].item()]
    queries = TABLE_LABELS["query_shown"]
    titles = [f"{head_title(one)} · {query} · {side}" for side, one in shown for query in queries]
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


def head_title(data: xr.Dataset) -> str:
    """Return "L3H6, key part r .64" of an example, over all prompts."""
    name = str(data["example_head"].item())
    layer, head = parse_head(name)
    r = float(data["key_part_r"].sel(layer=layer, head=head, tokens="without first"))
    return f"{name}, key part r {r:.2f}"
