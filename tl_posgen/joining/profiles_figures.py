"""Figures of head profiles: how the columns go together, and every head's rank in each."""

from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.core.measure import ENDS
from tl_posgen.joining.column_correlations import COLUMNS, SCOPES, columns_of
from tl_posgen.report.figures import DIVERGING, SCALE, Panels, colour_axis, finish, head_rows, heat, model_label, sides


def correlation_maps(result: Any) -> go.Figure:
    """Draw the rank correlations of all pairs of columns: over heads and within layers, a row a side."""
    both = sides(result)
    titles = [f"{words} · {side}" for side, _, _ in both for words in SCOPES]
    names = [COLUMNS[str(name)] for name in result.own["column"].values]
    panels = Panels(titles, columns=2, row_height=150 + 22 * len(names), horizontal_spacing=0.16)
    for row, (_, data, _) in enumerate(both):
        for place, scope in enumerate(SCOPES):
            one, low, high = (data["rho"].sel(scope=scope, end=end).values for end in ENDS)
            beyond = (low > 0) | (high < 0)
            shown = np.where(beyond, np.char.mod("%.2f", np.nan_to_num(one)), "")
            hover = "%{y}, %{x}: %{z:.2f} [%{customdata[0]:.2f}, %{customdata[1]:.2f}]<extra></extra>"
            grid = go.Heatmap(z=one, x=names, y=names, text=shown, texttemplate="%{text}", coloraxis="coloraxis")
            grid.update(customdata=np.stack([low, high], -1), hovertemplate=hover, textfont={"size": 8})
            panels.add(2 * row + place, grid)
    panels.figure.update_layout(coloraxis=colour_axis(-1.0, 1.0, DIVERGING))
    panels.figure.update_xaxes(tickangle=60, tickfont={"size": 9}).update_yaxes(
        tickfont={"size": 9}, autorange="reversed"
    )
    for row in range(1, len(both)):  # the last one names the columns of all
        panels.figure.update_xaxes(showticklabels=False, row=row)
    subtitle = "Spearman's rho; written where the 95 % interval over heads leaves out zero"
    return panels.finish(f"What goes together over heads · {model_label(result.own)}", subtitle)


def rank_table(result: Any) -> go.Figure:
    """Draw every head's rank in each column, lowest 0 to highest 1."""
    data = result.own
    columns = columns_of(data)
    values = xr.concat([one.astype(float) for one in columns.values()], "column").transpose("layer", "head", "column")
    rows = head_rows(values.assign_coords(column=[COLUMNS[name] for name in columns]), "column")
    ranks = rows.to_pandas().rank().sub(1) / max(1, len(rows) - 1)
    grid = xr.DataArray(ranks.values, rows.coords, rows.dims)
    hover = "%{y}, %{x}: %{customdata:.3g}<extra></extra>"
    figure = go.Figure(heat(grid).update(customdata=rows.values, hovertemplate=hover))
    figure.update_layout(coloraxis=colour_axis(0.0, 1.0, SCALE)).update_yaxes(autorange="reversed").update_xaxes(
        tickangle=60
    )
    subtitle = "rank of each head among all, lowest 0 to highest 1; hovering shows the number"
    height = 240 + 14 * len(rows)
    return finish(figure, f"Head profiles · {model_label(data)}", subtitle, height=height)
