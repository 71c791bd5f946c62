"""Slash statistics of a captured layer, and what follows from a mean slash score: each head's best distance."""

from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.core.measure import HEAD, Variable, by_tokens
from tl_posgen.errors import InputError
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.report.circuits import CROP
from tl_posgen.slash.numbers.slash_scores import SlashStatistics, slash_statistics_from_qk, slash_statistics_of_rows

REST = "_without_first_token"  # end of the names of such statistics
EXAMPLES = {
    "token_text": Variable("tokens of the first prompt", dims=("key",)),
    "example_layer": Variable("layer of an example", dims=("example",)),
    "example_head": Variable("head of an example", dims=("example",)),
}


def statistics_of(layer: LayerCapture) -> SlashStatistics:
    """Return slash statistics of the model's own pattern; ask for them by `layer.once`."""

    def rows_of(heads: slice, start: int, stop: int) -> Float[Tensor, "head row key"]:
        return layer.of_heads(heads).pattern_rows(start, stop)

    return slash_statistics_of_rows(rows_of, len(layer.heads), layer.length, layer.geometry.window, True, layer.device)


def statistics_from_qk(
    layer: LayerCapture, q: Float[Tensor, "head pos d_head"], k: Float[Tensor, "head pos d_head"]
) -> SlashStatistics:
    """Return those that other q and k, already rotated, give in this layer; without entropies."""
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


def with_tokens(found: SlashStatistics) -> dict[str, Float[Tensor, "tokens *dims"]]:
    """Return the statistics that there are with and without the first token, along a first axis `tokens`."""
    values = vars(found)
    whole = {name: value for name, value in values.items() if f"{name}{REST}" in values}
    return by_tokens(whole, {name: values[f"{name}{REST}"] for name in whole})


def require_two_tokens(layer: LayerCapture) -> None:
    """Refuse a prompt that has nothing left without its first token."""
    if layer.length < 2:
        raise InputError("a prompt of one token: the first token cannot be left out of it; give two at least")


def best_distance(score: xr.DataArray) -> xr.DataArray:
    """Return where each head's score is highest over D < N/2, as the last D are means over few queries; NaN of no
    score."""
    n = score.notnull().any([dim for dim in score.dims if dim in HEAD]).sum("distance")
    near = score.where(score["distance"] < np.maximum(1, n // 2))
    # not idxmax: it would give floats even where every head has a score
    return where_measured(near.fillna(-1.0).argmax("distance"), score)


def at_distance(profile: xr.DataArray, distance: xr.DataArray) -> xr.DataArray:
    """Return a profile at each head's own distance; NaN where that is."""
    found = profile.sel(distance=distance.fillna(0).astype(int), drop=True)
    return where_measured(found, distance)


def where_measured(values: xr.DataArray, score: xr.DataArray) -> xr.DataArray:
    """Return `values` of heads that have a score; integers stay integers where all have one."""
    measured = score.notnull()
    measured = measured.any("distance") if "distance" in measured.dims else measured
    return values if measured.all() else values.where(measured)


# Heads that are shown token by token


def strongest(score: xr.DataArray, most: int) -> list[tuple[int, int]]:
    """Return (layer, head) of the highest scores, highest first."""
    return score.transpose(*HEAD).to_series().dropna().nlargest(most).index.to_list()


def cropped(layer: LayerCapture) -> dict[tuple[int, int], np.ndarray]:
    """Return (layer, head) -> the beginning of its pattern [query, key], as much as is shown token by token."""
    patterns = layer.pattern_rows(0, min(CROP, layer.length)).float().clone().cpu().numpy()
    return {(layer.layer, head): pattern for head, pattern in zip(layer.heads, patterns, strict=True)}


def example_heads(data: xr.Dataset) -> list[tuple[int, int]]:
    """Return (layer, head) of each example."""
    layers, heads = (data[f"example_{name}"].values.astype(int).tolist() for name in HEAD)
    return list(zip(layers, heads, strict=True))


def examples(data: xr.Dataset) -> list[Any]:
    """Return the numbers of each head that is shown token by token; none where no token ids were given."""
    return [data.sel(layer=layer, head=head) for layer, head in example_heads(data)] if "pattern" in data else []
