"""Forecasts of one layer under all rules, lengths and random changes, and the mean curves that follow from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE
from tl_posgen.frequencies.numbers.changed_frequencies import change_elsewhere, seed_of
from tl_posgen.frequencies.numbers.forecast import Turning, Waves, mean_waves, overshoot, visible_variances
from tl_posgen.frequencies.rules import FrequencyRule
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.position.decomposition.numbers.variance_shares import TripleMoments
from tl_posgen.rope.planes import mean_curves
from tl_posgen.rope.rotation import Rope, complex_frequencies

HOST = torch.device("cpu")
N_POINTS = 192  # distances at which curves are kept, evenly spread on a logarithmic axis


@dataclass(frozen=True)
class Conditions:
    """All that is forecast of a layer.

    Attributes:
        rules: by label; None stands for the layer's own frequencies.
        times: lengths, in units of `inside`; 1 first.
        inside: tokens of the short prompt.
        seed: of random changes.
    """

    rules: Mapping[str, FrequencyRule | None]
    times: Sequence[int | float]
    inside: int
    seed: int = 0

    def changed(self, own: Rope) -> list[Rope]:
        """Return a layer's RoPE under each rule."""
        return [own if rule is None else rule(own) for rule in self.rules.values()]

    def elsewhere(self, own: Rope, changed: Sequence[Rope]) -> list[Rope]:
        """Return random changes of the same total angle, one for each rule, drawn from the seed and its label alone."""
        seeds = [seed_of(self.seed, label) for label in self.rules]
        return [
            replace(one, inv_freq=change_elsewhere(own.inv_freq, one.inv_freq, seed))
            for one, seed in zip(changed, seeds, strict=True)
        ]

    def n_distances(self, window: int | None) -> list[int]:
        """Return how many distances a layer sees at each length."""
        return [min(round(one * self.inside), window or round(one * self.inside)) for one in self.times]

    @cached_property
    def points(self) -> np.ndarray:
        """Distances at which curves are kept."""
        most = round(max(self.times) * self.inside)
        return np.unique(np.geomspace(1, most, N_POINTS).round().astype(int)) - 1


@dataclass(frozen=True)
class LayerForecast:
    """Scores of one layer under all conditions, forecast from its moments."""

    moments: TripleMoments
    geometry: LayerGeometry
    conditions: Conditions

    def variables(self) -> dict[str, Tensor]:
        """Return the variables without their layer: sd, distortion, share, amplitude and phase."""
        own, n, scale = self.geometry.rope, self.conditions.n_distances(self.geometry.window), self.geometry.scale
        changed, sizes = self.conditions.changed(own), (2, len(self.conditions.rules), len(n))
        ropes = [own, *changed, *self.conditions.elsewhere(own, changed)]
        frozen = tuple((tuple(one.inv_freq.tolist()), one.scaling) for one in ropes)
        known = turning_of(frozen, tuple(n), self.geometry.d_head).to(self.moments.q.mean.device)
        variances, times = visible_variances(self.moments, known, scale), prod(sizes)
        seen, parts, change = variances.split([1, times, times], -1)
        seen, mean = seen.sum(0), mean_waves(self.moments, scale)
        return {
            "sd": seen[:, 0].sqrt(),
            "distortion": (change.sum(0) / seen).sqrt().mT.unflatten(0, sizes),
            "share": (parts / parts.sum(0)).movedim(0, -1).transpose(0, 1).unflatten(0, sizes),
            "amplitude": mean.abs(),
            "phase": mean.angle(),
        }


@lru_cache(maxsize=2)
def turning_of(
    ropes: tuple[tuple[tuple[float, ...], float], ...], n_distances: tuple[int, ...], d_head: int
) -> Turning:
    """Return the moments of own turning factors at the first number of distances, then those of all ropes but the first
    at all numbers, then those of their change from the first, on the CPU. Layers and groups of prompts share them.

    Args:
        ropes: frequencies and scaling, the layer's own first.
    """
    own, *others = (Rope(torch.tensor(theta, dtype=DOUBLE), scaling=scaling) for theta, scaling in ropes)
    short = Waves.of_ropes([own], n_distances[:1], d_head, HOST)
    waves, before = (Waves.of_ropes(one, n_distances, d_head, HOST) for one in (others, [own] * len(others)))
    return Turning.joined([short.turning(), waves.turning(), waves.change_from(before)])


def curves_of(data: xr.Dataset, geometries: Mapping[int, LayerGeometry], conditions: Conditions) -> xr.Dataset:
    """Return the mean curve of every head under every rule, where it peaks, and how far it leaves its own range."""
    found = [of_layer(data.sel(layer=layer), one, conditions) for layer, one in geometries.items()]
    return xr.concat(found, data["layer"])


def of_layer(data: xr.Dataset, geometry: LayerGeometry, conditions: Conditions) -> xr.Dataset:
    """Return the variables that follow from the mean curves of one layer."""
    n, own = conditions.n_distances(geometry.window), geometry.rope
    waves, sd = waves_of(data, geometry), torch.from_numpy(data["sd"].values.copy())
    curves = [mean_curves(waves, rope, max(n), geometry.d_head) for rope in conditions.changed(own)]
    inside = mean_curves(waves, own, n[0], geometry.d_head)
    peaks = torch.stack([torch.stack([one[:, :most].argmax(-1) for most in n]) for one in curves]).double()
    beyond = torch.stack([torch.stack([overshoot(one[:, :most], inside) / sd for most in n]) for one in curves])
    kept = torch.full((len(curves), len(waves), len(conditions.points)), torch.nan, dtype=waves.real.dtype)
    seen = conditions.points < max(n)  # a window hides the others
    kept[..., torch.from_numpy(seen)] = torch.stack(curves)[..., conditions.points[seen]]
    missing = ~torch.isfinite(sd)
    labels: dict[str, Any] = {"rule": list(conditions.rules), "head": data["head"].values}
    dims = ("rule", "times", "head")
    arrays = {
        "curve": (("rule", "head", "distance"), kept.numpy()),
        "peak": (dims, peaks.masked_fill(missing, torch.nan).numpy()),
        "overshoot": (dims, beyond.numpy()),
    }
    return xr.Dataset(arrays, {**labels, "times": list(conditions.times), "distance": conditions.points})


def waves_of(data: xr.Dataset, geometry: LayerGeometry) -> Tensor:
    """Return c_m of one layer's heads, NaN where the layer lacks one."""
    n_planes = len(complex_frequencies(geometry.rope, geometry.d_head))
    amplitude, phase = (torch.from_numpy(data[name].values[:, :n_planes].copy()) for name in ("amplitude", "phase"))
    return torch.polar(amplitude, phase)
