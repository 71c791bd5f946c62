"""Draws of interventions: each place of a model has its own, the same on every run of one seed."""

import torch

MOST = {"prompt": 2**20, "layer": 2**10, "side": 2}  # more than are ever run, so that no two places share a draw


def generator_at(seed: int, **place: int) -> torch.Generator:
    """Return the generator of what is drawn at one place: in a layer, of a prompt and side where they matter."""
    for name, number in place.items():
        seed = seed * MOST[name] + number
    return torch.Generator().manual_seed(seed % 2**63)
