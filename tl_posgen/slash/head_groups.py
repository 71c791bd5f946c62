"""Slash-dominant heads, other heads and heads of the random init: collected, averaged, tabulated, drawn."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.collector import Collector, HeadRows, Variable
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.report.figures import COLOURS, NULL_COLOUR, Panels, head_names, model_label
from tl_posgen.report.sentences import with_interval
from tl_posgen.slash.layer_means import SUFFIXES, require_two_tokens, statistics_of
from tl_posgen.stats.intervals import jackknife_interval
from tl_posgen.summary import Summary

TOKENS = {"all": "all tokens", "without_first_token": "first token left out"}
GROUPS = {"dominant": "slash-dominant", "other": "other"}
PER_HEAD = ("variant", "layer", "head")
Group = tuple[str, str, xr.Dataset]


class VariantCollector(Collector):
    """Collector of every prompt with and without its first token, as a dataset over `variant`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._of_variant = [HeadRows() for _ in SUFFIXES]

    def update(self, layer: LayerCapture) -> None:
        require_two_tokens(layer)
        found = layer.once(statistics_of)
        for first, (rows, suffix) in enumerate(zip(self._of_variant, SUFFIXES.values(), strict=True)):
            score, uniform = (getattr(found, f"{name}{suffix}") for name in ("score", "uniform"))
            rows.add(layer, score=score, uniform=uniform.expand_as(score), **self.measured(layer, first, score))

    def joined(self, other: Any) -> Any:
        both = super().joined(other)
        both._of_variant = [one.joined(more) for one, more in zip(self._of_variant, other._of_variant, strict=True)]
        return both

    def measured(
        self, layer: LayerCapture, first: int, score: Float[Tensor, "head distance"]
    ) -> dict[str, Float[Tensor, "head *dims"]]:
        """Return the further numbers of each head, from the token `first` on."""
        raise NotImplementedError

    def dataset(self) -> xr.Dataset:
        parts = [self.of_variant(first, rows) for first, rows in enumerate(self._of_variant)]
        # one token less: no value at the last distance
        joined = xr.concat(parts, xr.DataArray(list(SUFFIXES), dims="variant", name="variant"), join="outer")
        return joined.assign_attrs(kappa=self.options.kappa, rows=list(PER_HEAD))

    def of_variant(self, first: int, rows: HeadRows) -> xr.Dataset:
        """Return the means over prompts from the token `first` on, and numbers derived from them."""
        raise NotImplementedError


def group_means(
    data: xr.Dataset, names: Sequence[str], declared: Mapping[str, Variable] | None = None
) -> dict[str, Any]:
    """Return `n_dominant`, `n_other`, `<name>_dominant` and `<name>_other`: counts and means over groups of heads.

    A mean is None for an empty group. If `<name>_left_out` is given, the ends of each mean's interval are added.

    Args:
        data: `dominant`, the slash `score` (NaN for heads that were not measured) and the named variables, over
            (variant, layer, head). Means without the first token end in `_without_first_token`.
        declared: variables whose `bounds` their means keep to.

    Example:
        >>> heads = {"dominant": [[[True, False]]] * 2, "score": [[[0.3, 0]]] * 2, "r1": [[[0.9, 0.5]], [[0.8, 0.4]]]}
        >>> data = xr.Dataset({name: (("variant", "layer", "head"), x) for name, x in heads.items()})
        >>> found = group_means(data.assign_coords(variant=["all", "without_first_token"]), ["r1"])
        >>> found["n_dominant"], found["r1_other"], found["r1_dominant_without_first_token"]
        (1, 0.5, 0.8)
    """
    found: dict[str, Any] = {}
    bounds = {name: one.bounds for name, one in (declared or {}).items()}
    for variant, end in SUFFIXES.items():
        heads = data[["dominant", "score", *names]].sel(variant=variant)
        for group, mask in group_masks(heads).items():
            found[f"n_{group}{end}"] = int(mask.sum())
            for name in names:
                key, left_out = f"{name}_{group}{end}", f"{name}_left_out"
                found[key] = float(mean_of(heads[name], mask)) if mask.any() else None
                if mask.any() and left_out in data:
                    without = mean_of(data[left_out].sel(variant=variant), mask).values
                    share = data["prompt_share"].values
                    low, high = jackknife_interval(found[key], without, share, bounds.get(name))
                    found |= {f"{key}_low": float(low), f"{key}_high": float(high)}
    return found


