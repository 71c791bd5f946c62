"""RoPE's planes: phases of queries and keys, their magnitude by wavelength, and what each plane is used for."""

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from tl_posgen.errors import InputError
from tl_posgen.views.style import SCALE, check_kind, finish, model_label, sides

KINDS = ("phases", "magnitude", "shares")
PARTS = ("position", "meaning", "interaction")
MARKERS = {"q": ("queries", "circle"), "k": ("keys", "diamond-open")}
NEVER = 10  # a plane that never turns is drawn this many times beyond the longest wavelength


def plot(
    dataset: xr.Dataset,
    null: xr.Dataset | None = None,
    kind: str = "phases",
    heads: Sequence[tuple[int, int]] | None = None,
    radius: str = "concentration",
    first_token: bool = False,
) -> go.Figure:
    """kind "phases": one marker a plane, its angle the mean phase, its radius `radius` ("concentration" or
    "magnitude"), for `heads` [(layer, head)], by default those with the largest share of position, of meaning and of
    interaction; "magnitude": by wavelength; "shares": of each plane in the head's position part and meaning part.
    first_token=True draws them with the first token."""
    check_kind(kind, KINDS)
    suffix = "" if first_token else "_no_first"
    if kind == "phases":
        check_kind(radius, ("concentration", "magnitude"))
        return _phases(dataset, null, heads, radius, suffix)
    return _magnitude(dataset, null, suffix) if kind == "magnitude" else _shares(dataset, null, suffix)


def _phases(
    dataset: xr.Dataset, null: xr.Dataset | None, heads: Sequence[tuple[int, int]] | None, radius: str, suffix: str
) -> go.Figure:
    chosen = _named(dataset, heads)
    rows = sides(dataset, null)
    titles = [f"{name} · {model_label(dataset)}" for name in chosen]
    titles += [f"L{layer} H{head} · {side}" for side, _ in rows[1:] for layer, head in chosen.values()]
    polar = [[{"type": "polar"}] * len(chosen)] * len(rows)
    figure = make_subplots(rows=len(rows), cols=len(chosen), specs=polar, subplot_titles=titles, vertical_spacing=0.14)
    for row, (_, data) in enumerate(rows, start=1):
        for column, (layer, head) in enumerate(chosen.values(), start=1):
            one = data.sel(layer=layer, head=head)
            one = one.isel(plane=np.isfinite(one["wavelength"].values))  # the rest has no phase of its own
            for side, (label, symbol) in MARKERS.items():
                figure.add_trace(
                    go.Scatterpolar(
                        r=one[f"{radius}_{side}{suffix}"].values,
                        theta=np.degrees(one[f"phase_{side}{suffix}"].values),
                        mode="markers",
                        marker={"color": np.log10(one["wavelength"].values), "symbol": symbol, "coloraxis": "coloraxis"}
                        | {"size": 9, "line": {"width": 0 if side == "q" else 2}},
                        text=[f"{label}, wavelength {wavelength:.4g}" for wavelength in one["wavelength"].values],
                        hovertemplate=f"%{{text}}<br>{radius} %{{r:.3f}}, %{{theta:.0f}}°<extra></extra>",
                        name=label,
                        legendgroup=label,
                        showlegend=row == column == 1,
                    ),
                    row=row,
                    col=column,
                )
    figure.update_polars(
        angularaxis={"thetaunit": "radians", "dtick": np.pi / 2}, radialaxis={"nticks": 4, "angle": 45}
    )
    if radius == "concentration":
        figure.update_polars(radialaxis_range=[0, 1.03])
    figure.update_layout(coloraxis=_wavelength_colours(dataset), legend={"orientation": "h", "y": -0.05, "x": 0})
    figure.update_annotations(font_size=11, yshift=16)
    subtitle = f"one marker a plane: angle = mean phase before RoPE, radius = {radius}{_tokens(suffix)}"
    title = f"Phases of queries and keys · {model_label(dataset)}"
    return finish(figure, title, subtitle, height=120 + 320 * len(rows)).update_layout(margin={"t": 120})


def _magnitude(dataset: xr.Dataset, null: xr.Dataset | None, suffix: str) -> go.Figure:
    rows = sides(dataset, null)
    titles = [f"{label} · {side}" for side, _ in rows for label, _ in MARKERS.values()]
    layout = {"vertical_spacing": 0.16, "horizontal_spacing": 0.06, "shared_yaxes": "columns"}
    figure = make_subplots(rows=len(rows), cols=2, subplot_titles=titles, **layout)
    layers = dataset["layer"].values
    for row, (_, data) in enumerate(rows, start=1):
        for column, (letter, (label, _)) in enumerate(MARKERS.items(), start=1):
            values = data[f"magnitude_{letter}{suffix}"].mean("head")
            for number, layer in enumerate(layers):
                x, y = _drawable_wavelengths(data["wavelength"].sel(layer=layer)), values.sel(layer=layer).values
                order = np.argsort(x)
                colour = _colour_of(number, len(layers))
                trace = go.Scatter(x=x[order], y=y[order], mode="lines+markers", line={"color": colour, "width": 1.5})
                trace.update(name=f"layer {layer}", legendgroup=f"{layer}", showlegend=row == column == 1)
                trace.update(
                    hovertemplate=f"{label}, layer {layer}<br>wavelength %{{x:.4g}}: %{{y:.3f}}<extra></extra>"
                )
                figure.add_trace(trace, row=row, col=column)
    figure.update_xaxes(type="log", exponentformat="power", dtick=1)
    figure.update_xaxes(title_text="wavelength 2 pi / theta, tokens", row=len(rows))
    figure.update_yaxes(title_text="mean |z|, mean over heads", rangemode="tozero", col=1)
    subtitle = f"length of queries and keys in each plane, before RoPE{_tokens(suffix)}"
    if np.isinf(dataset["wavelength"]).any():
        subtitle += f"; what never turns stands {NEVER} times beyond the longest wavelength"
    return finish(figure, f"Magnitude by wavelength · {model_label(dataset)}", subtitle, height=130 + 250 * len(rows))


