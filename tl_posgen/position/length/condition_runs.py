"""Prompts beyond the training length under one condition: what is kept of their forward passes, and its variables."""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.core.measure import HEAD
from tl_posgen.core.run import Run
from tl_posgen.core.sums import Sums
from tl_posgen.hooks.replace_scores import HookList
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.loss import judged
from tl_posgen.position.decomposition.numbers.pair_moments import query_ranges
from tl_posgen.position.length.numbers.output_drift import (
    OutputMoments,
    OutputPlane,
    entropy_and_normaliser,
    output_drift,
    output_plane,
)

DRIFT = ("frechet", "mahalanobis", "norm_ratio")
ATTENTION = ("entropy", "normaliser")
BINS_INSIDE = 4
KEPT_INSIDE = 64  # positions per training length whose outputs are kept in the shown layers


class ConditionRun:
    """Losses, attention and outputs of every prompt under one condition; `inside` is the training length.

    Attributes:
        losses: of each prompt, nats per target.
        sums: entropy and normaliser, [head, bin] of each layer.
        moments: by (layer, parity of the prompt, segment), moments of the outputs in the second half of each multiple
            of the training length; segment 0 is inside.
        kept: positions spread evenly over a prompt, at most 64 per training length, whose outputs are kept.
        bins: ranges (start, stop) of queries, four equal ones per training length.
        outputs: by shown layer and prompt, the concatenated outputs of all heads at the kept positions; after `project`
            their coordinates.
    """

    def __init__(self, run: Run, inside: int, shown: Sequence[int]):
        self.run, self.inside = run, inside
        n, step, width = len(run.rows[0]), -(-inside // KEPT_INSIDE), inside // BINS_INSIDE
        self.kept = torch.arange(step - 1, n, step)
        self.bins = [(start, min(start + width, n)) for start in range(0, n - 1, width)]
        self.outputs: dict[int, list[Float[Tensor, "position d"]]] = {layer: [] for layer in shown}
        self.losses: list[np.ndarray] = []
        self.sums: Sums = run.sums()
        self.moments: dict[tuple[int, int, int], OutputMoments] = {}

    def add_prompts(self, hooks: HookList) -> None:
        """Run every prompt under hooks."""
        needs = frozenset({"v", "attn_scores", "pattern", "logits"})
        session = self.run.session
        for number, prompt in enumerate(self.run.rows):
            tokens = prompt[None].to(session.device)
            with session.under(hooks):
                logits = run_capture(session, tokens, partial(self.add_layer, number), needs, **self.run.where)
            assert logits is not None
            self.losses.append(judged(session, logits, tokens)[0].cpu().numpy())

    def add_layer(self, number: int, capture: LayerCapture) -> None:
        """Keep what one layer of prompt `number` gives, in blocks of rows."""
        assert capture.v is not None
        layer, inside, n, capture.prompt = capture.layer, self.inside, capture.length, number
        blocks = []
        for start, stop in query_ranges(len(capture.heads), n, capture.v.device):
            pattern = capture.pattern_rows(start, stop)
            attention = entropy_and_normaliser(capture.attn_score_rows(start, stop), pattern)
            blocks.append((pattern @ capture.v[:, :stop], *attention))
        o, *by_query = (torch.cat(parts, 1) for parts in zip(*blocks, strict=True))
        if layer in self.outputs:
            self.outputs[layer].append(o[:, self.kept].transpose(0, 1).flatten(1).cpu())
        for segment in range(n // inside):
            second_half = slice(segment * inside + inside // 2, (segment + 1) * inside)
            place, moments = (layer, number % 2, segment), OutputMoments.from_outputs(o[:, second_half])
            self.moments[place] = self.moments[place] + moments if place in self.moments else moments
        by_bin = (torch.stack([one[:, start:stop].mean(-1) for start, stop in self.bins], -1) for one in by_query)
        self.sums.add_layer(capture, dict(zip(ATTENTION, by_bin, strict=True)))

    def planes(self) -> dict[int, OutputPlane]:
        """Return, by shown layer, the plane of the outputs kept from the second half of the training length."""
        reference = (self.kept >= self.inside // 2) & (self.kept < self.inside)
        return {
            layer: output_plane(torch.stack(kept)[:, reference].flatten(0, 1)) for layer, kept in self.outputs.items()
        }

    def project(self, planes: Mapping[int, OutputPlane]) -> None:
        """Replace the outputs by their coordinates in planes."""
        for layer, kept in self.outputs.items():
            self.outputs[layer] = [planes[layer].coordinates(o) for o in kept]

    def variables(self, vanilla: "ConditionRun") -> dict[str, xr.DataArray]:
        """Return loss, attention, drift of the outputs from the untouched ones inside, and their places in planes."""
        losses, inside = np.array(self.losses), self.inside  # query t predicts target t, so the last has none
        n, starts = losses.shape[-1] + 1, [start for start, _ in self.bins]
        by_bin = np.stack([losses[:, start:stop].mean(-1) for start, stop in self.bins], -1)
        by_segment = np.stack([losses[:, start : start + inside].mean(-1) for start in range(0, n, inside)], -1)
        drift = self.drift(vanilla)
        points = np.stack([torch.stack(kept).numpy() for kept in self.outputs.values()])
        labels = {"shown_layer": list(self.outputs), "position": self.kept.numpy()}
        return {
            "loss": xr.DataArray(by_bin, {"bin": starts}, ("prompt", "bin")),
            "segment_loss": xr.DataArray(by_segment, {"segment": range(n // inside)}, ("prompt", "segment")),
            **{name: self.sums.mean(name, (*HEAD, "bin")).assign_coords(bin=starts) for name in ATTENTION},
            **{name: drift[name] for name in DRIFT},
            "plane_coordinates": xr.DataArray(points, labels, ("shown_layer", "prompt", "position", "axis")),
        }

    def drift(self, vanilla: "ConditionRun") -> xr.Dataset:
        """Return the drift of the outputs from the untouched ones inside, and its noise level, between even and odd
        prompts."""
        found, times = {}, len(self.run.rows[0]) // self.inside
        for layer in sorted(self.sums.layers):
            halves = (vanilla.moments[layer, 0, 0], vanilla.moments[layer, 1, 0])
            beyond = [(self.moments[layer, 0, at], self.moments[layer, 1, at]) for at in range(times)]
            drifts = [output_drift(halves, one) for one in beyond]
            found[layer] = {name: torch.stack([one[name] for one in drifts], -1) for name in drifts[0]}
        return self.sums.variables_of(found, (*HEAD, "segment"))
