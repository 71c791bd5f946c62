"""Figures and tables of the residual: by direction, distance, plane and token pair; by token."""

from functools import partial
from itertools import product, zip_longest
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.core.numbers import Numbers
from tl_posgen.models.selection import head_name
from tl_posgen.report.circuits import attention_maps
from tl_posgen.report.figures import COLOURS, DIVERGING, Panels, colour_axis, heat, model_label, sides
from tl_posgen.report.head_figures import head_map, head_rows, layer_curves, said_of_rows

N_PANELS = 4  # heads whose token pairs are drawn
TABLE_ROWS = 12
MAPS = ("left over", "position + key", "scores")
OUT = {"tokens": "without first"}
PLANES = {"residual": "of the residual", "scores": "of the scores within rows"}


def kinds(data: xr.Dataset) -> list[str]:
    """Return the kinds of figures that there is something to draw of: planes where the encoding has some, tokens where
    the model was given token ids."""
    needed = {"planes": "plane_share", "tokens": "pair_share", "spectrum": "spectrum", "distances": "energy_ratio"}
    names = {kind: needed.get(kind, "share") for kind in FIGURES}
    left = data.sel(OUT | {"of": "residual"} if "of" in data.dims else OUT)
    return [kind for kind, name in names.items() if name in data and bool(left[name].notnull().any())]


