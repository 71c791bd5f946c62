"""Rises of the loss when queries and keys are perturbed in some planes, and when a random rotation changes as much."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.core.run import Run
from tl_posgen.models.loss import token_losses
from tl_posgen.position.planes.hooks import perturb_planes
from tl_posgen.rope.frequency_bands import BANDS, bands_by_thirds
from tl_posgen.rope.rotation import Rope

COSTS = ("edit", "control")
BATCH = 8  # prompts per forward pass


def rises(run: Run, edit: str, strength: float = 1.0, **how: Any) -> Float[np.ndarray, "cost=2 prompt"]:
    """Return the rises of every prompt's loss under an edit and under its control; every prompt has different draws.

    Args:
        strength: 1 stands for phase noise of pi radians, which is nearly uniform.
        how: further arguments of `perturb_planes`.
    """
    batches = run.tokens.split(BATCH)
    found = []
    for control in (False, True):
        for number, batch in enumerate(batches):
            draw = {"seed": (run.seed * len(batches) + number) % 2**63, "control": control}
            in_its_unit = strength * (math.pi if edit == "phase_noise" else 1)
            hooks = perturb_planes(run.model, edit, strength=in_its_unit, **draw, **how)
            found.append(token_losses(run.wrapped, batch, hooks, batch=BATCH).mean(-1))
    return (torch.cat(found).unflatten(0, (2, -1)) - run.loss.mean(-1)).numpy()


def third(band: str) -> Callable[[Rope], Tensor]:
    """Return a function from a layer's Rope to the planes of a band by thirds."""
    return lambda rope: bands_by_thirds(len(rope.inv_freq))[BANDS.index(band)]
