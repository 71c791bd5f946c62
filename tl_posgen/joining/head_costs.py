"""Measure what a head costs when it loses its interaction, its slash, or all that varies in it: one head at a time."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.errors import UnsupportedModelError
from tl_posgen.hooks.replace_scores import HookList, replace_scores
from tl_posgen.joining.numbers.attention_mass import taken_elsewhere
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.loss import token_losses
from tl_posgen.models.model import Model
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
    left = taken_elsewhere(double(scores).softmax(-1), hidden, seed)
    return torch.where(hidden.any(-1, keepdim=True), left.log().to(scores), scores)


def hidden_at(
    capture: LayerCapture, scores: Float[Tensor, "head query key"], distance: int
) -> Bool[Tensor, "head query key"]:
    """Tell which pairs are `distance` tokens apart, where the query sees another key too."""
    position, visible = capture.positions, (scores > -torch.inf).sum(-1, keepdim=True)
    return (position[:, None] - position == distance) & (visible > 1)


def mean_outputs(
    model: Model, tokens: Int[Tensor, "prompt pos"], layers: Sequence[int]
) -> dict[int, Float[Tensor, "head d_value"]]:
    """Return, by layer, the mean of every head's output (hook_z) over these prompts and their positions."""
    sums: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def add(layer: int, z: Tensor, hook: object) -> None:
        sums[layer].append(double(z.flatten(2).unflatten(-1, (model.cfg.n_heads, -1))).mean(1).cpu())

    token_losses(model, tokens, [(name_of(layer), partial(add, layer)) for layer in layers])
    if silent := [layer for layer, seen in sums.items() if not seen]:
        raise UnsupportedModelError(f"layer {silent[0]}: {name_of(silent[0])} did not fire, so no head can be ablated")
    return {layer: torch.cat(seen).mean(0) for layer, seen in sums.items()}


def name_of(layer: int) -> str:
    """Return the name of the hook point of the heads' outputs."""
    return f"blocks.{layer}.attn.hook_z"


def mean_ablation(layer: int, head: int, mean: Float[Tensor, "head d_value"]) -> HookList:
    """z of one head <- its mean, at every position of every prompt."""

    def edit(z: Tensor, hook: object) -> Tensor:
        of_heads = z.flatten(2).unflatten(-1, (len(mean), -1)).clone()
        of_heads[:, :, head] = mean[head].to(of_heads)
        return of_heads.reshape(z.shape)

    return [(name_of(layer), edit)]


def head_costs(
    model: Model,
    tokens: Int[Tensor, "prompt pos"],
    distance: xr.DataArray,
    selected: Mapping[int, Sequence[int]],
    seed: int,
) -> xr.DataArray:
    """Return the rise of the loss, in nats per token, with one selected head at a time edited.

    Every prompt runs unchanged, for the means, and with every edit of every head.

    Args:
        distance: each head's best distance D, whose diagonal is hidden for "slash".
        seed: of the keys that give as much mass for "elsewhere", the same for every head.
    """
    unchanged = token_losses(model, tokens).mean(-1)
    means = mean_outputs(model, tokens, list(selected))
    heads = sorted({head for some in selected.values() for head in some})
    rises = np.full((len(COSTS), len(tokens), len(selected), len(heads)), np.nan)
    for row, layer in enumerate(selected):
        for head in selected[layer]:
            one: dict[str, Any] = {"heads": [(layer, head)]}
            back = int(distance.sel(layer=layer, head=head))
            hooks = {
                "interaction": substitute(model, by_split(all_positions), **one),
                "slash": replace_scores(model, partial(without_distance, distance=back), **one),
                "elsewhere": replace_scores(model, partial(with_mass_taken_elsewhere, distance=back, seed=seed), **one),
                "head": mean_ablation(layer, head, means[layer]),
            }
            for number, what in enumerate(COSTS):
                losses = token_losses(model, tokens, hooks[what]).mean(-1)
                rises[number, :, row, heads.index(head)] = (losses - unchanged).numpy()
    labels = {"edit": list(COSTS), "layer": list(selected), "head": heads}
    return xr.DataArray(rises, labels, ("edit", "prompt", "layer", "head"))
