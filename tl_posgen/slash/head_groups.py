"""Slash-dominant heads beside the others, and beside those of the random init: means, tables, boxes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.measure import Summary
from tl_posgen.report.figures import COLOURS, NULL_COLOUR, Panels, head_names, model_label
from tl_posgen.report.sentences import said
from tl_posgen.slash.entries import mean_of

VARIANTS = {"all": 0, "without_first_token": 1}  # name -> tokens left out at the start
TOKENS = {"all": "all tokens", "without_first_token": "first token left out"}
GROUPS = {"dominant": "slash-dominant", "other": "other"}
Group = tuple[str, str, xr.Dataset]
Values = Callable[[xr.Dataset], xr.DataArray]


def group_means(data: xr.Dataset, names: Sequence[str]) -> dict[str, Any]:
    """`n_dominant`, `n_other`, and `<name>_dominant`, `<name>_other`, means over these heads; None for an empty group.

    Args:
        data: `dominant`, the slash `score`, which tells the heads that were measured, and the variables named, over
            (variant, layer, head). Means without the first token end in `_without_first_token`.

    Example:
        >>> heads = {"dominant": [[[True, False]]] * 2, "score": [[[0.3, 0]]] * 2, "r1": [[[0.9, 0.5]], [[0.8, 0.4]]]}
        >>> data = xr.Dataset({name: (("variant", "layer", "head"), x) for name, x in heads.items()})
        >>> found = group_means(data.assign_coords(variant=["all", "without_first_token"]), ["r1"])
        >>> found["n_dominant"], found["r1_other"], found["r1_dominant_without_first_token"]
        (1, 0.5, 0.8)
    """
    found: dict[str, Any] = {}
    for variant in VARIANTS:
        end = "" if variant == "all" else f"_{variant}"
        heads = data[["dominant", "score", *names]].sel(variant=variant)
        for group, mask in group_masks(heads).items():
            found[f"n_{group}{end}"] = int(mask.sum())
            for name in names:
                mean = float(heads[name].where(mask).mean()) if mask.any() else None
                found[f"{name}_{group}{end}"] = mean
    return found


def group_masks(heads: xr.Dataset) -> dict[str, xr.DataArray]:
    """Which heads are slash-dominant, and which of those measured are not."""
    measured, dominant = heads["score"].notnull(), heads["dominant"].astype(bool)
    measured = measured.any([dim for dim in measured.dims if dim not in dominant.dims])
    return {"dominant": dominant & measured, "other": ~dominant & measured}


def in_groups(summary: Summary, names: Sequence[str], *, variant: str = "all", form: str = ".3f") -> str:
    """'0.947 and 0.964 in 31 slash-dominant heads, 0.823 and 0.903 in 9 other heads'."""
    end = "" if variant == "all" else f"_{variant}"
    phrases = []
    for group, words in GROUPS.items():
        if n := round(summary[f"n_{group}{end}"]):
            values = " and ".join(said(mean_of(summary, f"{name}_{group}{end}"), form) for name in names)
            none = group == "other" and not summary[f"n_dominant{end}"]
            heads = f"{n} head{'' if n == 1 else 's'}, none slash-dominant" if none else count(n, words)
            phrases.append(f"{values} in {heads}")
    return ", ".join(phrases)


def count(n: int, words: str) -> str:
    """'1 slash-dominant head', '9 other heads'."""
    return f"{n} {words} head{'' if n == 1 else 's'}"


def group_table(summary: Summary, names: Mapping[str, str]) -> pd.DataFrame:
    """A row for each choice of tokens and group of heads, a column for each name (variable -> heading)."""
    rows = []
    for variant, tokens in TOKENS.items():
        end = "" if variant == "all" else f"_{variant}"
        for group, words in GROUPS.items():
            if n := summary[f"n_{group}{end}"]:
                values = {heading: summary[f"{name}_{group}{end}"] for name, heading in names.items()}
                rows.append({"tokens": tokens, "heads": f"{n} {words}", **values})
    return pd.DataFrame(rows)


def head_groups(result: Any, variant: str) -> list[Group]:
    """(name, colour, dataset over `place`), empty groups left out; what has other dims than heads keeps them."""
    heads = result.dataset.sel(variant=variant).stack(place=("layer", "head"))
    masks = group_masks(heads)
    found = [
        ("slash-dominant heads", COLOURS[1], heads.isel(place=np.flatnonzero(masks["dominant"]))),
        ("other heads", COLOURS[0], heads.isel(place=np.flatnonzero(masks["other"]))),
    ]
    if result.null is not None:
        null = result.null.sel(variant=variant).stack(place=("layer", "head"))
        masks = group_masks(null)
        measured = np.flatnonzero(masks["dominant"] | masks["other"])
        found.append((model_label(result.null), NULL_COLOUR, null.isel(place=measured)))
    return [group for group in found if group[2].sizes["place"]]


def group_boxes(panels: Mapping[str, tuple[Sequence[Group], Mapping[str, Values]]], y_title: str) -> Panels:
    """A panel a title; in it a category for each of the values, and for each group a box with a point a head."""
    drawn = Panels(list(panels), columns=len(panels), row_height=280, shared_yaxes=True)
    for number, (groups, measures) in enumerate(panels.values()):
        for name, colour, group in groups:
            values = {label: measure(group).values for label, measure in measures.items()}
            box = go.Box(
                x=[label for label, value in values.items() for _ in value],
                y=np.concatenate(list(values.values())),
                name=name,
                marker={"color": colour, "size": 4},
                line={"width": 1},
                boxpoints="all",
                jitter=0.5,
                pointpos=0,
                text=head_names(group["place"].values) * len(values),
                hovertemplate="%{text}: %{y:.3f}<extra></extra>",
            )
            drawn.add(number, box)
    drawn.figure.update_layout(boxmode="group")
    return drawn.axes("", y_title)
