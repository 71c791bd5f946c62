"""Loss of a model with planes of its layers perturbed, one place at a time, and with a control of the same energy."""

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.models.layer_table import geometry_of
from tl_posgen.models.loss import token_losses
from tl_posgen.models.model import Model
from tl_posgen.position.planes.hooks import perturb_planes
from tl_posgen.report.intervals import mean_and_ends
from tl_posgen.rope.frequency_bands import BANDS, bands_by_thirds
from tl_posgen.rope.rotation import Rope

if TYPE_CHECKING:
    from tl_posgen.position.planes.plane_perturbation import PlanePerturbation

OF = {"q": ("q",), "k": ("k",), "both": ("q", "k")}
COSTS = ("edit", "control", "less_control")
MOST_CELLS = 96  # up to so many layers x planes are mapped one by one, else by frequency band
BATCH = 8  # prompts per forward pass

Planned = Mapping[str, tuple[tuple[str, ...], list[dict[str, Any] | None]]]


def plan(
    model: Model, options: "PlanePerturbation", selected: Mapping[int, Sequence[int]]
) -> tuple[Planned, dict[str, list[Any]]]:
    """Return variable -> (its dimensions, the perturbation of every place along them), and the coordinates.

    A perturbation is None where there is no plane.

    Args:
        options: of the measure.
        selected: the heads of each layer that are perturbed.
    """
    ropes = {one.layer: one.rope for one in geometry_of(model, list(selected)) if one.rope.rotary_dim}
    everywhere = [(layer, head) for layer in ropes for head in selected[layer]]
    one_by_one = sum(len(rope.inv_freq) for rope in ropes.values()) <= MOST_CELLS
    by_planes = options.map_by == "planes" or (options.map_by == "auto" and one_by_one)
    most = max(len(rope.inv_freq) for rope in ropes.values())
    coords: dict[str, list[Any]] = {
        "edit": list(options.edits),
        "of": list(OF),
        "strength": [float(strength) for strength in options.strengths],
        "band": list(BANDS),
        "map_edit": list(options.map_edits),
        "layer": list(ropes),
        "planes": list(range(most)) if by_planes else list(BANDS),
    }

    def one_cell(edit: str, layer: int, planes: Any) -> dict[str, Any] | None:
        if by_planes and planes >= len(ropes[layer].inv_freq):
            return None
        heads = [(layer, head) for head in selected[layer]]
        return {"edit": edit, "strength": full(edit), "heads": heads, "band": [planes] if by_planes else third(planes)}

    def all_planes(edit: str, of: str, strength: float) -> dict[str, Any]:
        return {"edit": edit, "strength": strength * full(edit), "of": OF[of], "heads": everywhere}

    def one_band(edit: str, band: str) -> dict[str, Any]:
        return {"edit": edit, "strength": full(edit), "band": third(band), "heads": everywhere}

    makers = {
        ("rise", ("edit", "of", "strength")): all_planes,
        ("band_rise", ("edit", "band")): one_band,
        ("map_rise", ("map_edit", "layer", "planes")): one_cell,
    }
    return {
        name: (dims, [make(*place) for place in product(*(coords[dim] for dim in dims))])
        for (name, dims), make in makers.items()
        if all(coords[dim] for dim in dims)
    }, coords


def runs_of(planned: Planned) -> int:
    """Return how often `measured` runs every prompt: once unchanged, and once for every edit and for its control."""
    return 1 + 2 * sum(how is not None for _, places in planned.values() for how in places)


def full(edit: str) -> float:
    """Return the strength in its unit: 1 stands for phase noise of pi radians, which is nearly uniform."""
    return math.pi if edit == "phase_noise" else 1.0


def third(band: str) -> Any:
    """Return a function from a layer's Rope to the planes of a band by thirds."""

    def planes(rope: Rope) -> Tensor:
        return bands_by_thirds(len(rope.inv_freq))[BANDS.index(band)]

    return planes


def measured(
    model: Model,
    tokens: Int[Tensor, "prompt pos"],
    planned: Planned,
    coords: Mapping[str, Sequence[Any]],
    *,
    seed: int,
) -> xr.Dataset:
    """Return the rise of the loss by every planned perturbation, by its control, and the difference, with intervals."""
    batches = tokens.split(BATCH)

    def losses(**how: Any) -> Float[np.ndarray, " prompt"]:
        rows = []
        for number, batch in enumerate(batches):
            own = (seed * len(batches) + number) % 2**63  # every prompt has different draws
            hooks = perturb_planes(model, seed=own, **how) if how else []
            rows.append(token_losses(model, batch, hooks, batch=BATCH).mean(-1))
        return torch.cat(rows).numpy()

    unchanged = losses()
    data: dict[str, Any] = {"loss": float(unchanged.mean())}
    for variable, (dims, places) in planned.items():
        rises = np.full((len(unchanged), len(places), len(COSTS)), np.nan)
        for place, how in enumerate(places):
            if how is None:
                continue
            for cost, control in enumerate((False, True)):
                rises[:, place, cost] = losses(**how, control=control) - unchanged
        rises[..., -1] = rises[..., 0] - rises[..., 1]
        rises = rises.reshape(-1, *(len(coords[dim]) for dim in dims), len(COSTS))
        data |= mean_and_ends(variable, rises, (*dims, "cost"))
        data[f"{variable}_each"] = (("prompt", *dims, "cost"), rises)
    used = {dim for dims, _ in planned.values() for dim in dims}
    found = {dim: values for dim, values in coords.items() if dim in used}
    return xr.Dataset(data, {**found, "cost": list(COSTS), "prompt": list(range(len(unchanged)))})
