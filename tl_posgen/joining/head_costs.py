"""Measure what heads cost, one or several at once: without interaction, without slash, or without all that varies."""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.core.run import Run
from tl_posgen.hooks.ablate_heads import mean_outputs, with_outputs
from tl_posgen.hooks.replace_scores import HookList, replace_scores
from tl_posgen.joining.numbers.attention_mass import take_from_drawn_keys
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.model import Model
from tl_posgen.position.substitution.hooks import by_split, substitute, visible_distances

COSTS = ("interaction", "slash", "elsewhere", "head")
TOGETHER = ("slash", "elsewhere", "head", "drawn heads")  # of several heads at once; the last is "head" in drawn ones
Back = Mapping[tuple[int, int], int]  # (layer, head) -> distance


def without_distance(capture: LayerCapture, back: Back) -> Float[Tensor, "head query key"]:
    """Return the layer's scores with no attention back[layer, head] tokens back: softmax gives its share to the other
    keys.

    A query that would see nothing else (the first token, D = 0) keeps it.
    """
    scores = capture.scores()
    return scores.masked_fill(hidden_at(capture, scores, back), -torch.inf)


def with_mass_taken_elsewhere(capture: LayerCapture, back: Back, seed: int) -> Float[Tensor, "head query key"]:
    """Return the layer's scores with as much attention taken from drawn keys as `without_distance` hides, at most all
    of theirs: its control."""
    scores = capture.scores()
    hidden = hidden_at(capture, scores, back)
    generator, found = torch.Generator().manual_seed(seed), []
    for one, of_head in zip(scores, hidden, strict=True):  # one after the other, as each takes the memory of several
        left = take_from_drawn_keys(double(one)[None].softmax(-1), of_head[None], generator)[0]
        found.append(torch.where(of_head.any(-1, keepdim=True), left.log().to(one), one))
    return torch.stack(found)


def hidden_at(
    capture: LayerCapture, scores: Float[Tensor, "head query key"], back: Back
) -> Bool[Tensor, "head query key"]:
    """Tell which pairs are as many tokens apart as their head's entry says, where the query sees another key too."""
    position, visible = capture.positions, (scores > -torch.inf).sum(-1, keepdim=True)
    distance = torch.tensor([back[capture.layer, head] for head in capture.heads], device=position.device)
    return (position[:, None] - position == distance[:, None, None]) & (visible > 1)


class Edits:
    """Edits of some heads at once, as hooks.

    Args:
        back: each head's best distance D, whose diagonal is hidden for "slash".
        seed: of the keys that give as much mass for "elsewhere"; heads edited at once draw one after the other.
    """

    def __init__(self, model: Model, tokens: Int[Tensor, "prompt pos"], back: Back, seed: int):
        self.model = model
        layers = sorted({layer for layer, _ in back})
        self.geometry = dict(zip(layers, geometry_of(model, layers), strict=True))
        self.means = mean_outputs(model, tokens, layers)
        self.scores_of = {
            "slash": partial(without_distance, back=back),
            "elsewhere": partial(with_mass_taken_elsewhere, back=back, seed=seed),
        }

    def hooks(self, edit: str, heads: Sequence[tuple[int, int]]) -> HookList:
        """Return the hooks of one of COSTS in these heads."""
        if edit == "interaction":
            turning = [(layer, head) for layer, head in heads if self.geometry[layer].rope.inv_freq.any()]
            # where nothing turns scores are f + g already
            return substitute(self.model, by_split(visible_distances), heads=turning) if turning else []
        if edit == "head":
            return [hook for layer, head in heads for hook in with_outputs(layer, [head], self.means[layer])]
        return replace_scores(self.model, self.scores_of[edit], heads=heads)


def head_costs(
    run: Run,
    tokens: Int[Tensor, "prompt pos"],
    slash_score: xr.DataArray,
    distance: xr.DataArray,
    selected: Mapping[int, Sequence[int]],
) -> xr.Dataset:
    """Return the rise of the loss, in nats per token, with one selected head at a time edited, and with the 1, 2, 4, ..
    heads of the highest slash scores edited at once.

    Every prompt runs unchanged, for the means, and with every edit.

    Args:
        distance: each head's best distance D, whose diagonal is hidden for "slash".
    """
    heads = [(layer, head) for layer, some in selected.items() for head in some]
    back = {(layer, head): int(distance.sel(layer=layer, head=head)) for layer, head in heads}
    edits, unchanged = Edits(run.model, tokens, back, run.seed), run.losses(tokens).mean(-1)

    def rise(edit: str, some: Sequence[tuple[int, int]], prompts: slice = slice(None)) -> list[float]:
        return (run.losses(tokens[prompts], edits.hooks(edit, some)).mean(-1) - unchanged[prompts]).tolist()

    strongest = sorted(heads, key=lambda one: -float(slash_score.sel(layer=one[0], head=one[1])))
    counts, of_prompts = counts_up_to(len(heads)), range(len(tokens))
    order = [np.random.default_rng((run.seed, prompt)).permutation(len(heads)) for prompt in of_prompts]
    drawn = [[heads[place] for place in one] for one in order]
    together = [[rise(edit, strongest[:n]) for n in counts] for edit in TOGETHER[:-1]]
    together.append([[rise("head", drawn[at][:n], slice(at, at + 1))[0] for at in of_prompts] for n in counts])
    joint = xr.DataArray(together, {"edited": list(TOGETHER), "n_heads": counts}, ("edited", "n_heads", "prompt"))

    def hooks_of(layer: int, head: int) -> dict[str, HookList]:
        return {edit: edits.hooks(edit, [(layer, head)]) for edit in COSTS}

    return xr.Dataset({"cost": run.rises_of_heads(tokens, selected, COSTS, hooks_of), "joint_cost": joint})


def counts_up_to(n: int) -> list[int]:
    """Return 1, 2, 4, .. and n.

    Example:
        >>> counts_up_to(6), counts_up_to(1)
        ([1, 2, 4, 6], [1])
    """
    return [*(2**power for power in range((n - 1).bit_length())), n]
