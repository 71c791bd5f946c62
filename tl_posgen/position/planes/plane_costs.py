"""Cells of a map of perturbed planes, and the loss of every prompt under a perturbation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.core.run import Run
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.models.loss import token_losses
from tl_posgen.models.model import Model
from tl_posgen.position.planes.hooks import perturb_planes
from tl_posgen.rope.frequency_bands import BANDS, bands_by_thirds
from tl_posgen.rope.rotation import Rope

OF = {"q": ("q",), "k": ("k",), "both": ("q", "k")}
MOST_CELLS = 96  # up to so many layers x planes are mapped one by one, else by frequency band
BATCH = 8  # prompts per forward pass

MapBy = Literal["auto", "planes", "bands"]


@dataclass(frozen=True)
class Cells:
    """The cells of a map, one for each plane, or third of the planes, of each layer with RoPE.

    Attributes:
        heads: the heads of each layer that are perturbed.
        n_planes: of each layer.
        planes: numbers of planes, or names of bands.
    """

    heads: Mapping[int, Sequence[int]]
    n_planes: Mapping[int, int]
    planes: Sequence[int] | Sequence[str]

    @property
    def layers(self) -> list[int]:
        """Layers with RoPE."""
        return list(self.n_planes)

    @property
    def by_planes(self) -> bool:
        """Whether a cell is a single plane."""
        return self.planes != BANDS

    @property
    def all_heads(self) -> list[tuple[int, int]]:
        """(layer, head) of all that is perturbed."""
        return [(layer, head) for layer in self.layers for head in self.heads[layer]]

    def perturbed(self, layer: int, planes: Any) -> dict[str, Any] | None:
        """Return which heads and planes a cell perturbs, as `perturb_planes` takes them; None for no such plane."""
        if self.by_planes and planes >= self.n_planes[layer]:
            return None
        heads = [(layer, head) for head in self.heads[layer]]
        return {"heads": heads, "band": [planes] if self.by_planes else third(planes)}


def cells_of(model: Model, selected: Mapping[int, Sequence[int]], map_by: MapBy) -> Cells:
    """Return the cells of a map over the selected heads of each layer."""
    ropes = {one.layer: one.rope for one in geometry_of(model, list(selected)) if one.rope.rotary_dim}
    n_planes = {layer: len(rope.inv_freq) for layer, rope in ropes.items()}
    by_planes = map_by == "planes" or (map_by == "auto" and sum(n_planes.values()) <= MOST_CELLS)
    return Cells(selected, n_planes, range(max(n_planes.values())) if by_planes else BANDS)


def full(edit: str) -> float:
    """Return the strength in its unit: 1 stands for phase noise of pi radians, which is nearly uniform."""
    return math.pi if edit == "phase_noise" else 1.0


def third(band: str) -> Any:
    """Return a function from a layer's Rope to the planes of a band by thirds."""

    def planes(rope: Rope) -> Tensor:
        return bands_by_thirds(len(rope.inv_freq))[BANDS.index(band)]

    return planes


def perturbed_losses(run: Run, **how: Any) -> Float[np.ndarray, " prompt"]:
    """Return the mean loss of every prompt under `perturb_planes`; every prompt has different draws."""
    batches = run.tokens.split(BATCH)
    rows = []
    for number, batch in enumerate(batches):
        hooks = perturb_planes(run.model, seed=(run.seed * len(batches) + number) % 2**63, **how)
        rows.append(token_losses(run.model, batch, hooks, batch=BATCH).mean(-1))
    return torch.cat(rows).numpy()
