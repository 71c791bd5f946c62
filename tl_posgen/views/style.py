"""What every picture shares: colours, captions, and maps and curves drawn trained beside null."""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

COLOURS = ("#3b6fb6", "#d1603d", "#3f9b6b", "#8b5fa8", "#c79a2b", "#4aa3b5", "#b0567d", "#6b7280")
NULL_COLOUR = "#9ca3af"
SCALE = "Viridis"
DIVERGING = "RdBu"


def check_kind(kind: str, kinds: Sequence[str]) -> None:
    """Refuse a kind of picture that the view does not draw."""
    if kind not in kinds:
        raise ValueError(f"kind={kind!r}: this view draws {', '.join(map(repr, kinds))}")


def model_label(dataset: xr.Dataset) -> str:
    return str(dataset.attrs.get("model", "model"))


def sides(dataset: xr.Dataset, null: xr.Dataset | None) -> list[tuple[str, xr.Dataset]]:
    """The model and, where there is one, its null, each with its label."""
    return [(model_label(dataset), dataset), *([(model_label(null), null)] if null is not None else [])]


def finish(figure: go.Figure, title: str, subtitle: str = "", height: int = 420) -> go.Figure:
    """Title, what is shown below it, and the house's look."""
    heading = f"<b>{title}</b>" + (f"<br><span style='font-size:12px;color:#555'>{subtitle}</span>" if subtitle else "")
    figure.update_layout(
        title={"text": heading, "x": 0.01, "y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 14}},
        template="plotly_white",
        font={"family": "Inter, Segoe UI, Helvetica, Arial, sans-serif", "size": 12},
        height=height,
        margin={"t": 90, "l": 60, "r": 30, "b": 50},
        colorway=COLOURS,
    )
    return figure


def head_maps(
    dataset: xr.Dataset,
    null: xr.Dataset | None,
    measures: Mapping[str, str],
    *,
    title: str,
    subtitle: str = "",
    limits: tuple[float, float] | None = (0.0, 1.0),
) -> go.Figure:
    """Layer x head maps on one colour scale: a column per measure (variable -> label), a row per side."""
    rows = sides(dataset, null)
    shown = {name: label for name, label in measures.items() if name in dataset}
    figure = make_subplots(
        rows=len(rows),
        cols=len(shown),
        subplot_titles=[f"{label} · {side}" for side, _ in rows for label in shown.values()],
        horizontal_spacing=0.06,
        vertical_spacing=0.22 if len(rows) > 1 else 0.1,
    )
    if limits is None:
        values = [
            float(fn(data[name])) for _, data in rows for name in shown for fn in (xr.DataArray.min, xr.DataArray.max)
        ]
        limits = (min(values), max(values))
    for row, (_, data) in enumerate(rows, start=1):
        for column, name in enumerate(shown, start=1):
            array = data[name].transpose("layer", "head")
            heatmap = go.Heatmap(
                z=array.values,
                x=[str(h) for h in array["head"].values],
                y=[str(l) for l in array["layer"].values],  # noqa: E741
                coloraxis="coloraxis",
                texttemplate="%{z:.2f}" if array.size <= 128 else None,
                hovertemplate="layer %{y}, head %{x}: %{z:.3f}<extra></extra>",
            )
            figure.add_trace(heatmap, row=row, col=column)
    figure.update_xaxes(title_text="head", type="category")
    figure.update_yaxes(title_text="layer", type="category")
    bar = {"colorscale": SCALE, "cmin": limits[0], "cmax": limits[1], "colorbar": {"thickness": 12}}
    figure.update_layout(coloraxis=bar)
    figure.update_annotations(font_size=11)
    n_layers = dataset.sizes["layer"]
    return finish(figure, title, subtitle, height=130 + len(rows) * max(170, min(28 * n_layers, 700)))


def layer_curves(
    dataset: xr.Dataset,
    null: xr.Dataset | None,
    measure: str,
    along: str,
    *,
    title: str,
    subtitle: str,
    y_title: str,
    log_x: bool = False,
) -> go.Figure:
    """One panel a layer, one line a head; the null's heads in grey behind them."""
    layers = dataset["layer"].values
    n_columns = min(4, len(layers))
    n_rows = -(-len(layers) // n_columns)
    figure = make_subplots(
        rows=n_rows,
        cols=n_columns,
        subplot_titles=[f"layer {layer}" for layer in layers],
        shared_xaxes=True,
        horizontal_spacing=0.05,
        vertical_spacing=0.3 / n_rows,
    )
    drawn: set[str] = set()
    for index, layer in enumerate(layers):
        row, column = index // n_columns + 1, index % n_columns + 1
        for side, data in reversed(sides(dataset, null)):
            is_null = data is null
            for number, head in enumerate(data["head"].values):
                curve = data[measure].sel(layer=layer, head=head)
                name = side if is_null else f"head {head}"
                line = {
                    "color": NULL_COLOUR if is_null else COLOURS[number % len(COLOURS)],
                    "width": 1 if is_null else 1.6,
                }
                x = curve[along].values + (1 if log_x else 0)
                figure.add_trace(
                    go.Scatter(
                        x=x,
                        y=curve.values,
                        mode="lines",
                        line=line,
                        opacity=0.5 if is_null else 1.0,
                        name=name,
                        legendgroup=name,
                        showlegend=name not in drawn,
                        hovertemplate=f"layer {layer}, {name}<br>{along} %{{x}}: %{{y:.3f}}<extra></extra>",
                    ),
                    row=row,
                    col=column,
                )
                drawn.add(name)
    figure.update_xaxes(type="log" if log_x else "linear")
    for column in range(1, n_columns + 1):
        figure.update_xaxes(title_text=f"{along} + 1" if log_x else along, row=n_rows, col=column)
    figure.update_yaxes(title_text=y_title, col=1)
    return finish(figure, title, subtitle, height=140 + 230 * n_rows)
