"""Figures and table of the three-axis residual: by direction, distance, plane and token pair, and token by token."""

from functools import partial
from itertools import product, zip_longest
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.report.circuits import attention_maps
from tl_posgen.report.figures import (
    COLOURS,
    DIVERGING,
    Panels,
    colour_axis,
    head_map,
    head_rows,
    heat,
    layer_curves,
    model_label,
    sides,
)

N_PANELS = 4  # heads whose token pairs are drawn
TABLE_ROWS = 12
MAPS = ("left over", "position + key", "scores")
PLANES = {
    "plane_share_without_first_token": "of the residual",
    "score_plane_share_without_first_token": "of the scores within rows",
}


def drawn(data: xr.Dataset) -> list[str]:
    """Return the kinds of figures that have data: planes need an encoding with planes, tokens need token ids."""
    needed = {"planes": "plane_share", "tokens": "pair_share", "spectrum": "spectrum", "distances": "distance_ratio"}
    shown = {kind: data.get(f"{needed.get(kind, 'share')}_without_first_token") for kind in FIGURES}
    return [kind for kind, array in shown.items() if array is not None and bool(array.notnull().any())]


def planes(result: Any) -> go.Figure:
    """Draw the share of each plane in the residual and in the scores, one row per head; the random init below."""
    both = sides(result)
    n_heads = result.dataset.sizes["layer"] * result.dataset.sizes["head"]
    panels = Panels(
        [f"{label} · {side}" for side, _, _ in both for label in PLANES.values()],
        columns=2,
        row_height=max(200, min(9 * n_heads, 900)),
        shared_xaxes=True,
        horizontal_spacing=0.08,
    )
    arrays = [head_rows(data[name], "plane") for _, data, _ in both for name in PLANES]
    for number, array in enumerate(arrays):
        panels.add(number, heat(array))
    lengths = result.dataset["wavelength"].dropna("layer", how="all").isel(layer=0).values
    ticks = [f"{x:.2g}" if x < 100 else f"{x:.0f}" if x < 1000 else f"{x / 1000:.2g}k" for x in lengths]
    every = slice(None, None, -(-len(ticks) // 16))
    panels.figure.update_yaxes(type="category", autorange="reversed")
    panels.figure.update_xaxes(type="linear", tickvals=np.arange(len(ticks))[every], ticktext=ticks[every], tickangle=0)
    reach = max(float(abs(array).fillna(0).max()) for array in arrays)
    panels.figure.update_layout(coloraxis=colour_axis(-reach, reach, DIVERGING) | {"reversescale": True})
    panels.axes("wavelength of the plane, tokens (first layer's)")
    return panels.finish(
        f"Residual by RoPE plane · {model_label(result.dataset)}",
        "first token left out; a head's shares add up to 1 over planes and what does not rotate; below 0: works "
        "against the others",
    )


def tokens(result: Any) -> go.Figure:
    """Draw one panel per head with the largest residual, one bar per kind of token pair; the random init at right."""
    both = sides(result)
    left = [data["share_without_first_token"].to_series().dropna() for _, data, _ in both]
    shown = list(zip_longest(*(shares.nlargest(N_PANELS).index.to_list() for shares in left)))
    titles = [
        f"layer {unit[0]}, head {unit[1]} · {side}" if unit else ""
        for row in shown
        for unit, (side, *_) in zip(row, both, strict=True)
    ]
    panels = Panels(titles, columns=len(both), horizontal_spacing=0.16)
    for number, (row, column) in enumerate(product(shown, range(len(both)))):
        if unit := row[column]:
            panels.add(number, bars(both[column][1].sel(layer=unit[0], head=unit[1])))
    panels.figure.update_yaxes(autorange="reversed", type="category")
    return panels.axes("mean residual, logits").finish(
        f"Token pairs in the residual · {model_label(result.dataset)}",
        "query token → key token, × how often, share of the head's residual it explains; orange: above the fit, blue: "
        "below",
    )


def bars(pairs: xr.Dataset) -> go.Bar:
    """Return bars of the kinds of token pair of one head."""
    query, key = (token_texts(pairs, f"{side}_token_without_first_token").values for side in ("query", "key"))
    mean, count, share = (pairs[f"pair_{name}_without_first_token"].values for name in ("mean", "count", "share"))
    known = np.flatnonzero((count > 0) & (share == share))
    return go.Bar(
        x=mean[known],
        y=[f"{rank + 1}. {quoted(query[rank])} → {quoted(key[rank])}" for rank in known],
        orientation="h",
        marker_color=[COLOURS[0] if mean[rank] < 0 else COLOURS[1] for rank in known],
        text=[f"×{count[rank]:.0f}, {share[rank]:.1%}" for rank in known],
        textposition="auto",
        hovertemplate="%{y}: mean %{x:.3g} logits, %{text}<extra></extra>",
        showlegend=False,
    )


def quoted(token: object) -> str:
    text = str(token).replace("\n", "↵").replace("\t", "⇥").replace("<", "&lt;")
    return f"“{text}”"


def token_texts(data: xr.Dataset, name: str) -> xr.DataArray:
    """Return the texts of a variable of token ids, or the ids if there is no tokenizer."""
    return data.get(f"{name}_text", data[name])


def table(data: xr.Dataset) -> pd.DataFrame:
    """Return the heads with the largest residual and their token pairs; without token ids, every head's residual."""
    if len(pairs := strongest_pairs(data)):
        return pairs
    shares = ["share", "share_without_first_token", "std", "top_share_without_first_token"]
    frame = data[shares].to_dataframe(dim_order=["layer", "head"])
    return pd.DataFrame(frame.dropna(how="all").reset_index())


def strongest_pairs(data: xr.Dataset) -> pd.DataFrame:
    """Return the strongest kind of token pair of each head with a large residual, first token left out.

    Empty without token ids.
    """
    if "query_token_without_first_token" not in data:
        return pd.DataFrame()
    first = data.isel(rank=0)
    query, key = (token_texts(first, f"{side}_token_without_first_token") for side in ("query", "key"))
    columns = {"left": first["share_without_first_token"], "query token": query, "key token": key}
    columns |= {"mean residual": first["pair_mean_without_first_token"]}
    columns |= {"pairs": first["pair_count_without_first_token"], "share": first["pair_share_without_first_token"]}
    frame = pd.DataFrame({name: array.to_series() for name, array in columns.items()}).dropna()
    frame = frame.nlargest(TABLE_ROWS, "left").astype({"pairs": int})
    return frame.assign(**{name: frame[name].map(repr) for name in ("query token", "key token")}).reset_index()


def labels(data: xr.Dataset) -> list[str]:
    """Return the label of each example: its head, and the residual's share on this prompt."""
    if "example_share" not in data:
        return []
    places = zip(data["example_layer"].values, data["example_head"].values, data["example_share"].values, strict=True)
    words = "of the variance within rows (first token left out)"
    return [
        f"layer {layer}, head {head}: position + query + key leave {one:.0%} {words}" for layer, head, one in places
    ]


def show(data: xr.Dataset, example: int) -> Any:
    """Return a circuitsvis page of one head: residual, position + key, and scores, all within rows, in logits.

    The three maps share one colour scale: red above the row's mean, blue below; full colour at four times the standard
    deviation of the residual.
    """
    head = data.isel(example=example)
    residual, scores = (head[f"example_{name}"].transpose("query", "key").values for name in ("residual", "scores"))
    reach = 4 * float(np.sqrt(np.mean(residual[np.tril_indices_from(residual)] ** 2)))
    colours = {"negative_color": "blue", "positive_color": "red"}
    texts = [str(token) for token in token_texts(data, "example_token").values]
    maps = np.stack([residual, scores - residual, scores])
    return attention_maps(maps, texts, MAPS, max_value=reach, min_value=-reach, **colours)


FIGURES = {
    "map": head_map(
        *("share", "share_without_first_token", "top_share_without_first_token"),
        title="What the three-axis fit leaves",
        subtitle="share of the variance within rows that a(i-j) + b(i) + c(j) leaves; its top singular direction",
    ),
    "spectrum": partial(
        layer_curves,
        measure="spectrum_without_first_token",
        along="component",
        title="Spectrum of the residual",
        subtitle="share of the residual's energy in its r-th singular direction, first token left out",
        y_title="share",
    ),
    "distances": partial(
        layer_curves,
        measure="distance_ratio_without_first_token",
        along="distance",
        title="Residual by distance",
        subtitle="energy of a pair at that distance over that of the average pair, first token left out; 1: even",
        y_title="energy ratio",
        log_x=True,
    ),
    "planes": planes,
    "tokens": tokens,
}
