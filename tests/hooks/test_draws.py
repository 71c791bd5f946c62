"""Draws of interventions: another at every place and under every seed."""

from itertools import product

import torch

from tl_posgen.hooks.draws import generator_at


def test_every_seed_and_place_has_a_draw_of_its_own():
    drawn = [
        tuple(torch.rand(2, generator=generator_at(seed, prompt=prompt, layer=layer, side=side)).tolist())
        for seed, prompt, layer, side in product((0, 1, 2, 3, 1000, 2**31), range(3), range(4), range(2))
    ]
    assert len(set(drawn)) == len(drawn)
