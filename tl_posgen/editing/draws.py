"""Draws of interventions: each place of a model has its own, the same on every run of one seed."""

import torch

MOST = {"prompt": 2**20, "layer": 2**10, "side": 2}  # more than are ever run, so that no two places share a draw
_GOLDEN = 2654435769  # 2^32 / golden ratio: multiples of it lie far apart modulo 2^32


def generator_at(seed: int, **place: int) -> torch.Generator:
    """Return the generator of what is drawn at one place: in a layer, of a prompt and side where they matter.

    torch reads the lowest 32 bits of a seed alone, so those above are multiplied and added to them.

    Example:
        >>> len({generator_at(seed, prompt=0, layer=3, side=1).initial_seed() for seed in range(1000)})
        1000
    """
    for name, number in place.items():
        seed = seed * MOST[name] + number
    return torch.Generator().manual_seed((seed + (seed >> 32) * _GOLDEN) % 2**32)