def _shares(dataset: xr.Dataset, null: xr.Dataset | None, suffix: str) -> go.Figure:
    rows = sides(dataset, null)
    names = ("position", "meaning")
    titles = [f"{name} · {side}" for side, _ in rows for name in names]
    figure = make_subplots(
        rows=len(rows), cols=2, subplot_titles=titles, vertical_spacing=0.14, horizontal_spacing=0.09
    )
    n_heads = dataset.sizes["layer"] * dataset.sizes["head"]
    for row, (_, data) in enumerate(rows, start=1):
        ordered = data.isel(plane=np.argsort(data["wavelength"].min("layer").values))
        labels = _plane_labels(ordered["wavelength"])
        for column, name in enumerate(names, start=1):
            values = ordered[f"{name}_by_plane{suffix}"].stack(unit=("layer", "head")).transpose("unit", "plane")
            units = [f"L{layer} H{head}" for layer, head in values.indexes["unit"].to_list()]
            shared = {"coloraxis": "coloraxis", "hovertemplate": "%{y}, plane %{x}: %{z:.2f}<extra></extra>"}
            figure.add_trace(go.Heatmap(z=values.values, x=labels, y=units, **shared), row=row, col=column)
    figure.update_xaxes(type="category").update_xaxes(title_text="wavelength of the plane, tokens", row=len(rows))
    figure.update_yaxes(type="category", autorange="reversed")
    figure.update_layout(coloraxis={"colorscale": SCALE, "cmin": 0, "cmax": 1, "colorbar": {"thickness": 12}})
    figure.update_annotations(font_size=11)
    subtitle = f"share of each plane in the variance of the head's position part and meaning part{_tokens(suffix)}"
    height = 130 + len(rows) * max(220, min(11 * n_heads, 900))
    return finish(figure, f"What each plane carries · {model_label(dataset)}", subtitle, height=height)


def _named(dataset: xr.Dataset, heads: Sequence[tuple[int, int]] | None) -> dict[str, tuple[int, int]]:
    """Title -> (layer, head)."""
    if heads is None:
        chosen = {}
        for part in PARTS:
            series = dataset[part].to_series().dropna()
            layer, head = series.index.to_list()[int(series.to_numpy().argmax())]
            chosen[f"most {part}: L{layer} H{head}"] = (layer, head)
        return chosen
    missing = [unit for unit in heads if unit[0] not in dataset["layer"] or unit[1] not in dataset["head"]]
    if missing or not len(heads):
        raise InputError(f"heads {list(heads)}: give (layer, head) pairs that the result has")
    return {f"L{layer} H{head}": (layer, head) for layer, head in heads}


def _tokens(suffix: str) -> str:
    return "; first token left out" if suffix else "; all tokens"


def _drawable_wavelengths(wavelength: xr.DataArray) -> np.ndarray:
    longest = float(wavelength.where(np.isfinite(wavelength)).max())
    return wavelength.where(~np.isinf(wavelength), NEVER * longest).values


def _plane_labels(wavelength: xr.DataArray) -> list[str]:
    """The wavelengths, numbered where planes share one (inf: what never turns); only numbers where layers differ."""
    if bool((wavelength.max("layer") != wavelength.min("layer")).any()):
        return [f"plane {plane}" for plane in wavelength["plane"].values]
    values = wavelength.min("layer").values
    names = [f"{value:.3g}" if value < 1000 else f"{value:.0f}" for value in values]
    return [name if names.count(name) == 1 else f"{name} ({plane})" for plane, name in enumerate(names)]


def _wavelength_colours(dataset: xr.Dataset) -> dict:
    finite = np.log10(dataset["wavelength"].values[np.isfinite(dataset["wavelength"].values)])
    ticks = np.arange(np.floor(finite.min()), np.ceil(finite.max()) + 1)
    bar = {"title": "wavelength", "thickness": 12, "tickvals": ticks, "ticktext": [f"{10**t:,.0f}" for t in ticks]}
    return {"colorscale": SCALE, "cmin": finite.min(), "cmax": finite.max(), "colorbar": bar}


def _colour_of(number: int, n: int) -> str:
    from plotly.colors import sample_colorscale

    return str(sample_colorscale(SCALE, [0.9 * number / max(1, n - 1)])[0])