def _draw_planes(result: Any) -> go.Figure:
    """Draw heads down, planes across: the residual's share beside the scores'; the null below."""
    both = sides(result)
    arrays = [
        head_rows(data["plane_share"].sel(OUT | {"of": name}, drop=True), "plane")
        for _, data, _ in both
        for name in PLANES
    ]
    panels = Panels(
        [f"{label} · {side}" for side, _, _ in both for label in PLANES.values()],
        columns=2,
        row_height=max(200, min(9 * max(map(len, arrays)), 900)),
        shared_xaxes=True,
        horizontal_spacing=0.08,
    )
    for number, array in enumerate(arrays):
        panels.add(number, heat(array))
    lengths = result.own["wavelength"].dropna("layer", how="all").isel(layer=0).values
    ticks = [f"{x:.2g}" if x < 100 else f"{x:.0f}" if x < 1000 else f"{x / 1000:.2g}k" for x in lengths]
    every = slice(None, None, -(-len(ticks) // 16))
    panels.figure.update_yaxes(type="category", autorange="reversed")
    panels.figure.update_xaxes(type="linear", tickvals=np.arange(len(ticks))[every], ticktext=ticks[every], tickangle=0)
    reach = max(float(abs(array).fillna(0).max()) for array in arrays)
    panels.figure.update_layout(coloraxis=colour_axis(-reach, reach, DIVERGING) | {"reversescale": True})
    panels.axes("wavelength of the plane, tokens (first layer's)")
    return panels.finish(
        f"Residual by RoPE plane · {model_label(result.own)}",
        "first token left out; a head's shares add up to 1 over planes and what does not rotate; below 0: works "
        "against the others" + said_of_rows(arrays[0]),
    )


def _draw_tokens(result: Any) -> go.Figure:
    """Draw a panel for each of the heads that leave most, the null's to the right: a bar a kind of token pair."""
    both = sides(result)
    left = [data["share"].sel(OUT).transpose("layer", "head").to_series().dropna() for _, data, _ in both]
    shown = list(zip_longest(*(shares.nlargest(N_PANELS).index.to_list() for shares in left)))
    titles = [
        f"{head_name(*unit)} · {side}" if unit else ""
        for row in shown
        for unit, (side, *_) in zip(row, both, strict=True)
    ]
    panels = Panels(titles, columns=len(both), horizontal_spacing=0.16)
    for number, (row, column) in enumerate(product(shown, range(len(both)))):
        if unit := row[column]:
            panels.add(number, _bars(both[column][1].sel(OUT | {"layer": unit[0], "head": unit[1]})))
    panels.figure.update_yaxes(autorange="reversed", type="category")
    return panels.axes("mean residual, logits").finish(
        f"Token pairs in the residual · {model_label(result.own)}",
        "query token → key token, × how often, share of the head's residual it explains; orange: above the fit, blue: "
        "below",
    )


def _bars(pairs: xr.Dataset) -> go.Bar:
    """Return a bar for each kind of token pair of one head."""
    query, key = (_token_texts(pairs, "pair_token").sel(side=side).values for side in ("q", "k"))
    mean, count, share = (pairs[f"pair_{name}"].values for name in ("residual", "count", "share"))
    known = np.flatnonzero((count > 0) & (share == share))
    return go.Bar(
        x=mean[known],
        y=[f"{rank + 1}. {_quoted(query[rank])} → {_quoted(key[rank])}" for rank in known],
        orientation="h",
        marker_color=[COLOURS[0] if mean[rank] < 0 else COLOURS[1] for rank in known],
        text=[f"×{count[rank]:.0f}, {share[rank]:.1%}" for rank in known],
        textposition="auto",
        hovertemplate="%{y}: mean %{x:.3g} logits, %{text}<extra></extra>",
        showlegend=False,
    )


def _quoted(token: object) -> str:
    """Return a token in quotes on one line."""
    text = str(token).replace("\n", "↵").replace("\t", "⇥").replace("<", "&lt;")
    return f"“{text}”"


def _token_texts(data: xr.Dataset, name: str) -> xr.DataArray:
    """Return the texts of a variable of token ids; the ids where no tokenizer was known."""
    return data.get(f"{name}_text", data[name])


def table(own: Numbers) -> pd.DataFrame:
    """Return the heads that leave most and their token pairs; without token ids, what every head leaves."""
    if len(pairs := _strongest_pairs(own.side)):
        return pairs
    columns = {
        "share": own.array("share"),
        "share without first token": own.array("share", **OUT),
        "residual, logits": own.array("std"),
        "top share without first token": own.array("top_share", **OUT),
    }
    frame = own.frame(columns, "layer", "head")
    return frame.dropna(how="all", subset=list(columns)).reset_index(drop=True)


def _strongest_pairs(data: xr.Dataset) -> pd.DataFrame:
    """Return the strongest kind of token pair of each of the heads that leave most, first token left out; none without
    token ids."""
    if "pair_token" not in data:
        return pd.DataFrame()
    first = data.sel(OUT | {"rank": 1}, drop=True)
    query, key = (_token_texts(first, "pair_token").sel(side=side, drop=True) for side in ("q", "k"))
    columns = {"left": first["share"], "query token": query, "key token": key}
    columns |= {"mean residual": first["pair_residual"], "pairs": first["pair_count"], "share": first["pair_share"]}
    series = {name: array.transpose("layer", "head").to_series() for name, array in columns.items()}
    frame = pd.DataFrame(series).dropna().nlargest(TABLE_ROWS, "left").astype({"pairs": int})
    return frame.assign(**{name: frame[name].map(repr) for name in ("query token", "key token")}).reset_index()


def labels(data: xr.Dataset) -> list[str]:
    """Return the head of each example, and how much the fit leaves of it on this prompt."""
    if "example_share" not in data:
        return []
    places = zip(data["example_layer"].values, data["example_head"].values, data["example_share"].values, strict=True)
    words = "of the variance within rows (first token left out)"
    return [f"{head_name(layer, head)}: position + query + key leave {one:.0%} {words}" for layer, head, one in places]


def show(data: xr.Dataset, example: int) -> Any:
    """Return a circuitsvis page of one head: what is left over, position + key, and the scores, within rows, in logits.

    One colour scale for the three: red above the row's mean, blue below; full colour at four times the standard
    deviation of the residual.
    """
    head = data.isel(example=example)
    residual, scores = (head["example_map"].sel(of=name).transpose("query", "key").values for name in PLANES)
    reach = 4 * float(np.sqrt(np.mean(residual[np.tril_indices_from(residual)] ** 2)))
    colours = {"negative_color": "blue", "positive_color": "red"}
    texts = [str(token) for token in _token_texts(data, "example_token").values]
    maps = np.stack([residual, scores - residual, scores])
    return attention_maps(maps, texts, MAPS, max_value=reach, min_value=-reach, **colours)


FIGURES = {
    "map": head_map(
        *("share", ("share", OUT), ("top_share", OUT)),
        title="What the three-axis fit leaves",
        subtitle="share of the variance within rows that a(i-j) + b(i) + c(j) leaves; its top singular direction",
    ),
    "spectrum": partial(
        layer_curves,
        measure="spectrum",
        along="component",
        at=OUT,
        title="Spectrum of the residual",
        subtitle="share of the residual's energy in its r-th singular direction, first token left out",
        y_title="share",
    ),
    "distances": partial(
        layer_curves,
        measure="energy_ratio",
        along="distance",
        at=OUT,
        title="Residual by distance",
        subtitle="energy of a pair at that distance over that of the average pair, first token left out; 1: even",
        y_title="energy ratio",
        log_x=True,
    ),
    "planes": _draw_planes,
    "tokens": _draw_tokens,
}
