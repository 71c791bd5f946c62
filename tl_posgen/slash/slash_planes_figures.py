"""Figures of the planes behind a slash: planes and profiles of the strongest heads, bands by group of heads."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.core.measure import HEAD
from tl_posgen.report.figures import COLOURS, Panels, line, model_label, sides
from tl_posgen.report.head_figures import thinned
from tl_posgen.rope.frequency_bands import BANDS
from tl_posgen.slash.head_groups import TITLES, group_boxes, head_groups
from tl_posgen.slash.layer_means import strongest_named

N_HEADS = 8  # the strongest heads, drawn one by one
SCHEMES = {"thirds": "by thirds of the planes", "wavelength": "by wavelength"}
ALL_BANDS = (*BANDS, "unrotated")
ABOVE = {"best": "the mean logit", "edge": "the diagonals up to 8 tokens away"}


def planes(result: Any) -> go.Figure:
    """Draw the lift of the best diagonal by wavelength, strongest heads."""
    subtitle = "how far each plane lifts the best diagonal above the mean logit, and (edge) above those near it"
    if np.isinf(result.own["wavelength"]).any():
        subtitle += "; at the far right: not rotated"
    panels = strongest_heads(result, plane_curves, "wavelength in tokens", "lift, logits")
    return panels.finish(f"Planes of the strongest slash heads · {model_label(result.own)}", subtitle)


def profiles(result: Any) -> go.Figure:
    """Draw predicted and measured slash scores by distance, strongest heads."""
    subtitle = "slash score by distance, measured and as queries and keys of rank one would have it; all tokens"
    panels = strongest_heads(result, profile_curves, "distance + 1", "slash score")
    return panels.finish(f"Slash profiles predicted from rank one · {model_label(result.own)}", subtitle)


def strongest_heads(result: Any, draw: Callable[..., list[go.Scatter]], x_title: str, y_title: str) -> Panels:
    """Return a panel for each of the strongest heads, and the null's head of the same place behind."""
    whole = result.own.sel(tokens="all")
    heads = strongest_named(whole, whole["best_score"], N_HEADS)
    panels = Panels([f"{name}, score {float(one['best_score']):.2f}" for name, one in heads.items()])
    for number, one in enumerate(heads.values()):
        for side, data, colour in reversed(sides(result)):
            head = data.sel({dim: one[dim].item() for dim in HEAD})
            panels.add(number, *draw(head, side, colour, data is not result.own))
    return panels.axes(x_title, y_title, log_x=True)


def plane_curves(head: xr.Dataset, side: str, colour: str, is_null: bool) -> list[go.Scatter]:
    """Return the curves of one head by wavelength."""
    wavelength = head["wavelength"].values
    # what is not rotated has no wavelength: a place of its own
    x = np.where(np.isfinite(wavelength), wavelength, 10 * wavelength[np.isfinite(wavelength)].max(initial=1.0))
    curves = [(side, "all", "best", colour, "solid")]
    if not is_null:
        curves = [
            ("lift", "all", "best", COLOURS[0], "solid"),
            (f"lift, {TITLES['without first']}", "without first", "best", COLOURS[4], "dot"),
            ("edge", "all", "edge", COLOURS[1], "solid"),
        ]
    look: dict[str, Any] = {"mode": "lines+markers", "marker": {"size": 5}}
    return [
        line(x, head["contribution"].sel(tokens=tokens, at=at).values, name, shade, dash=dash, **look)
        for name, tokens, at, shade, dash in curves
    ]


def profile_curves(head: xr.Dataset, side: str, colour: str, is_null: bool) -> list[go.Scatter]:
    """Return the curves of one head by distance."""
    near = thinned(head.sel(tokens="all"))
    curves = {"score": ("measured", COLOURS[0], "solid"), "predicted": ("predicted from rank one", COLOURS[1], "dash")}
    if is_null:
        curves = {"score": (f"measured, {side}", colour, "solid")}
    x = near["distance"].values + 1
    return [line(x, near[name].values, label, shade, dash=dash) for name, (label, shade, dash) in curves.items()]


def bands(result: Any, at: str, title: str) -> go.Figure:
    """Draw the lift summed into bands, by group of heads."""
    data = result.own
    # a model that rotates all of a head has nothing to show there
    shown = [band for band in ALL_BANDS if band in BANDS or (data["bands"].sel(band=band) != 0).any()]
    panels = {
        words: [
            (name, colour, heads[["bands"]].sel(scheme=scheme, at=at))
            for name, colour, heads in head_groups(result, "all")
        ]
        for scheme, words in SCHEMES.items()
    }
    subtitle = (
        f"lift of the best diagonal above {ABOVE[at]}, summed over planes; by wavelength: high < 32 tokens, "
        f"medium up to {data.sizes['distance']}, low beyond; all tokens, a point a head"
    )
    boxes = group_boxes(panels, {band: ("bands", {"band": band}) for band in shown}, "lift, logits")
    return boxes.finish(f"{title} · {model_label(data)}", subtitle)


def match(result: Any) -> go.Figure:
    """Draw the correlation of predicted and measured profiles, by group of heads."""
    columns: dict[str, Any] = {
        "its own profile": ("correlation", {}),
        "those of other heads": ("chance_correlation", {}),
    }
    boxes = group_boxes({title: head_groups(result, one) for one, title in TITLES.items()}, columns, "correlation")
    subtitle = "correlation of predicted and measured slash scores over D < N/2, less uniform attention; a point a head"
    return boxes.finish(f"How well rank one predicts the slash · {model_label(result.own)}", subtitle)


FIGURES: Mapping[str, Callable[[Any], go.Figure]] = {
    "planes": planes,
    "bands": partial(bands, at="best", title="Which frequencies lift the slash"),
    "edge": partial(bands, at="edge", title="Which frequencies set the slash off"),
    "profiles": profiles,
    "match": match,
}
