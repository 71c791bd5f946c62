"""Prompts beyond the training length under one condition: data kept from the forward passes, and their dataset."""

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
from tl_posgen.position.decomposition.pair_moments import query_ranges
from tl_posgen.position.length.length_figures import ATTENTION
from tl_posgen.position.length.output_drift import OutputMoments, entropy_and_normaliser, output_drift
from tl_posgen.position.length.output_plane import OutputPlane, output_plane
from tl_posgen.report.intervals import mean_and_ends

DRIFT = ("frechet", "mahalanobis", "norm_ratio", "off_axes")
BINS_INSIDE = 4
KEPT_INSIDE = 64  # positions per training length whose outputs are kept in the shown layers


class Run:
    """Data kept from the forward passes of every prompt under one condition.

    Attributes:
        losses: of each prompt, nats per target.
        rows: entropy and normaliser, [head, bin] of each prompt and layer.
        heads: captured heads by layer.
        halves: by (layer, parity of the prompt), moments of the outputs in the second half of the training length.
        segments: by (layer, segment), moments of the outputs in each multiple of the training length; in the first only
            of its second half, as in `halves`.
        kept: `kept_positions` of the prompts.
        outputs: by shown layer and prompt, the concatenated outputs of all heads at the kept positions; after `project`
            their coordinates.
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
        """Run one prompt and keep its data."""
        needs = frozenset({"v", "attn_scores", "pattern", "logits"})
        tokens, number = prompt[None].to(next(model.parameters()).device), len(self.losses)
        with model.hooks(fwd_hooks=hooks):
            logits = run_capture(model, tokens, partial(self.add_layer, number), needs, **where)
        assert logits is not None
        self.losses.append(losses_of(logits, tokens)[0].cpu().numpy())

    def add_layer(self, number: int, capture: LayerCapture) -> None:
        """Keep the data of one layer of prompt `number`, computed in blocks of rows."""
        assert capture.v is not None
        layer, inside, n, capture.prompt = capture.layer, self.inside, capture.length, number
        self.heads[layer] = list(capture.heads)
        blocks = []
        for start, stop in query_ranges(len(capture.heads), n):
            pattern = capture.pattern_rows(start, stop)
            attention = entropy_and_normaliser(capture.attn_score_rows(start, stop), pattern)
            blocks.append((pattern @ capture.v[:, :stop], *attention))
        o, *by_query = (torch.cat(parts, 1) for parts in zip(*blocks, strict=True))
        reference = OutputMoments.from_outputs(o[:, inside // 2 : inside])
        add_to(self.halves, (layer, number % 2), reference)
        if layer in self.outputs:
            self.kept = kept_positions(n, inside)
            self.outputs[layer].append(o[:, self.kept].transpose(0, 1).flatten(1).cpu())
        add_to(self.segments, (layer, 0), reference)
        for start in range(inside, n, inside):
            add_to(self.segments, (layer, start // inside), OutputMoments.from_outputs(o[:, start : start + inside]))
        ranges = bins(n, inside)
        by_bin = (torch.stack([one[:, start:stop].mean(-1) for start, stop in ranges], -1) for one in by_query)
        self.rows.add(capture, **dict(zip(ATTENTION, by_bin, strict=True)))

    def planes(self) -> dict[int, OutputPlane]:
        """Return, by shown layer, the plane of the outputs kept from the second half of the training length."""
        return {
            layer: output_plane(torch.stack(kept)[:, in_reference(self.kept, self.inside)].flatten(0, 1))
            for layer, kept in self.outputs.items()
        }

    def project(self, planes: Mapping[int, OutputPlane]) -> None:
        """Replace the outputs by their coordinates in these planes."""
        for layer, kept in self.outputs.items():
            self.outputs[layer] = [planes[layer].coordinates(o) for o in kept]


def kept_positions(n: int, inside: int) -> Int[Tensor, " position"]:
    """Return positions spread evenly over a prompt of n tokens, at most 64 per training length.

    Example:
        >>> kept_positions(8, 4).tolist(), kept_positions(512, 256)[:3].tolist()
        ([0, 1, 2, 3, 4, 5, 6, 7], [3, 7, 11])
    """
    step = -(-inside // KEPT_INSIDE)
    return torch.arange(step - 1, n, step)


def in_reference(positions: Int[Tensor, " position"], inside: int) -> Bool[Tensor, " position"]:
    """Return whether positions lie in the second half of the training length, the reference of all comparisons."""
    return (positions >= inside // 2) & (positions < inside)


def add_to(sums: dict[tuple[int, int], OutputMoments], key: tuple[int, int], moments: OutputMoments) -> None:
    sums[key] = sums[key] + moments if key in sums else moments


def bins(n: int, inside: int) -> list[tuple[int, int]]:
    """Return query ranges (start, stop): four equal ones per training length."""
    step = inside // BINS_INSIDE
    return [(start, min(start + step, n)) for start in range(0, n - 1, step)]


def dataset_of(runs: Mapping[str, Run], inside: int, planes: Mapping[int, OutputPlane]) -> xr.Dataset:
    """Return loss by bin and segment; attention and output drift of every head; outputs in the planes."""
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
    """Return coordinates of outputs in the planes, and distances of their centroids, in standard deviations inside."""
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
    """Return the drift of a condition's segments from the untouched model inside, halved by even and odd prompts."""
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
    """Return the length of a vector in the plane; NaN if a coordinate is NaN."""
    return vector.dot(vector, "axis") ** 0.5
