"""Figures of the planes behind a slash: planes and profiles of the strongest heads, bands by group of heads."""

from collections.abc import Callable
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.report.figures import COLOURS, Panels, line, model_label, sides, thinned
from tl_posgen.rope.frequency_bands import BANDS
from tl_posgen.slash.head_groups import TOKENS, group_boxes, head_groups

N_HEADS = 8  # the strongest heads, drawn one by one
SCHEMES = {"thirds": "by thirds of the planes", "wavelength": "by wavelength"}
ALL_BANDS = (*BANDS, "unrotated")


def planes(result: Any) -> go.Figure:
    """Draw the lift of the best diagonal by wavelength for the strongest heads."""
    subtitle = "how far each plane lifts the best diagonal above the mean logit, and (edge) above those near it"
    if np.isinf(result.dataset["wavelength"]).any():
        subtitle += "; at the far right: not rotated"
    panels = strongest_heads(result, plane_curves, "wavelength in tokens", "lift, logits")
    return panels.finish(f"Planes of the strongest slash heads · {model_label(result.dataset)}", subtitle)


def profiles(result: Any) -> go.Figure:
    """Draw predicted and measured slash scores by distance for the strongest heads."""
    subtitle = "slash score by distance, measured and as queries and keys of rank one would have it; all tokens"
    panels = strongest_heads(result, profile_curves, "distance + 1", "slash score")
    return panels.finish(f"Slash profiles predicted from rank one · {model_label(result.dataset)}", subtitle)


def strongest_heads(result: Any, draw: Callable[..., list[go.Scatter]], x_title: str, y_title: str) -> Panels:
    """Return one panel per strongest head, with the random init's head of the same place behind."""
    whole = result.dataset.sel(variant="all")
    best = whole["best_score"].to_series().dropna().nlargest(N_HEADS)
    titles = [
        f"L{layer} H{head}, D = {int(whole['best_distance'].sel(layer=layer, head=head))}, score {score:.2f}"
        for (layer, head), score in best.items()  # pyright: ignore[reportGeneralTypeIssues]
    ]
    panels = Panels(titles)
    for number, (layer, head) in enumerate(best.index.to_list()):
        for side, data, colour in reversed(sides(result)):
            panels.add(number, *draw(data.sel(layer=layer, head=head), side, colour, data is result.null))
    return panels.axes(x_title, y_title, log_x=True)


def plane_curves(head: xr.Dataset, side: str, colour: str, is_null: bool) -> list[go.Scatter]:
    wavelength = head["wavelength"].values
    # unrotated planes have no wavelength: draw them to the right of the longest
    x = np.where(np.isfinite(wavelength), wavelength, 10 * wavelength[np.isfinite(wavelength)].max(initial=1.0))
    curves = [(side, "all", "best", colour, "solid")]
    if not is_null:
        curves = [
            ("lift", "all", "best", COLOURS[0], "solid"),
            (f"lift, {TOKENS['without_first_token']}", "without_first_token", "best", COLOURS[4], "dot"),
            ("edge", "all", "edge", COLOURS[1], "solid"),
        ]
    look: dict[str, Any] = {"mode": "lines+markers", "marker": {"size": 5}}
    return [
        line(x, head["contribution"].sel(variant=variant, at=at).values, name, shade, dash=dash, **look)
        for name, variant, at, shade, dash in curves
    ]


def profile_curves(head: xr.Dataset, side: str, colour: str, is_null: bool) -> list[go.Scatter]:
    near = thinned(head.sel(variant="all"))
    curves = {"score": ("measured", COLOURS[0], "solid"), "predicted": ("predicted from rank one", COLOURS[1], "dash")}
    if is_null:
        curves = {"score": (f"measured, {side}", colour, "solid")}
    x = near["distance"].values + 1
    return [line(x, near[name].values, label, shade, dash=dash) for name, (label, shade, dash) in curves.items()]


def bands(at: str, title: str) -> Callable[[Any], go.Figure]:
    """Return a figure of the lift summed into bands, by group of heads."""

    def figure(result: Any) -> go.Figure:
        data = result.dataset
        # the band of unrotated coordinates is empty in fully rotary models
        shown = [band for band in ALL_BANDS if band in BANDS or (data["bands"].sel(band=band) != 0).any()]
        panels = {
            words: [
                (name, colour, heads["bands"].sel(scheme=scheme, at=at).to_dataset("band"))
                for name, colour, heads in head_groups(result, "all")
            ]
            for scheme, words in SCHEMES.items()
        }
        above = "the mean logit" if at == "best" else "the diagonals up to 8 tokens away"
        subtitle = (
            f"lift of the best diagonal above {above}, summed over planes; by wavelength: high < 32 tokens, "
            f"medium up to {data.attrs['tokens']}, low beyond; all tokens, a point a head"
        )
        boxes = group_boxes(panels, {band: band for band in shown}, "lift, logits")
        return boxes.finish(f"{title} · {model_label(data)}", subtitle)

    return figure


def match(result: Any) -> go.Figure:
    """Draw the correlation of predicted and measured profiles, by group of heads."""
    names = {"correlation": "its own profile", "chance_correlation": "those of other heads"}
    boxes = group_boxes({title: head_groups(result, one) for one, title in TOKENS.items()}, names, "correlation")
    subtitle = "correlation of predicted and measured slash scores over D < N/2, less uniform attention; a point a head"
    return boxes.finish(f"How well rank one predicts the slash · {model_label(result.dataset)}", subtitle)


FIGURES = {
    "planes": planes,
    "bands": bands("best", "Which frequencies lift the slash"),
    "edge": bands("edge", "Which frequencies set the slash off"),
    "profiles": profiles,
    "match": match,
}


def drawn(data: xr.Dataset) -> list[str]:
    """Return the kinds of figures: without rotation there are no wavelengths, and rank one predicts nothing."""
    kinds = ["bands", "edge", "profiles"]
    return ["planes", *kinds, "match"] if np.isfinite(data["wavelength"]).any() else kinds
