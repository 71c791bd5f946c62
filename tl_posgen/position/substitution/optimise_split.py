"""Search of the splits with the least loss: chosen on some prompts, reported on others, with controls."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.hooks.replace_scores import ScoresOf
from tl_posgen.models.loss import logits_of, losses_of, token_losses
from tl_posgen.models.metric import judged_by
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Layers
from tl_posgen.models.wrapped import wrap
from tl_posgen.position.substitution.hooks import FreeSplit, by_free_split, by_split, by_three_axis, near, substitute
from tl_posgen.position.substitution.numbers.splits import triangle, uniform
from tl_posgen.position.substitution.predictions import divergence, log_predictions, losses_and_kl
from tl_posgen.rope.splits import DistanceDistribution

CONTROLS = ("position", "content")
FREE = ("free", "imitating", "shuffled", *CONTROLS)
FAMILIES = ("triangle", "three_axis", "mean_query", "distribution", *FREE)
WIDTHS = (2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0)
BY_WIDTH: dict[str, Callable[[float], ScoresOf]] = {
    "triangle": lambda width: by_split(triangle(width)),
    "three_axis": lambda width: partial(by_three_axis, weights=near(width)),
    "mean_query": lambda width: by_split(uniform(int(width)), query="mean"),
}
N_DISTANCES = 24  # of a searched p(d)
RATE = 0.04  # of Adam
AT_ONCE = 4  # prompts per step
Found = tuple[ScoresOf, int]  # what scores are replaced by, and its number of parameters


@dataclass(frozen=True)
class Search:
    """Search of splits of one model: `where` has the gamma, threshold and heads of `substitute`."""

    model: Model
    chosen_on: Int[Tensor, "prompt pos"]
    reported_on: Int[Tensor, "prompt_left_out pos"]
    where: Mapping[str, Any]
    steps: int
    seed: int

    def report(self, found: Mapping[str, Found]) -> xr.Dataset:
        """Return the losses of one split a family on both sets of prompts, and the KL of its predictions."""
        hooks = [substitute(self.model, by, **self.where) for by, _ in found.values()]
        losses, kl = losses_and_kl(self.model, self.reported_on, hooks)
        chosen_on = [float(token_losses(self.model, self.chosen_on, one).mean()) for one in hooks]
        numbers = {
            "search_loss": (("family", "prompt"), losses.mean(-1).numpy()),
            "chosen_on_loss": ("family", chosen_on),
            "search_kl": ("family", kl.mean(-1).numpy()),
            "n_parameters": ("family", [n_parameters for _, n_parameters in found.values()]),
        }
        return xr.Dataset(numbers, {"family": list(found)})

    def optimise(self, family: str, parameters: Sequence[Tensor], by: Callable[[], ScoresOf]) -> None:
        """Minimise the loss over the parameters of the scores by(), in place, by Adam with a cosine schedule.

        For the family "imitating", minimise the KL from the unchanged model's predictions instead.
        """
        optimiser = torch.optim.Adam(parameters, lr=RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(self.steps, 1))
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.steps):
            some = self.chosen_on[torch.randperm(len(self.chosen_on), generator=generator)[:AT_ONCE]]
            wanted = log_predictions(self.model, some) if family == "imitating" else None
            with torch.enable_grad(), self.model.hooks(fwd_hooks=substitute(self.model, by(), **self.where)):
                logits = logits_of(self.model, some)
                loss = losses_of(logits, some).mean() if wanted is None else divergence(wanted, logits).mean()
            # gradients of the split alone: the model's weights collect none
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient  # None for a layer that is not replaced
            optimiser.step()
            schedule.step()

    def distribution(self, width: float) -> tuple[Found, Float[Tensor, "layer head distance"]]:
        """Return a searched p(d) per head; the descent starts from a triangle."""
        config = self.model.cfg
        logits = (width - double(torch.arange(N_DISTANCES))).clamp(min=0.02).log()
        logits = logits.repeat(config.n_layers, config.n_heads, 1).requires_grad_(True)
        self.optimise("distribution", [logits], lambda: by_split(distributions(logits)))
        found = by_split(distributions(logits.detach())), len(self.where["heads"]) * N_DISTANCES
        return found, logits.detach().softmax(-1)

    def free_family(
        self, family: str, width: float, layers: Sequence[int]
    ) -> tuple[Found, Float[Tensor, "layer head plane"] | None]:
        """Return the free splits of a family, and |Rbar| by plane if it has a content part."""
        part = family if family in CONTROLS else "both"
        shuffle_seed = self.seed if family == "shuffled" else None
        splits = free_splits(self.model, width, layers)
        turns, shifts = [split.turn for split in splits.values()], [split.shift for split in splits.values()]
        parameters = (turns if part != "position" else []) + (shifts if part != "content" else [])
        parameters = [parameter.requires_grad_(True) for parameter in parameters]
        self.optimise(family, parameters, lambda: by_free_split(splits, part, shuffle_seed))
        per_head = sum(x[0].numel() for x in parameters) // len(splits)
        found = by_free_split(splits, part, shuffle_seed), len(self.where["heads"]) * per_head
        lengths = torch.stack([turn.detach().norm(dim=-1).cpu() for turn in turns]) if part != "position" else None
        return found, lengths


def optimise_split(
    model: Model,
    chosen_on: Int[Tensor, "prompt pos"],
    reported_on: Int[Tensor, "prompt_left_out pos"],
    where: Mapping[str, Any],
    *,
    steps: int,
    seed: int,
) -> xr.Dataset:
    """Return a dataset with the best split of every family, and with its losses and the KL of its predictions.

    - triangle: p(d) proportional to width - d, the best of WIDTHS, one for the model.
    - three_axis: a(i-j) + b(i) + c(j) fitted with weights max(width - d, .05), the best of WIDTHS.
    - mean_query: a(i-j) + c(j) of the mean query and the mean key, p uniform on `width` distances, the best of WIDTHS.
    - distribution: a p(d) on 0 .. 23 per head, by gradient descent from the best triangle.
    - free: Rbar and the reference key per head (see `FreeSplit`), by gradient descent from the best triangle.
    - imitating: as free, chosen by the KL of the predictions from the unchanged model's instead of by loss.
    - shuffled: the null of the search. As free, of queries and keys whose coordinates are shuffled, each head's
      by two permutations that stay: content is scrambled, a position part can still be learned.
    - position, content: the controls. As free, without the other part: the effect of as many parameters alone.
    """
    device = next(model.parameters()).device
    search = Search(model, chosen_on.to(device), reported_on.to(device), where, steps, seed)
    layers = sorted({layer for layer, _ in where["heads"]})
    widths = {family: best_width(model, search.chosen_on, family, where) for family in BY_WIDTH}
    found: dict[str, Found] = {family: (BY_WIDTH[family](width), 1) for family, width in widths.items()}
    found["distribution"], weights = search.distribution(widths["triangle"])
    free = {family: search.free_family(family, widths["triangle"], layers) for family in FREE}
    lengths = {family: length for family, (_, length) in free.items() if length is not None}
    dims = ("free_family", "layer", "head", "plane")
    turn = xr.DataArray(torch.stack([*lengths.values()]).numpy(), {"free_family": [*lengths], "layer": layers}, dims)
    return search.report(found | {family: split for family, (split, _) in free.items()}).assign(
        search_width=("family", [widths.get(family, math.nan) for family in FAMILIES]),
        distribution=xr.DataArray(weights.cpu().numpy(), dims=("layer", "head", "distance")),
        turn=turn.reindex(layer=range(model.cfg.n_layers)),
    )


def passes_of(n_chosen_on: int, n_reported_on: int, steps: int) -> int:
    """Return the number of passes of one prompt by `optimise_split`: for widths, reports and steps of the descents."""
    searched = len(BY_WIDTH) * len(WIDTHS) * n_chosen_on
    reported = len(FAMILIES) * (n_chosen_on + n_reported_on) + n_reported_on
    descents = len(FAMILIES) - len(BY_WIDTH) + 1  # "imitating" also runs the unchanged model
    return searched + reported + descents * steps * min(AT_ONCE, n_chosen_on)


def best_width(model: Model, tokens: Int[Tensor, "prompt pos"], family: str, where: Mapping[str, Any]) -> float:
    """Return the width of this family with the least loss."""
    losses = {}
    for width in WIDTHS:
        hooks = substitute(model, BY_WIDTH[family](width), **where)
        with judged_by(None):
            losses[width] = float(token_losses(model, tokens, hooks).mean())
    return min(losses, key=losses.__getitem__)


def distributions(logits: Float[Tensor, "layer head distance"]) -> dict[int, DistanceDistribution]:
    distances = torch.arange(logits.shape[-1])
    return {layer: DistanceDistribution(distances, row.softmax(-1)) for layer, row in enumerate(logits)}


def free_splits(model: Model, width: float, layers: Layers = None) -> dict[int, FreeSplit]:
    """Return the start of the descent: the Rbar of a triangle, and the prompt's mean key."""
    splits = {}
    for geometry in wrap(model).geometry(layers):
        turn = torch.view_as_real(triangle(width).mean_turn(geometry.rope, geometry.d_head)).float()
        shift = torch.zeros(geometry.n_heads, geometry.d_head, device=turn.device)
        splits[geometry.layer] = FreeSplit(turn.repeat(geometry.n_heads, 1, 1), shift)
    return splits
