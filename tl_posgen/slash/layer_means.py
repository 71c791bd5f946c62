"""Slash statistics of whole models: means over prompts, layer by layer, as labelled arrays."""

from dataclasses import fields

import numpy as np
import xarray as xr

from tl_posgen.errors import InputError
from tl_posgen.models.capture import LayerCapture
from tl_posgen.report.circuits import CROP
from tl_posgen.slash.slash_scores import SlashMean, SlashStatistics, slash_statistics

DIMS = {"score": ("head", "distance"), "uniform": ("distance",)}  # of the statistics that are no single number a head


def statistics_of(layer: LayerCapture) -> SlashStatistics:
    """Slash statistics of the model's own pattern; ask for them by `layer.once`."""
    assert layer.pattern is not None
    return slash_statistics(layer.pattern, window=layer.geometry.window)


def require_two_tokens(layer: LayerCapture) -> None:
    """Refuse a prompt that has nothing left without its first token."""
    if layer.length < 2:
        raise InputError("a prompt of one token: the first token cannot be left out of it; give two at least")


def cropped(layer: LayerCapture) -> dict[tuple[int, int], np.ndarray]:
    """(layer, head) -> the beginning of its pattern [query, key], as much as is shown token by token."""
    assert layer.pattern is not None
    patterns = layer.pattern[:, :CROP, :CROP].float().clone().cpu().numpy()
    return {(layer.layer, head): pattern for head, pattern in zip(layer.heads, patterns, strict=True)}


class LayerMeans:
    """E_P[statistics] of every layer: fed layer by layer and prompt by prompt, then one dataset."""

    def __init__(self) -> None:
        self._means: dict[int, SlashMean] = {}
        self._heads: dict[int, list[int]] = {}

    def add(self, layer: LayerCapture, statistics: SlashStatistics) -> None:
        self._heads[layer.layer] = list(layer.heads)
        self._means.setdefault(layer.layer, SlashMean()).add(statistics)

    def dataset(self) -> xr.Dataset:
        """Labelled by layer, head and distance; NaN for a head that a layer was not asked for, and for
        `*_without_first_token` at the last distance, where it has none."""
        found = {layer: mean.result() for layer, mean in sorted(self._means.items())}
        heads = sorted({head for of_layer in self._heads.values() for head in of_layer})
        n = max(statistics.score.shape[-1] for statistics in found.values())
        coords = {"layer": list(found), "head": heads, "distance": range(n)}
        data = {}
        for one in fields(SlashStatistics):
            dims = ("layer", *DIMS.get(one.name.removesuffix("_without_first_token"), ("head",)))
            table = np.full([len(coords[dim]) for dim in dims], np.nan)
            for row, (layer, statistics) in zip(table, found.items(), strict=True):
                values = getattr(statistics, one.name).cpu().numpy()
                of_heads = ([heads.index(head) for head in self._heads[layer]],) if "head" in dims else ()
                row[of_heads + ((slice(values.shape[-1]),) if "distance" in dims else ())] = values
            data[one.name] = (dims, table)
        return xr.Dataset(data, coords)


def best_distance(score: xr.DataArray) -> xr.DataArray:
    """Where each head's score is highest over D < N/2, as the last D are means over few queries; NaN of no score."""
    near = score.isel(distance=slice(max(1, score.sizes["distance"] // 2)))
    # not idxmax: it would give floats even where every head has a score
    return where_measured(near.fillna(-1.0).argmax("distance"), score)


def at_distance(profile: xr.DataArray, distance: xr.DataArray) -> xr.DataArray:
    """A profile at each head's own distance; NaN where that is."""
    found = profile.sel(distance=distance.fillna(0).astype(int), drop=True)
    return where_measured(found, distance)


def where_measured(values: xr.DataArray, score: xr.DataArray) -> xr.DataArray:
    """`values` of heads that have a score; integers stay integers where all have one."""
    measured = score.notnull()
    measured = measured.any("distance") if "distance" in measured.dims else measured
    return values if measured.all() else values.where(measured)


def of_head(data: xr.Dataset, reference: str) -> xr.Dataset:
    """The head "3.6", layer 3 head 6."""
    layer, head = reference.split(".")
    return data.sel(layer=int(layer), head=int(head))
