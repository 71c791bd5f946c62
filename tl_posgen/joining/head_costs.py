"""Measure what a head costs when it loses its interaction, its slash, or all that varies in it: one head at a time."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.core.run import Run
from tl_posgen.hooks.ablate_heads import mean_outputs, with_outputs
from tl_posgen.hooks.replace_scores import HookList, replace_scores
from tl_posgen.joining.numbers.attention_mass import take_from_drawn_keys
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.position.substitution.hooks import all_positions, by_split, substitute

COSTS = ("interaction", "slash", "elsewhere", "head")


def without_distance(capture: LayerCapture, distance: int) -> Float[Tensor, "head query key"]:
    """Return the layer's scores with no attention `distance` tokens back: softmax gives its share to the other keys.

    A query that would see nothing else (the first token, D = 0) keeps it.
    """
    scores = capture.scores()
    return scores.masked_fill(hidden_at(capture, scores, distance), -torch.inf)


def with_mass_taken_elsewhere(capture: LayerCapture, distance: int, seed: int) -> Float[Tensor, "head query key"]:
    """Return the layer's scores with as much attention taken from drawn keys as `without_distance` hides, at most all
    of theirs: its control."""
    scores = capture.scores()
    hidden = hidden_at(capture, scores, distance)
    left = take_from_drawn_keys(double(scores).softmax(-1), hidden, seed)
    return torch.where(hidden.any(-1, keepdim=True), left.log().to(scores), scores)


def hidden_at(
    capture: LayerCapture, scores: Float[Tensor, "head query key"], distance: int
) -> Bool[Tensor, "head query key"]:
    """Tell which pairs are `distance` tokens apart, where the query sees another key too."""
    position, visible = capture.positions, (scores > -torch.inf).sum(-1, keepdim=True)
    return (position[:, None] - position == distance) & (visible > 1)


def head_costs(
    run: Run, tokens: Int[Tensor, "prompt pos"], distance: xr.DataArray, selected: Mapping[int, Sequence[int]]
) -> xr.DataArray:
    """Return the rise of the loss, in nats per token, with one selected head at a time edited.

    Every prompt runs unchanged, for the means, and with every edit of every head.

    Args:
        distance: each head's best distance D, whose diagonal is hidden for "slash". The keys that give as much mass for
            "elsewhere" are drawn by the seed of the run, the same for every head.
    """
    model, means = run.model, mean_outputs(run.model, tokens, list(selected))

    def hooks_of(layer: int, head: int) -> dict[str, HookList]:
        one: dict[str, Any] = {"heads": [(layer, head)]}
        at: dict[str, Any] = {"distance": int(distance.sel(layer=layer, head=head))}
        return {
            "interaction": substitute(model, by_split(all_positions), **one),
            "slash": replace_scores(model, partial(without_distance, **at), **one),
            "elsewhere": replace_scores(model, partial(with_mass_taken_elsewhere, **at, seed=run.seed), **one),
            "head": with_outputs(layer, [head], means[layer]),
        }

    return run.rises_of_heads(tokens, selected, COSTS, hooks_of)