def mean_of(values: xr.DataArray, heads: xr.DataArray) -> xr.DataArray:
    """Return the mean over these heads; NaN if one of them has no value."""
    return values.where(heads, 0).sum(("layer", "head"), skipna=False) / heads.sum()


def group_masks(heads: xr.Dataset) -> dict[str, xr.DataArray]:
    """Return the masks of the slash-dominant heads and of the other measured heads."""
    measured, dominant = heads["score"].notnull(), heads["dominant"].astype(bool)
    measured = measured.any([dim for dim in measured.dims if dim not in dominant.dims])
    return {"dominant": dominant & measured, "other": ~dominant & measured}


def in_groups(summary: Summary, names: Sequence[str], *, variant: str = "all", form: str = ".3f") -> str:
    """Format means by group: '0.947 and 0.964 in 31 slash-dominant heads, 0.823 and 0.903 in 9 other heads'."""
    end, phrases = SUFFIXES[variant], []
    for group, words in GROUPS.items():
        if n := summary[f"n_{group}{end}"]:
            values = " and ".join(with_interval(summary, f"{name}_{group}{end}", form) for name in names)
            none = group == "other" and not summary[f"n_dominant{end}"]
            phrases.append(f"{values} in {f'{count(n)}, none slash-dominant' if none else count(n, words)}")
    return ", ".join(phrases)


def count(n: int | float, words: str = "") -> str:
    """Format a number of heads, or their mean number over several random inits.

    Example:
        >>> count(1, "slash-dominant"), count(9.0), count(5 / 3, "other")
        ('1 slash-dominant head', '9 heads', '1.67 other heads on average')
    """
    heads = f"{n:.3g} {words}".strip() + (" head" if n == 1 else " heads")
    return heads if n == int(n) else f"{heads} on average"


def averaged(n: int | float) -> str:
    """Format the number alone: '2', or '1.67 on average'."""
    return f"{n:.3g}" if n == int(n) else f"{n:.3g} on average"


def group_table(summary: Summary, names: Mapping[str, str]) -> pd.DataFrame:
    """Return one row per choice of tokens and group of heads, one column per name (variable -> heading)."""
    rows = [
        {
            "tokens": TOKENS[variant],
            "heads": f"{summary[f'n_{group}{end}']} {words}",
            **{heading: summary[f"{name}_{group}{end}"] for name, heading in names.items()},
        }
        for variant, end in SUFFIXES.items()
        for group, words in GROUPS.items()
        if summary[f"n_{group}{end}"]
    ]
    return pd.DataFrame(rows)


def head_groups(result: Any, variant: str) -> list[Group]:
    """Return (name, colour, dataset over `place`) of each group of heads that is not empty; other dims are kept."""

    def some(data: xr.Dataset, *groups: str) -> xr.Dataset:
        heads = data.sel(variant=variant).stack(place=("layer", "head"))
        masks = group_masks(heads)
        return heads.isel(place=np.flatnonzero(sum(masks[group] for group in groups)))

    found = [
        ("slash-dominant heads", COLOURS[1], some(result.dataset, "dominant")),
        ("other heads", COLOURS[0], some(result.dataset, "other")),
    ]
    if result.null is not None:
        found.append((model_label(result.null), NULL_COLOUR, some(result.null, *GROUPS)))
    return [group for group in found if group[2].sizes["place"]]


def group_boxes(panels: Mapping[str, Sequence[Group]], names: Mapping[str, str], y_title: str) -> Panels:
    """Draw one panel per title, with a category per variable (name -> label), a box per group and a point per head."""
    drawn = Panels(list(panels), columns=len(panels), row_height=280, shared_yaxes=True)
    for number, groups in enumerate(panels.values()):
        for name, colour, group in groups:
            values = {label: group[variable].values for variable, label in names.items()}
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


def head_points(heads: xr.Dataset, x: str, y: str, hover: str, **more: Any) -> go.Scatter:
    """Return a scatter of one variable against another, one point per head."""
    names = head_names(heads["place"].values)
    template = f"%{{text}}<br>{hover}<extra></extra>"
    return go.Scatter(x=heads[x].values, y=heads[y].values, mode="markers", text=names, hovertemplate=template, **more)
