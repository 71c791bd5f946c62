"""What users of the hooks and draws get for arguments of a wrong type: one line, the type checker of the tests off."""

import pytest
import torch

from tl_posgen import hooks, position
from tl_posgen.errors import PosgenError
from tl_posgen.hooks import DistanceDistribution, by_constant, by_split, point_mass, substitute

pytestmark = pytest.mark.usefixtures("unchecked")
N = 12
WRONG = {
    "nothing": None,
    "a word": "x",
    "a list of words": ["x"],
    "a short tensor": torch.ones(3),
    "a complex tensor": torch.ones(N, dtype=torch.complex64),
    "a mapping of numbers": {0: 1},
    "a distribution": DistanceDistribution(torch.arange(2), torch.ones(2) / 2),
}
HOOKS = {
    "at_dummy_distance": lambda model, x: hooks.at_dummy_distance(model, x),
    "what a function of distance gives": lambda model, x: hooks.at_dummy_distance(model, lambda distance: x),
    "at_dummy_distance, beyond": lambda model, x: hooks.at_dummy_distance(model, 0, beyond="x" if x is None else x),
    "interpolate_positions": hooks.interpolate_positions,
    "lm_infinite": hooks.lm_infinite,
    "lm_infinite, n_global": lambda model, x: hooks.lm_infinite(model, 4, x),
    "lm_infinite, limit": lambda model, x: hooks.lm_infinite(model, 4, limit="x" if x is None else x),
    "retrieve_blocks": lambda model, x: hooks.retrieve_blocks(model, 4, block=x),
    "retrieve_blocks, n_blocks": lambda model, x: hooks.retrieve_blocks(model, 4, n_blocks=x),
    "permute_positions": hooks.permute_positions,
    "permute_positions, keys_only": lambda model, x: hooks.permute_positions(model, torch.arange(N), keys_only=x),
    "permute_position_part": hooks.permute_position_part,
    "perturb_planes": hooks.perturb_planes,
    "perturb_planes, band": lambda model, x: hooks.perturb_planes(model, "mean_phase", 5 if x is None else x),
    "perturb_planes, of": lambda model, x: hooks.perturb_planes(model, "mean_phase", of=x),
    "perturb_planes, strength": lambda model, x: hooks.perturb_planes(model, "mean_phase", strength=x),
    "jitter_distances": hooks.jitter_distances,
    "substitute": substitute,
    "what a function of a capture gives": lambda model, x: substitute(model, lambda capture: x),
    "substitute, gamma": lambda model, x: substitute(model, by_constant, gamma=x),
    "substitute, residual": lambda model, x: substitute(model, by_constant, residual=x),
    "substitute, from_layer": lambda model, x: substitute(model, by_constant, from_layer=x),
    "by_split, part": lambda model, x: substitute(model, by_split(point_mass(1), x)),
    "by_split, mean_key": lambda model, x: substitute(model, by_split(point_mass(1), mean_key=x)),
}
DRAWS = {
    "swap_tokens": lambda x: position.swap_tokens(x, 0.5, seed=0),
    "swap_tokens, ratio": lambda x: position.swap_tokens(8, x, seed=0),
    "swap_tokens, reach": lambda x: position.swap_tokens(8, 0.5, x, seed=0),
    "swap_tokens, window": lambda x: position.swap_tokens(8, 0.5, "window", window=x, seed=0),
    "swap_tokens, seed": lambda x: position.swap_tokens(8, 0.5, seed=x),
    "swap_words": lambda x: position.swap_words(8, x, 0.5, seed=0),
    "jittered_distances": lambda x: position.jittered_distances(x, 0.5, 3, seed=0),
    "jittered_distances, ratio": lambda x: position.jittered_distances(8, x, 3, seed=0),
    "jittered_distances, width": lambda x: position.jittered_distances(8, 0.5, x, seed=0),
    "point_mass": point_mass,
}


def refused(call) -> str:
    with pytest.raises(PosgenError) as refusal:
        call()
    return str(refusal.value)


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("hooks", HOOKS.values(), ids=HOOKS.keys())
def test_every_hook_names_what_is_wrong(mini, hooks, wrong):
    tokens = torch.arange(N)[None]
    assert refused(lambda: mini.run_with_hooks(tokens, fwd_hooks=hooks(mini, wrong)))


@pytest.mark.parametrize("wrong", [one for name, one in WRONG.items() if name != "a distribution"])
def test_a_split_needs_a_distribution(mini, wrong):
    tokens = torch.arange(N)[None]
    by = [lambda: by_split(wrong), lambda: by_split(lambda capture: wrong)]
    for make in by:
        refusal = refused(lambda make=make: mini.run_with_hooks(tokens, fwd_hooks=substitute(mini, make())))
        assert "by_split" in refusal


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_every_draw_and_distribution_names_what_is_wrong(draw, wrong):
    assert "\n" not in refused(lambda: draw(wrong))


@pytest.mark.parametrize("wrong", [None, "x", {0: 1}])
def test_a_width_and_protected_places_are_numbers(wrong):
    refused(lambda: hooks.triangle(wrong))
    refused(lambda: position.swap_tokens(8, 0.5, protected=wrong if wrong != {0: 1} else {0.5}, seed=0))
