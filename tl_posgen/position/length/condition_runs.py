"""Prompts beyond the training length under one condition: what is kept of the forward passes, and what it says."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posgen.collector import HeadRows
from tl_posgen.hooks.replace_scores import HookList
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.loss import losses_of
from tl_posgen.models.model import Model
from tl_posgen.position.decomposition.pair_moments import row_blocks
from tl_posgen.position.length.length_figures import ATTENTION
from tl_posgen.position.length.output_drift import OutputMoments, entropy_and_normaliser, output_drift
from tl_posgen.position.length.output_plane import OutputPlane, output_plane
from tl_posgen.report.intervals import mean_and_ends

DRIFT = ("frechet", "mahalanobis", "norm_ratio", "off_axes")
BINS_INSIDE = 4
KEPT_INSIDE = 64  # positions of a training length whose outputs are kept, in the layers that are shown


class Run:
    """Every prompt under one condition: what is kept of the forward passes.

    Attributes:
        losses: of each prompt, nats per target.
        rows: entropy and normaliser, [head, bin] of each prompt and layer.
        heads: by layer, those that were captured.
        halves: by (layer, parity of the prompt), moments of the outputs in the second half of the training length.
        segments: by (layer, segment), moments of the outputs of each multiple of the training length; of the first, of
            its second half only, so that it is compared like with like.
        kept: `kept_positions` of the prompts.
        outputs: by layer that is shown, of each prompt: the outputs of all heads side by side at the kept positions,
            and after `project` their coordinates.
    """

    def __init__(self, inside: int, shown: Sequence[int] = ()):
        self.inside = inside
        self.kept = torch.arange(0)
        self.outputs: dict[int, list[Float[Tensor, "position d"]]] = {layer: [] for layer in shown}
        self.losses: list[np.ndarray] = []
        self.rows = HeadRows()
        self.heads: dict[int, list[int]] = {}
        self.halves: dict[tuple[int, int], OutputMoments] = {}
        self.segments: dict[tuple[int, int], OutputMoments] = {}

    def add(self, model: Model, prompt: Int[Tensor, " pos"], hooks: HookList, where: Mapping[str, Any]) -> None:
        """Run one prompt and keep what is measured of it."""
        needs = frozenset({"v", "attn_scores", "pattern", "logits"})
        tokens, every_layer = prompt[None].to(next(model.parameters()).device), partial(self.take, len(self.losses))
        with model.hooks(fwd_hooks=hooks):
            logits = run_capture(model, tokens, every_layer, needs, **where)
        assert logits is not None
        self.losses.append(losses_of(logits, tokens)[0].cpu().numpy())

    def take(self, number: int, capture: LayerCapture) -> None:
        """One layer of prompt `number`, a block of its rows at a time."""
        assert capture.v is not None
        layer, inside, n, capture.prompt = capture.layer, self.inside, capture.length, number
        self.heads[layer] = list(capture.heads)
        blocks = []
        for start, stop in row_blocks(len(capture.heads), n):
            pattern = capture.pattern_rows(start, stop)
            attention = entropy_and_normaliser(capture.attn_score_rows(start, stop), pattern)
            blocks.append((pattern @ capture.v[:, :stop], *attention))
        o, *by_query = (torch.cat(parts, 1) for parts in zip(*blocks, strict=True))
        reference = OutputMoments.of(o[:, inside // 2 : inside])
        add_to(self.halves, (layer, number % 2), reference)
        if layer in self.outputs:
            self.kept = kept_positions(n, inside)
            self.outputs[layer].append(o[:, self.kept].transpose(0, 1).flatten(1).cpu())
        add_to(self.segments, (layer, 0), reference)
        for start in range(inside, n, inside):
            add_to(self.segments, (layer, start // inside), OutputMoments.of(o[:, start : start + inside]))
        ranges = bins(n, inside)
        by_bin = (torch.stack([one[:, start:stop].mean(-1) for start, stop in ranges], -1) for one in by_query)
        self.rows.add(capture, **dict(zip(ATTENTION, by_bin, strict=True)))

    def planes(self) -> dict[int, OutputPlane]:
        """By layer that is shown, the plane of the outputs kept from the second half of the training length."""
        return {
            layer: output_plane(torch.stack(kept)[:, in_reference(self.kept, self.inside)].flatten(0, 1))
            for layer, kept in self.outputs.items()
        }

    def project(self, planes: Mapping[int, OutputPlane]) -> None:
        """Put the coordinates in these planes in the place of the outputs."""
        for layer, kept in self.outputs.items():
            self.outputs[layer] = [planes[layer].coordinates(o) for o in kept]


def kept_positions(n: int, inside: int) -> Int[Tensor, " position"]:
    """Positions spread evenly over a prompt of n tokens, 64 in each training length at most.

    Example:
        >>> kept_positions(8, 4).tolist(), kept_positions(512, 256)[:3].tolist()
        ([0, 1, 2, 3, 4, 5, 6, 7], [3, 7, 11])
    """
    step = -(-inside // KEPT_INSIDE)
    return torch.arange(step - 1, n, step)


def in_reference(positions: Int[Tensor, " position"], inside: int) -> Bool[Tensor, " position"]:
    """Which lie in the second half of the training length, whose outputs others are compared with."""
    return (positions >= inside // 2) & (positions < inside)


def add_to(sums: dict[tuple[int, int], OutputMoments], key: tuple[int, int], moments: OutputMoments) -> None:
    sums[key] = sums[key] + moments if key in sums else moments


def bins(n: int, inside: int) -> list[tuple[int, int]]:
    """Query ranges: four equal ones per training length."""
    step = inside // BINS_INSIDE
    return [(start, min(start + step, n)) for start in range(0, n - 1, step)]


def dataset_of(runs: Mapping[str, Run], inside: int, planes: Mapping[int, OutputPlane]) -> xr.Dataset:
    """Loss by bin and segment; of every head, what its attention and its outputs do there; outputs in the planes."""
    losses = np.array([run.losses for run in runs.values()])  # target t is predicted by query t, so the last has none
    n = losses.shape[-1] + 1
    ranges = bins(n, inside)
    by_bin = np.stack([losses[..., start:stop].mean(-1) for start, stop in ranges], -1)
    by_segment = np.stack([losses[..., start : start + inside].mean(-1) for start in range(0, n, inside)], -1)
    by_bin, by_segment = (np.moveaxis(one, 1, 0) for one in (by_bin, by_segment))  # [prompt, condition, place]
    beyond = by_segment[..., 1:].mean(-1) if n > inside else np.nan * by_segment[..., 0]
    rise = beyond - by_segment[:, [list(runs).index("vanilla")], 0]
    data = xr.Dataset(
        mean_and_ends("loss", by_bin, ("condition", "bin"))
        | mean_and_ends("rise", rise, ("condition",))
        | {"loss_segment": (("condition", "segment"), by_segment.mean(0))},
        {"condition": list(runs), "bin": [start for start, _ in ranges], "segment": range(n // inside)},
        {"rows": ["condition", "segment"], "inside": inside},
    )
    for name in ATTENTION:
        of_runs = [run.rows.array(name, "bin").mean("prompt").assign_coords(bin=data["bin"]) for run in runs.values()]
        data[name] = xr.concat(of_runs, data["condition"])
    drifts = [drift_of(run, runs["vanilla"], n // inside) for run in runs.values()]
    found = data.merge(xr.concat([drift[list(DRIFT)] for drift in drifts], data["condition"]))
    return found.assign(noise_level=drifts[0]["noise_level"].isel(segment=0)).merge(plane_dataset(runs, inside, planes))


def plane_dataset(runs: Mapping[str, Run], inside: int, planes: Mapping[int, OutputPlane]) -> xr.Dataset:
    """Where outputs lie in the planes, and how far their centroids do, in standard deviations of the untouched ones."""
    positions = runs["vanilla"].kept
    dims = ("condition", "shown_layer", "prompt", "position", "axis")
    points = xr.DataArray(
        np.stack([[torch.stack(run.outputs[layer]).numpy() for layer in planes] for run in runs.values()]),
        {"condition": list(runs), "shown_layer": list(planes), "position": positions.numpy()},
        dims,
    )
    segment = (points["position"] // inside).rename("segment")
    counted = points.where((segment > 0) | in_reference(positions, inside).numpy())
    halves = [counted.sel(condition="vanilla", drop=True).isel(prompt=slice(start, None, 2)) for start in (0, 1)]
    even, odd = (half.where(segment == 0).mean(("prompt", "position"), skipna=True) for half in halves)
    offset = counted.mean("prompt").groupby(segment).mean()
    return xr.Dataset(
        {
            "plane_coordinates": points.astype(np.float32),
            "plane_offset": length_of(offset),
            "plane_noise": length_of(even - odd),
            "plane_share": ("shown_layer", [plane.share for plane in planes.values()]),
        }
    )


def drift_of(run: Run, vanilla: Run, times: int) -> xr.Dataset:
    """A condition's segments against the untouched model inside, whose halves are the even and the odd prompts."""
    layers = []
    for layer, heads in run.heads.items():
        halves = (vanilla.halves[layer, 0], vanilla.halves[layer, 1])
        drifts = [output_drift(halves, run.segments[layer, segment]) for segment in range(times)]
        columns = {name: torch.stack([one[name] for one in drifts], -1) for name in drifts[0]}
        data = {name: (("head", "segment"), column.cpu().numpy()) for name, column in columns.items()}
        layers.append(xr.Dataset(data, {"layer": layer, "head": heads, "segment": range(times)}))
    found = xr.concat(layers, "layer", join="outer")
    assert isinstance(found, xr.Dataset)
    return found


def length_of(vector: xr.DataArray) -> xr.DataArray:
    """Of a vector in the plane; NaN where one of its coordinates is."""
    return vector.dot(vector, "axis") ** 0.5
