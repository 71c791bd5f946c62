"""Analyzer of slash scores: how much attention each head pays at every distance, and how near rank one Q and K are."""

from collections.abc import Mapping, Sequence
from dataclasses import fields

import numpy as np
import torch
import xarray as xr

from tl_posgen.analyzers.collect import HeadRows
from tl_posgen.errors import InputError
from tl_posgen.maths.slash import (
    LONG_KAPPA,
    SHORT_DISTANCES,
    SHORT_KAPPA,
    SlashMean,
    SlashStatistics,
    long_distances,
    slash_statistics,
)
from tl_posgen.maths.spectra import spectrum
from tl_posgen.models.capture import LayerCapture

BY_DISTANCE = ("score", "baseline")


class Slash:
    r"""SlashScore(D) = E_P[1/(N-D) sum_{i>=D} S_{i,i-D}], S the attention pattern, for every head and distance D.

    Over (layer, head, distance) `score`, over (layer, distance) `baseline`, that of uniform attention over the visible
    keys, and over (layer, head, short_distance) `dominant`: score >= kappa. Per head: `best_score` at `best_distance`
    and its `best_ratio` to the baseline (over D < N/2, as the last D are means over few queries), `previous_token` =
    score at D = 1, `n_dominant`, `n_long` (how many D of 50 .. N/2 reach kappa_long), `attention_distance` (tokens),
    `entropy` (nats), `relative_entropy`, `first_token` (attention paid to it), and of Q and K before RoPE, after
    qk-norm: `r1_q`, `r1_k` = s_1^2 / sum s^2 and `rank95_q`, `rank95_k`, how many s^2 make 95 % of the sum. Each is the
    mean over prompts. `*_without_first`: the first token's column removed and the rows renormalised.

    Args:
        kappa: slash score that makes a head dominant at one of `distances`.
        distances: where to look; those that no prompt reaches are left out.
        kappa_long: the same for the long distances.

    Raises:
        InputError: kappa or kappa_long outside (0, 1], no distance, or a negative one.

    Source: slash score and dominance: Cheng et al. 2026 (arXiv 2601.08297); the default kappa and distances, the
    baseline and the variants without the first token are ours.

    Example:
        >>> import tl_posgen
        >>> report = tl_posgen.analyze("mini", "Down, down, down.", analyzers=["slash"], null_seed=None)
        >>> scores = report["slash"].dataset["score"]
        >>> scores.dims, bool((scores.sel(distance=0) > 0).all())
        (('layer', 'head', 'distance'), True)
    """

    name: str = "slash"
    needs: frozenset[str] = frozenset({"pattern"})

    def __init__(
        self,
        *,
        kappa: float = SHORT_KAPPA,
        distances: Sequence[int] = SHORT_DISTANCES,
        kappa_long: float = LONG_KAPPA,
    ):
        check_dominance(kappa, distances)
        check_dominance(kappa_long, distances)
        self.kappa, self.distances, self.kappa_long = kappa, list(distances), kappa_long
        self._means: dict[int, SlashMean] = {}
        self._spectra = HeadRows()
        self._heads: list[int] = []

    def update(self, capture: LayerCapture) -> None:
        assert capture.pattern is not None
        self._heads = list(capture.heads)
        mean = self._means.setdefault(capture.layer, SlashMean())
        mean.add(slash_statistics(capture.pattern, window=capture.geometry.window))
        q, k = spectrum(capture.q), spectrum(capture.k)
        self._spectra.add(capture, r1_q=q.r1, r1_k=k.r1, rank95_q=q.rank, rank95_k=k.rank)

    def result(self) -> xr.Dataset:
        statistics = {layer: mean.result() for layer, mean in self._means.items()}
        dataset = statistics_dataset(statistics, self._heads)
        spectra = {name: self._spectra.array(name).mean("prompt") for name in ("r1_q", "r1_k", "rank95_q", "rank95_k")}
        n = dataset.sizes["distance"]
        long = dataset["score"].sel(distance=list(long_distances(n)))
        dominant = self._dominant(dataset["score"])
        counts = {"n_dominant": dominant.sum("short_distance"), "n_long": (long >= self.kappa_long).sum("distance")}
        dataset = dataset.assign(best(dataset) | counts | spectra | {"dominant": dominant})
        dataset["previous_token"] = dataset["score"].sel(distance=1, drop=True)
        return dataset.assign_attrs(kappa=self.kappa, kappa_long=self.kappa_long)

    def _dominant(self, score: xr.DataArray) -> xr.DataArray:
        reached = [distance for distance in self.distances if distance < score.sizes["distance"]]
        return (score.sel(distance=reached) >= self.kappa).rename(distance="short_distance")


def check_dominance(kappa: float, distances: Sequence[int]) -> None:
    """Refuse what can make no head dominant, before anything runs."""
    if not 0 < kappa <= 1:
        raise InputError(f"kappa = {kappa}: choose a slash score in (0, 1]")
    if not len(distances) or min(distances) < 0:
        raise InputError(f"distances {list(distances)}: give one at least, 0 (itself), 1 (previous token) or more")


def best(dataset: xr.Dataset) -> dict[str, xr.DataArray]:
    """Each head's highest score over D < N/2, where it is, and its ratio to the baseline there."""
    near = dataset[["score", "baseline"]].isel(distance=slice(max(1, dataset.sizes["distance"] // 2)))
    # not idxmax: it would give floats
    place = near["score"].argmax("distance")
    score, baseline = (near[name].isel(distance=place).drop_vars("distance") for name in ("score", "baseline"))
    return {"best_distance": place, "best_score": score, "best_ratio": score / baseline}


def statistics_dataset(statistics: Mapping[int, SlashStatistics], heads: Sequence[int]) -> xr.Dataset:
    """Statistics by layer as labelled arrays; `*_without_first` has no value at the last distance, so NaN there."""
    layers = sorted(statistics)
    data = {}
    for field in fields(SlashStatistics):
        by_layer = torch.stack([getattr(statistics[layer], field.name).cpu() for layer in layers]).numpy()
        name = field.name.removesuffix("_without_first")
        dims = {"score": ("layer", "head", "distance"), "baseline": ("layer", "distance")}.get(name, ("layer", "head"))
        if name in BY_DISTANCE and name != field.name:
            by_layer = np.pad(by_layer, [(0, 0)] * (by_layer.ndim - 1) + [(0, 1)], constant_values=np.nan)
        data[field.name] = (dims, by_layer)
    n = data["score"][1].shape[-1]
    return xr.Dataset(data, {"layer": layers, "head": list(heads), "distance": np.arange(n)})
