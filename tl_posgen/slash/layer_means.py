"""Slash statistics of a captured layer, and what follows from a mean slash score: dominant heads, best distances."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.core.measure import HEAD, Measure
from tl_posgen.core.options import Each, Threshold, Whole
from tl_posgen.errors import InputError
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.slash.numbers.slash_scores import (
    SHORT_DISTANCES,
    SHORT_KAPPA,
    SlashStatistics,
    slash_statistics_from_qk,
    slash_statistics_of_rows,
)

PER_HEAD = ("tokens", *HEAD)
SHARE: dict[str, Any] = {"interval": True, "bounds": (0, 1)}


@dataclass(frozen=True)
class Dominance(Measure):
    """SlashScore(D) >= `thresholds` at one of the distances D: base of the measures that single out such heads."""

    kappa: Threshold = SHORT_KAPPA
    distances: Annotated[Sequence[Whole], Each()] = tuple(SHORT_DISTANCES)

    all_reached = True  # whether prompts must reach all of the distances without their first token; else one with it

    def prepare(self, model: Any, tokens: Sequence[Tensor]) -> "Dominance":
        distance = max(self.distances) if self.all_reached else min(self.distances)
        prompt = "without its first token the longest prompt" if self.all_reached else "the longest prompt"
        n = max(len(prompt) for prompt in tokens) - self.all_reached
        if distance >= n:
            raise InputError(f"distance {distance}: {prompt} has {n} tokens; give longer prompts, or smaller distances")
        return self

    def dominant_at(self, score: xr.DataArray, uniform: xr.DataArray) -> xr.DataArray:
        """Return score >= `thresholds` at each of the distances that the prompts reach, along `short_distance`."""
        reached = [one for one in sorted(self.distances) if one < score.sizes["distance"]]
        dominant = score >= thresholds(self.kappa, uniform)
        return dominant.transpose(*score.dims).sel(distance=reached).rename(distance="short_distance")


# One layer of one prompt


def statistics_of(layer: LayerCapture) -> SlashStatistics:
    """Return slash statistics of the model's own pattern; ask for them by `layer.once`."""

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


def require_two_tokens(layer: LayerCapture) -> None:
    """Refuse a prompt that has nothing left without its first token."""
    if layer.length < 2:
        raise InputError("a prompt of one token: the first token cannot be left out of it; give two at least")


# Means over prompts


def thresholds(kappa: float, uniform: xr.DataArray) -> xr.DataArray:
    """Return kappa; twice the score of uniform attention over the visible keys where that reaches kappa, as in prompts
    of up to about 40 tokens and in narrow windows: there kappa tells nothing of a head [ours]."""
    return xr.where(uniform < kappa, kappa, 2 * uniform)


def best_distance(score: xr.DataArray) -> xr.DataArray:
    """Return where each head's score is highest over D < N/2, as the last D are means over few queries."""
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


def strongest(score: xr.DataArray, most: int) -> list[tuple[int, int]]:
    """Return (layer, head) of the highest scores, highest first."""
    return score.transpose(*HEAD).to_series().dropna().nlargest(most).index.to_list()
