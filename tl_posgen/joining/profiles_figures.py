"""Figures of head profiles: how the columns go together, and the heads' ranks in each."""

import textwrap
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from jaxtyping import Float, Int

from tl_posgen.joining.column_correlations import COLUMNS, SCOPES, columns_of
from tl_posgen.report.figures import (
    COLOURS,
    DIVERGING,
    SCALE,
    Panels,
    colour_axis,
    error_bars,
    finish,
    heat,
    line,
    model_label,
    sides,
)
from tl_posgen.report.head_figures import head_rows

MOST_HEADS = 48  # whose names can be read below each other's columns
SHORT = {"cost_elsewhere": "cost of as much elsewhere"}  # where the whole name is too long for an axis
ROW = 24  # pixels a column of the profiles
JOINT = {  # label of `edited` -> words
    "slash": "slashes hidden",
    "elsewhere": "as much attention taken elsewhere",
    "head": "outputs at their means",
    "drawn heads": "as many drawn heads at their means",
}


def ordered(rho: Float[np.ndarray, "name name"]) -> Int[np.ndarray, " name"]:
    """Return the order in which correlated names stand together: by the angle of the two first eigenvectors (Friendly
    2002, "Corrgrams"), cut at the widest gap.

    Example:
        >>> ordered(np.array([[1.0, 0.0, 0.9], [0.0, 1.0, 0.1], [0.9, 0.1, 1.0]])).tolist()
        [0, 2, 1]
    """
    if len(rho) < 2:
        return np.arange(len(rho))
    filled = np.nan_to_num(rho)
    np.fill_diagonal(filled, 1.0)
    vectors = np.linalg.eigh(filled)[1][:, -2:].T
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(1, keepdims=True), 1)
    second, first = vectors * np.sign(largest)  # of either sign otherwise, as the library happens to give them
    angles = np.arctan2(second, first)
    order = np.argsort(angles, kind="stable")
    gaps = np.diff(np.append(angles[order], angles[order][:1] + 2 * np.pi))
    return np.roll(order, -1 - int(gaps.argmax()))


def order_of_columns(data: xr.Dataset) -> Int[np.ndarray, " column"]:
    """Return the places of the columns that any correlation over heads is known of, or of all where none is known,
    related ones together."""
    rho = data["rho"].sel(scope=SCOPES[0], end="value").values
    known = np.flatnonzero(np.isfinite(rho).any(0) | ~np.isfinite(rho).any())
    return known[ordered(rho[np.ix_(known, known)])]


def row_names(columns: np.ndarray, order: Int[np.ndarray, " column"]) -> list[str]:
    """Return the names of columns with their numbers in this order, long ones on two lines."""
    words = [(COLUMNS | SHORT)[str(columns[place])] for place in order]
    return ["<br>".join(textwrap.wrap(f"{name} {number}", 34)) for number, name in enumerate(words, 1)]


def correlation_maps(result: Any) -> go.Figure:
    """Draw the rank correlations of all pairs of columns, over heads below the diagonal and within layers above it, a
    panel a side."""
    both, order = sides(result), order_of_columns(result.own)
    names, n = row_names(result.own["column"].values, order), len(order)
    panels = Panels([side for side, _, _ in both], columns=1, row_height=60 + ROW * n)
    below = np.tri(n, k=-1, dtype=bool)
    for panel, (_, data, _) in enumerate(both):
        over, within = (data["rho"].sel(scope=scope).transpose("end", ...).values for scope in SCOPES)
        ends = np.where(below, *(rho[:, order][:, :, order] for rho in (over, within)))
        rho, low, high = np.where(np.eye(n, dtype=bool), np.nan, ends)
        shown = np.where((low > 0) | (high < 0), np.char.mod("%.2f", np.nan_to_num(rho)), "")
        hover = "%{y}, %{x}: %{z:.2f} [%{customdata[0]:.2f}, %{customdata[1]:.2f}]<extra></extra>"
        look = {"text": shown, "texttemplate": "%{text}", "coloraxis": "coloraxis", "hovertemplate": hover}
        x = [str(number) for number in range(1, n + 1)]
        panels.add(panel, go.Heatmap(z=rho, x=x, y=names, customdata=np.stack([low, high], -1), **look))
    panels.figure.update_layout(coloraxis=colour_axis(-1.0, 1.0, DIVERGING))
    panels.figure.update_xaxes(type="category", dtick=1).update_yaxes(autorange="reversed", automargin=True, dtick=1)
    subtitle = (
        f"Spearman's rho, {SCOPES[0]} below the diagonal, {SCOPES[1]} above it; written, where there is room, if the "
        "95 % interval leaves out zero; related columns stand together"
    )
    return panels.finish(f"What goes together over heads · {model_label(result.own)}", subtitle)


def rank_table(result: Any) -> go.Figure:
    """Draw each head's rank in every column, lowest 0 to highest 1: heads with like ranks beside each other."""
    data, order = result.own, order_of_columns(result.own)
    columns = list(columns_of(data).values())
    values = xr.concat([columns[place].astype(float) for place in order], "column").transpose("layer", "head", "column")
    names = row_names(data["column"].values, order)
    rows = head_rows(values.assign_coords(column=names), "column", most=np.inf)
    ranks = rows.to_pandas().rank().sub(1) / max(1, len(rows) - 1)
    far = np.argsort(-np.nan_to_num(abs(ranks.values - 0.5)).mean(1), kind="stable")[:MOST_HEADS]
    shown = far[ordered(ranks.iloc[far].T.corr().values)]
    grid = xr.DataArray(ranks.values, rows.coords, rows.dims).transpose("column", "head").isel(head=shown)
    hover = "%{y}, %{x}: %{customdata:.3g}<extra></extra>"
    figure = go.Figure(heat(grid).update(customdata=rows.values[shown].T, hovertemplate=hover))
    figure.update_layout(coloraxis=colour_axis(0.0, 1.0, SCALE))
    figure.update_yaxes(autorange="reversed", automargin=True, dtick=1)
    figure.update_xaxes(tickangle=-90, tickfont={"size": 10}, dtick=1)
    chosen = f"; the {len(shown)} of {len(rows)} heads furthest from the middle" if len(shown) < len(rows) else ""
    subtitle = f"rank of each head among all, lowest 0 to highest 1; hovering shows the number{chosen}; the model alone"
    return finish(figure, f"Head profiles · {model_label(data)}", subtitle, height=200 + ROW * len(order))


def joint_costs(result: Any) -> go.Figure:
    """Draw the rise of the loss by the number of heads that are edited at once, a panel a side."""
    both = sides(result)
    panels = Panels([side for side, _, _ in both], columns=2, row_height=300, shared_yaxes=True)
    for panel, (_, data, _) in enumerate(both):
        for (edit, name), colour in zip(JOINT.items(), COLOURS, strict=False):
            y = data["joint_cost"].sel(edited=edit).mean("prompt")
            found = line(y["n_heads"].values, y.values, name, colour, mode="lines+markers")
            if data is result.own:
                ends = [result.numbers("joint_cost", edited=edit, n_heads=n) for n in y["n_heads"].values]
                value, low, high = np.array([[one.value, one.low, one.high] for one in ends]).T
                found["error_y"] = error_bars(value, low, high)
            panels.add(panel, found)
    panels.axes("heads edited at once, highest slash scores first", "rise of the loss, nats")
    panels.figure.update_xaxes(type="category")
    subtitle = "bars: 95 % over prompts, from four prompts on; drawn heads differ from prompt to prompt"
    return panels.finish(f"Joint costs of heads · {model_label(result.own)}", subtitle)
