"""Which RoPE planes lift a head's slash, and the slash that rank one alone would give."""

from collections.abc import Callable
from operator import itemgetter

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from tl_posgen.views.head_groups import TOKENS, box_panels, head_groups
from tl_posgen.views.style import COLOURS, NULL_COLOUR, check_kind, finish, model_label, sides

KINDS = ("planes", "bands", "edge", "profiles", "match")
N_HEADS = 8  # the strongest heads, drawn one by one
N_POINTS = 96  # distances drawn per profile, evenly spread on the logarithmic axis


def drawable(dataset: xr.Dataset) -> tuple[str, ...]:
    """Where nothing turns there are no wavelengths to draw over, and rank one predicts nothing."""
    turning = bool(np.isfinite(dataset["wavelength"]).any())
    return KINDS if turning else tuple(kind for kind in KINDS if kind not in ("planes", "match"))


def plot(dataset: xr.Dataset, null: xr.Dataset | None = None, kind: str = "planes") -> go.Figure:
    """kind "planes": lift of the best diagonal by wavelength, strongest heads; "bands": its sums, by group of heads;
    "edge": the same above near diagonals; "profiles": predicted and measured slash scores; "match": their correlation.
    """
    check_kind(kind, KINDS)
    model = model_label(dataset)
    if kind == "planes":
        figure = _small_multiples(dataset, null, _planes, "wavelength in tokens", "lift, logits")
        subtitle = "how far each plane lifts the best diagonal above the mean logit, and (edge) above those near it"
        if np.isinf(dataset["wavelength"]).any():
            subtitle += "; at the far right: not rotated"
        return finish(figure, f"Planes of the strongest slash heads · {model}", subtitle, height=560)
    if kind == "profiles":
        figure = _small_multiples(dataset, null, _profile, "distance + 1", "slash score")
        subtitle = "slash score by distance, measured and as queries and keys of rank one would have it; all tokens"
        return finish(figure, f"Slash profiles predicted from rank one · {model}", subtitle, height=560)
    if kind in ("bands", "edge"):
        title = "Which frequencies lift the slash" if kind == "bands" else "Which frequencies set the slash off"
        figure = _bands(dataset, null, "best" if kind == "bands" else "edge")
        return finish(figure, f"{title} · {model}", _bands_subtitle(dataset, kind))
    measures = {"its own profile": itemgetter("correlation"), "those of other heads": itemgetter("chance_correlation")}
    panels = {title: (head_groups(dataset, null, variant), measures) for variant, title in TOKENS.items()}
    subtitle = "correlation of predicted and measured slash scores over D < N/2, less uniform attention; a point a head"
    return finish(box_panels(panels, "correlation"), f"How well rank one predicts the slash · {model}", subtitle)


Drawing = Callable[[xr.Dataset, xr.DataArray, str, bool], list[go.Scatter]]


def _small_multiples(
    dataset: xr.Dataset, null: xr.Dataset | None, draw: Drawing, x_title: str, y_title: str
) -> go.Figure:
    """A panel for each of the strongest heads, and the null's head of the same place behind."""
    best = dataset["best_score"].sel(variant="all").to_series().nlargest(N_HEADS)
    strongest = best.index.to_list()
    distance = dataset["best_distance"].sel(variant="all")
    n_columns = min(4, len(strongest))
    n_rows = -(-len(strongest) // n_columns)
    figure = make_subplots(
        rows=n_rows,
        cols=n_columns,
        subplot_titles=[
            f"L{layer} H{head}, D = {int(distance.sel(layer=layer, head=head))}, score {best[layer, head]:.2f}"
            for layer, head in strongest
        ],
        horizontal_spacing=0.05,
        vertical_spacing=0.2,
    )
    for index, (layer, head) in enumerate(strongest):
        for side, data in reversed(sides(dataset, null)):
            one, wavelength = data.sel(layer=layer, head=head), data["wavelength"].sel(layer=layer)
            for trace in draw(one, wavelength, side, data is null):
                trace.update(legendgroup=trace.name, showlegend=index == 0, mode=trace.mode or "lines")
                figure.add_trace(trace, row=index // n_columns + 1, col=index % n_columns + 1)
    figure.update_xaxes(type="log", dtick=1).update_xaxes(title_text=x_title, row=n_rows)
    return figure.update_yaxes(title_text=y_title, col=1).update_annotations(font_size=12)


def _planes(head: xr.Dataset, wavelength: xr.DataArray, side: str, is_null: bool) -> list[go.Scatter]:
    finite = wavelength.values[np.isfinite(wavelength.values)]
    # what is not rotated has no wavelength: a place of its own
    x = np.where(np.isfinite(wavelength.values), wavelength.values, 10 * finite.max(initial=1.0))
    drawn = [(side, "all", "best", NULL_COLOUR, "solid")]
    if not is_null:
        drawn = [
            ("lift", "all", "best", COLOURS[0], "solid"),
            (f"lift, {TOKENS['without_first']}", "without_first", "best", COLOURS[4], "dot"),
            ("edge", "all", "edge", COLOURS[1], "solid"),
        ]
    return [
        go.Scatter(
            x=x,
            y=head["contribution"].sel(variant=variant, at=at).values,
            mode="lines+markers",
            marker={"size": 5},
            line={"color": colour, "dash": dash},
            name=name,
            hovertemplate=f"{name}<br>wavelength %{{x:.1f}}: %{{y:.3f}} logits<extra></extra>",
        )
        for name, variant, at, colour, dash in drawn
    ]


def _profile(head: xr.Dataset, wavelength: xr.DataArray, side: str, is_null: bool) -> list[go.Scatter]:
    places = np.unique(np.geomspace(1, max(1, head.sizes["distance"] // 2), N_POINTS).round().astype(int)) - 1
    near = head.sel(variant="all").isel(distance=places)
    drawn = {"score": ("measured", COLOURS[0], "solid"), "predicted": ("predicted from rank one", COLOURS[1], "dash")}
    if is_null:
        drawn = {"score": (f"measured, {side}", NULL_COLOUR, "solid")}
    return [
        go.Scatter(
            x=near["distance"].values + 1,
            y=near[name].values,
            line={"color": colour, "dash": dash, "width": 1.8},
            name=label,
            hovertemplate=f"{label}<br>distance + 1 = %{{x}}: %{{y:.3f}}<extra></extra>",
        )
        for name, (label, colour, dash) in drawn.items()
    ]


def _bands(dataset: xr.Dataset, null: xr.Dataset | None, at: str) -> go.Figure:
    def lift(scheme: str, band: str) -> Callable[[xr.Dataset], xr.DataArray]:
        return lambda heads: heads["bands"].sel(scheme=scheme, band=band, at=at)

    bands = [str(band) for band in dataset["band"].values]
    # a model that rotates all of a head has nothing to show there
    bands = [band for band in bands if band != "unrotated" or bool((dataset["bands"].sel(band=band) != 0).any())]
    groups = head_groups(dataset, null, "all")
    panels = {
        title: (groups, {band: lift(scheme, band) for band in bands})
        for scheme, title in (("thirds", "by thirds of the planes"), ("wavelength", "by wavelength"))
    }
    return box_panels(panels, "lift, logits")


def _bands_subtitle(dataset: xr.Dataset, kind: str) -> str:
    above = "the mean logit" if kind == "bands" else "the diagonals up to 8 tokens away"
    return (
        f"lift of the best diagonal above {above}, summed over planes; by wavelength: high < 32 tokens, "
        f"medium up to {dataset.attrs['tokens']}, low beyond; all tokens, a point a head"
    )
