"""Slash statistics of a captured layer, and what follows from means of slash scores: dominant heads, best distances."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.core.measure import HEAD, Measure, Variable
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Each, Threshold, Whole
from tl_posgen.errors import InputError
from tl_posgen.models.layers.capture import LayerCapture, scores_from
from tl_posgen.models.session import Session
from tl_posgen.rope.spectra import Spectrum, spectrum
from tl_posgen.slash.numbers.slash_scores import (
    SHORT_DISTANCES,
    SHORT_KAPPA,
    SlashStatistics,
    slash_statistics_of_rows,
)

PER_HEAD = ("tokens", *HEAD)
TITLES = {"all": "all tokens", "without first": "first token left out"}  # of labels of the dim tokens
GROUPS = {"dominant": "slash-dominant", "other": "other"}
AT_BEST = {  # variables of measures of heads at their best distances; `at_best` gives the first three
    "slash_score": Variable.share("slash score", "highest over D < N/2", PER_HEAD),
    "slash_distance": Variable("slash distance", "tokens", "D of slash_score", PER_HEAD, whole=True),
    "best_uniform": Variable.share(
        "slash score of uniform attention", "at the best distance", PER_HEAD, compared=False
    ),
    "dominant": Variable(
        "slash-dominant", "", "score >= kappa, or twice uniform attention, at one of the distances", PER_HEAD
    ),
}


@dataclass(frozen=True)
class Dominance(Measure):
    """SlashScore(D) >= `thresholds` at one of the distances D: base of the measures that single out such heads."""

    kappa: Threshold = SHORT_KAPPA
    distances: Annotated[Sequence[Whole], Each()] = tuple(SHORT_DISTANCES)

    all_reached = True  # whether prompts must reach all of the distances without their first token; else one with it

    def prepare(self, session: Session, tokens: Sequence[Tensor]) -> "Dominance":
        distance = max(self.distances) if self.all_reached else min(self.distances)
        prompt = "without its first token the longest prompt" if self.all_reached else "the longest prompt"
        n = max(len(prompt) for prompt in tokens) - self.all_reached
        if distance >= n:
            remedy = "give longer prompts, or smaller distances"
            raise InputError(f"{self.name}: distance {distance}: {prompt} has {n} tokens; {remedy}")
        return self

    def dominant_at(self, score: xr.DataArray, uniform: xr.DataArray) -> xr.DataArray:
        """Return score >= `thresholds` at each of the distances that the prompts reach, along `short_distance`."""
        dominant = (score >= thresholds(self.kappa, uniform)).transpose(*score.dims)
        return dominant.sel(distance=reached(self.distances, score)).rename(distance="short_distance")


# One layer of one prompt


def statistics_of(layer: LayerCapture, *, entropy: bool = True) -> SlashStatistics:
    """Return slash statistics of the model's own pattern; ask for them by `layer.shared`.

    Args:
        entropy: False leaves the entropies out, whose logarithms take most of the time.
    """

    def rows_of(heads: slice, start: int, stop: int) -> Float[Tensor, "head row key"]:
        return layer.of_heads(heads).pattern_rows(start, stop)

    arguments = (layer.length, layer.geometry.window, entropy, layer.device)
    return slash_statistics_of_rows(rows_of, len(layer.heads), *arguments)


def statistics_from_qk(
    layer: LayerCapture, q: Float[Tensor, "head pos d_head"], k: Float[Tensor, "head pos d_head"]
) -> SlashStatistics:
    """Return slash statistics of other q and k, already rotated, in this layer; without entropies."""

    def rows_of(heads: slice, start: int, stop: int) -> Float[Tensor, "head row key"]:
        head_numbers, positions = layer.heads[heads], layer.positions[start:stop]
        scores = scores_from(q[heads, start:stop], k[heads, :stop], layer.geometry, head_numbers, positions)
        return layer.of_heads(heads).attention(scores)

    return slash_statistics_of_rows(rows_of, len(q), q.shape[1], layer.geometry.window, False, q.device)


def spectra_of(layer: LayerCapture, first: int = 0) -> dict[str, Spectrum]:
    """Return the spectra of queries and keys before RoPE, from a token on, by side; heads that share keys share one.
    Ask for them by `layer.shared`."""
    keys = layer.geometry.key_heads(layer.heads)
    different = list(dict.fromkeys(keys))
    of_keys = spectrum(layer.k[[keys.index(key) for key in different], first:])
    by_head = [different.index(key) for key in keys]
    return {"q": spectrum(layer.q[:, first:]), "k": Spectrum(*(array[by_head] for array in of_keys))}


def starts_of(layer: LayerCapture) -> tuple[int, int]:
    """Return where all tokens begin, and those without the first; refuse a prompt that has none of the latter."""
    if layer.length < 2:
        raise InputError("a prompt of one token: the first token cannot be left out of it; give two at least")
    return 0, 1


# Means over prompts


def reached(distances: Sequence[int], score: xr.DataArray) -> list[int]:
    """Return those of the distances that the prompts reach."""
    return [distance for distance in sorted(distances) if distance < score.sizes["distance"]]


def thresholds(kappa: float, uniform: xr.DataArray) -> xr.DataArray:
    """Return kappa; twice the score of uniform attention over the visible keys where that reaches kappa, as in prompts
    of up to about 40 tokens and in narrow windows: there kappa tells nothing of a head [ours]."""
    return xr.where(uniform < kappa, kappa, 2 * uniform)


def slash_distance(score: xr.DataArray) -> xr.DataArray:
    """Return where each head's score is highest over D < N/2, as the last D are means over few queries."""
    n = score.notnull().any([dim for dim in score.dims if dim in HEAD]).sum("distance")
    near = score.where(score["distance"] < np.maximum(1, n // 2))
    # not idxmax: it would give floats even where every head has a score
    return where_measured(near.fillna(-1.0).argmax("distance"), score)


def at_best(score: xr.DataArray, uniform: xr.DataArray) -> dict[str, xr.DataArray]:
    """Return the highest score over D < N/2, its distance, and the score of uniform attention there."""
    distance = slash_distance(score)
    return {
        "slash_score": at_distance(score, distance),
        "slash_distance": distance,
        "best_uniform": at_distance(uniform, distance),
    }


def at_distance(profile: xr.DataArray, distance: xr.DataArray) -> xr.DataArray:
    """Return a profile at each head's own distance; NaN where that is."""
    values = profile.sel(distance=distance.fillna(0).astype(int), drop=True)
    return where_measured(values, distance)


def where_measured(values: xr.DataArray, score: xr.DataArray) -> xr.DataArray:
    """Return `values` of heads that have a score; integers stay integers where all have one."""
    measured = score.notnull()
    measured = measured.any("distance") if "distance" in measured.dims else measured
    return values if measured.all() else values.where(measured)


# Slash-dominant heads beside the others, and beside those of the null models


def _group_masks(numbers: Numbers, tokens: str) -> dict[str, xr.DataArray]:
    """Return which heads are slash-dominant, and which of those measured (they have a best distance) are not."""
    heads = numbers.dataset[["slash_distance", "dominant"]].sel(tokens=tokens)  # not the curves beside them
    measured, dominant = heads["slash_distance"].notnull(), heads["dominant"].astype(bool)
    return {"dominant": dominant & measured, "other": ~dominant & measured}


def n_heads(numbers: Numbers, group: str, tokens: str = "all") -> Number:
    """Return how many heads are in a group."""
    return numbers.number(_group_masks(numbers, tokens)[group].sum(HEAD))


def mean_over_group(numbers: Numbers, array: xr.DataArray, group: str, tokens: str = "all") -> xr.DataArray:
    """Return the mean of an array over the heads of a group; NaN where one of them has no value, or there is none."""
    heads = _group_masks(numbers, tokens)[group]
    return array.where(heads, 0).sum(HEAD, skipna=False) / heads.sum(HEAD)


def group_mean(numbers: Numbers, name: str, group: str, tokens: str = "all", **labels: Any) -> Number:
    """Return the mean of a variable over the heads of a group."""
    array = mean_over_group(numbers, numbers.array(name, tokens=tokens, **labels), group, tokens)
    return numbers.number(array, numbers.measure.variables[name].bounds)


def group_table(numbers: Numbers, columns: Mapping[str, xr.DataArray]) -> pd.DataFrame:
    """Return a row for each choice of tokens and group of heads, a column for each array [tokens, layer, head]."""
    rows = []
    for (tokens, title), (group, label) in product(TITLES.items(), GROUPS.items()):
        if n := n_heads(numbers, group, tokens).value:
            means = {
                name: mean_over_group(numbers, array.sel(tokens=tokens), group, tokens)
                for name, array in columns.items()
            }
            values = {heading: numbers.number(mean).value for heading, mean in means.items()}
            rows.append({"tokens": title, "heads": f"{n:.3g} {label}", **values})
    return pd.DataFrame(rows)
