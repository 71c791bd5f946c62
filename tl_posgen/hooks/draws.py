"""Draws of interventions: each place of a model has its own, the same on every run of one seed."""

import torch

MOST = {"prompt": 2**20, "layer": 2**10, "side": 2}  # more than are ever run, so that no two places share a draw


def generator_at(seed: int, **place: int) -> torch.Generator:
    """Return the generator of what is drawn at one place: of a seed, a layer, and a prompt and side where they matter.

    Example:
        >>> generator_at(0, layer=3).initial_seed(), generator_at(1, layer=3).initial_seed()
        (3, 1027)
    """
    for name, number in place.items():
        seed = seed * MOST[name] + number
    return torch.Generator().manual_seed(seed % 2**63)
