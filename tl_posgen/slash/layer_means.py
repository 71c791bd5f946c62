"""Slash statistics of whole models: per head for `HeadRows`, means over prompts, each head's best distance."""

from collections.abc import Mapping

import numpy as np
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.collector import HeadRows, Variable
from tl_posgen.errors import InputError
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.report.circuits import CROP
from tl_posgen.slash.slash_scores import SlashStatistics, slash_statistics_from_qk, slash_statistics_of_rows

SUFFIXES = {"all": "", "without_first_token": "_without_first_token"}  # choice of tokens -> end of names
WITHOUT = "the first token's column removed, rows renormalised"
EXAMPLES = {
    "token_text": Variable("tokens of the first prompt", dims=("key",)),
    "example_layer": Variable("layer of an example", dims=("example",)),
    "example_head": Variable("head of an example", dims=("example",)),
}


def statistics_of(layer: LayerCapture) -> SlashStatistics:
    """Return slash statistics of the model's own pattern; call it by `layer.once`."""

    def rows_of(heads: slice, start: int, stop: int) -> Float[Tensor, "head row key"]:
        return layer.of_heads(heads).pattern_rows(start, stop)

    return slash_statistics_of_rows(rows_of, len(layer.heads), layer.length, layer.geometry.window, True, layer.device)


def statistics_from_qk(
    layer: LayerCapture, q: Float[Tensor, "head pos d_head"], k: Float[Tensor, "head pos d_head"]
) -> SlashStatistics:
    """Return slash statistics of other q and k, already rotated, in this layer; without entropies."""
    geometry, slopes = layer.geometry, layer.geometry.alibi_slopes
    return slash_statistics_from_qk(
        q,
        k,
        geometry.scale,
        window=geometry.window,
        soft_cap=geometry.soft_cap,
        alibi_slopes=None if slopes is None else slopes[list(layer.heads)],
        entropy=False,
    )


def by_head(found: SlashStatistics) -> dict[str, Tensor]:
    """Return every statistic with the head as first axis; those of uniform attention are repeated."""
    heads = len(found.score)
    return {
        name: value.expand(heads, -1) if name.startswith("uniform") else value for name, value in vars(found).items()
    }


def means_over_prompts(rows: HeadRows) -> xr.Dataset:
    """E_P of every statistic of `by_head`, each over the prompts that have it: a distance over those that reach it.

    NaN for heads that were not selected, and for `*_without_first_token` at the last distance.
    """
    over_distances = {name: ["distance"] if name.startswith(("score", "uniform")) else [] for name in rows.names}
    data = xr.Dataset({name: rows.array(name, *dims).mean("prompt") for name, dims in over_distances.items()})
    uniform = [name for name in rows.names if name.startswith("uniform")]
    return data.assign(data[uniform].max("head"))


def require_two_tokens(layer: LayerCapture) -> None:
    """Refuse a prompt of one token, which is empty without its first token."""
    if layer.length < 2:
        raise InputError("a prompt of one token: the first token cannot be left out of it; give two at least")


def best_distance(score: xr.DataArray) -> xr.DataArray:
    """argmax_D score over D < N/2 of each head, since larger D average few queries; NaN without a score."""
    near = score.isel(distance=slice(max(1, score.sizes["distance"] // 2)))
    # not idxmax: it would return floats even if every head has a score
    return where_measured(near.fillna(-1.0).argmax("distance"), score)


def at_distance(profile: xr.DataArray, distance: xr.DataArray) -> xr.DataArray:
    """Return a profile at each head's own distance; NaN where the distance is NaN."""
    found = profile.sel(distance=distance.fillna(0).astype(int), drop=True)
    return where_measured(found, distance)


def where_measured(values: xr.DataArray, score: xr.DataArray) -> xr.DataArray:
    """Return `values` of heads that have a score; integers stay integers if all heads have one."""
    measured = score.notnull()
    measured = measured.any("distance") if "distance" in measured.dims else measured
    return values if measured.all() else values.where(measured)


def strongest(score: xr.DataArray, most: int) -> list[tuple[int, int]]:
    """Return (layer, head) of the highest scores, highest first."""
    return score.to_series().dropna().nlargest(most).index.to_list()


def of_head(data: xr.Dataset, reference: str) -> xr.Dataset:
    """Select a head by its reference, "3.6" for layer 3 head 6."""
    layer, head = reference.split(".")
    return data.sel(layer=int(layer), head=int(head))


def cropped(layer: LayerCapture) -> dict[tuple[int, int], np.ndarray]:
    """Return the first CROP x CROP entries of each head's pattern [query, key], by (layer, head)."""
    patterns = layer.pattern_rows(0, min(CROP, layer.length)).float().clone().cpu().numpy()
    return {(layer.layer, head): pattern for head, pattern in zip(layer.heads, patterns, strict=True)}


def examples(data: xr.Dataset) -> list[xr.Dataset]:
    """Return the results of each head that is shown token by token; none if no token ids were given."""
    if "pattern" not in data:
        return []
    places = zip(data["example_layer"].values, data["example_head"].values, strict=True)
    return [data.sel(layer=layer, head=head) for layer, head in places]


def with_and_without(declared: Mapping[str, Variable]) -> dict[str, Variable]:
    """Return the declarations, and those of the same numbers without the first token."""
    without = {
        f"{name}{SUFFIXES['without_first_token']}": Variable(
            f"{one.label} without first token", one.unit, WITHOUT, one.dims, interval=one.interval, bounds=one.bounds
        )
        for name, one in declared.items()
    }
    return {**declared, **without}
