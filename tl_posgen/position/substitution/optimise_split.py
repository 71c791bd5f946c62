"""Which split carries the model best? Chosen by loss on some prompts, reported on others, beside controls."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.hooks.replace_scores import HookList, ScoresOf
from tl_posgen.models.loss import logits_of, losses_of, token_losses
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Layers
from tl_posgen.models.wrapped import wrap
from tl_posgen.position.substitution.hooks import FreeSplit, by_free_split, by_split, by_three_axis, near, substitute
from tl_posgen.position.substitution.splits import DistanceDistribution, triangle, uniform

FAMILIES = ("triangle", "three_axis", "mean_query", "distribution", "free", "imitating", "position", "content")
CONTROLS = ("position", "content")
WIDTHS = (2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0)
BY_WIDTH: dict[str, Callable[[float], ScoresOf]] = {
    "triangle": lambda width: by_split(triangle(width)),
    "three_axis": lambda width: partial(by_three_axis, weights=near(width)),
    "mean_query": lambda width: by_split(uniform(int(width)), query="mean"),
}
N_DISTANCES = 24
RATE = 0.04
AT_ONCE = 4  # prompts per step


def optimise_split(
    model: Model,
    chosen_on: Int[Tensor, "prompt pos"],
    reported_on: Int[Tensor, "prompt_left_out pos"],
    where: Mapping[str, Any],
    *,
    steps: int,
    seed: int,
) -> tuple[xr.Dataset, dict[str, float]]:
    """The best split of every family, and the best width of those that have one.

    The dataset has a row a family: losses of the prompts that were not searched on ("search_losses"), mean loss of
    those that were, the KL of the predictions, how many numbers were chosen; and what p(d) and |Rbar| were found.

    - triangle: p(d) proportional to width - d, the best of WIDTHS, one for the model.
    - three_axis: a(i-j) + b(i) + c(j) fitted with weights max(width - d, .05), likewise.
    - mean_query: a(i-j) + c(j) of the mean query and the mean key, p uniform on so many distances, likewise.
    - distribution: a p(d) on 0 .. 23 per head, by gradient descent from that triangle.
    - free: Rbar and the reference key per head (see `FreeSplit`), by gradient descent from that triangle.
    - imitating: as free, chosen by KL of the predictions from the unchanged model's instead of by loss.
    - position, content: the controls. As free, with the other part missing: what so many numbers do by themselves.

    Args:
        where: gamma, threshold, and heads as (layer, head) pairs, as `substitute` takes them.
        steps, seed: of the descent.
    """
    device = next(model.parameters()).device
    chosen_on, reported_on = chosen_on.to(device), reported_on.to(device)

    def report(family: str, n_parameters: int, by: ScoresOf) -> None:
        hooks = substitute(model, by, **where)
        numbers = {
            "search_losses": ("prompt", token_losses(model, reported_on, hooks).mean(1).numpy()),
            "search_loss_chosen_on": float(token_losses(model, chosen_on, hooks).mean()),
            "search_prediction_kl": prediction_kl(model, reported_on, hooks),
            "search_parameters": n_parameters,
        }
        rows.append(xr.Dataset(numbers, {"family": family}))

    def optimise(family: str, parameters: Sequence[Tensor], by: Callable[[], ScoresOf]) -> None:
        def hooks() -> HookList:
            return substitute(model, by(), **where)

        target = log_predictions if family == "imitating" else None
        descend(model, chosen_on, parameters, hooks, target, steps=steps, seed=seed)

    rows: list[xr.Dataset] = []
    n_heads, layers = len(where["heads"]), sorted({layer for layer, _ in where["heads"]})
    widths = {family: best_width(model, chosen_on, family, where) for family in BY_WIDTH}
    for family, width in widths.items():
        report(family, 1, BY_WIDTH[family](width))
    width = widths["triangle"]
    logits = (width - torch.arange(N_DISTANCES).double()).clamp(min=0.02).log()
    logits = logits.repeat(model.cfg.n_layers, model.cfg.n_heads, 1).requires_grad_(True)
    optimise("distribution", [logits], lambda: by_split(distributions(logits)))
    report("distribution", n_heads * N_DISTANCES, by_split(distributions(logits.detach())))
    sizes = {}
    for family in FAMILIES[4:]:
        part = family if family in CONTROLS else "both"
        splits = free_splits(model, width, layers)
        turns, shifts = [split.turn for split in splits.values()], [split.shift for split in splits.values()]
        parameters = (turns if part != "position" else []) + (shifts if part != "content" else [])
        parameters = [parameter.requires_grad_(True) for parameter in parameters]
        optimise(family, parameters, lambda s=splits, p=part: by_free_split(s, p))
        each = sum(x[0].numel() for x in parameters) // len(splits)
        if part != "position":
            sizes[family] = torch.stack([turn.detach().norm(dim=-1).cpu() for turn in turns]).numpy()
        report(family, n_heads * each, by_free_split(splits, part))
    turn = xr.DataArray(
        np.stack(list(sizes.values())),
        {"free_family": list(sizes), "layer": layers},
        ("free_family", "layer", "head", "plane"),
    )
    weights = xr.DataArray(logits.detach().softmax(-1).cpu().numpy(), dims=("layer", "head", "distance"))
    families = xr.concat(rows, "family")
    families = families.assign(distribution=weights, turn=turn.reindex(layer=range(model.cfg.n_layers)))
    return families, widths


def passes_of(n_chosen_on: int, n_reported_on: int, steps: int) -> int:
    """How many passes of one prompt `optimise_split` makes: every width, every family reported, every step of the
    descents, with the unchanged model's predictions in that of "imitating"."""
    searched = len(BY_WIDTH) * len(WIDTHS) * n_chosen_on
    reported = len(FAMILIES) * (n_chosen_on + 3 * n_reported_on)
    descents = len(FAMILIES) - len(BY_WIDTH) + 1
    return searched + reported + descents * steps * min(AT_ONCE, n_chosen_on)


def best_width(model: Model, tokens: Int[Tensor, "prompt pos"], family: str, where: Mapping[str, Any]) -> float:
    """The width of this family with the least loss."""
    losses = {}
    for width in WIDTHS:
        hooks = substitute(model, BY_WIDTH[family](width), **where)
        losses[width] = float(token_losses(model, tokens, hooks).mean())
    return min(losses, key=losses.__getitem__)


def distributions(logits: Float[Tensor, "layer head distance"]) -> dict[int, DistanceDistribution]:
    distances = torch.arange(logits.shape[-1])
    return {layer: DistanceDistribution(distances, row.softmax(-1)) for layer, row in enumerate(logits)}


def free_splits(model: Model, width: float, layers: Layers = None) -> dict[int, FreeSplit]:
    """Where descent starts: the Rbar of a triangle, and the mean key as it is."""
    splits = {}
    for geometry in wrap(model).geometry(layers):
        turn = torch.view_as_real(triangle(width).mean_turn(geometry.rope, geometry.d_head)).float()
        shift = torch.zeros(geometry.n_heads, geometry.d_head, device=turn.device)
        splits[geometry.layer] = FreeSplit(turn.repeat(geometry.n_heads, 1, 1), shift)
    return splits


def descend(
    model: Model,
    tokens: Int[Tensor, "prompt pos"],
    parameters: Sequence[Tensor],
    hooks: Callable[[], HookList],
    target: Callable[[Model, Tensor], Tensor] | None,
    *,
    steps: int,
    seed: int,
) -> None:
    """Adam with a cosine schedule on `parameters`, in place, a few prompts at a time: on the loss, or on the KL from
    the predictions that `target` gives."""
    optimiser = torch.optim.Adam(parameters, lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(steps, 1))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        some = tokens[torch.randperm(len(tokens), generator=generator)[:AT_ONCE]]
        wanted = None if target is None else target(model, some)
        with torch.enable_grad(), model.hooks(fwd_hooks=hooks()):
            logits = logits_of(model, some)
            loss = losses_of(logits, some).mean() if wanted is None else divergence(wanted, logits).mean()
        # only the split learns: gradients are taken for it alone, the model's weights collect none
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient  # None for a layer that is not replaced
        optimiser.step()
        schedule.step()


def prediction_kl(model: Model, tokens: Int[Tensor, "prompt pos"], hooks: Sequence[Any]) -> float:
    """KL(unchanged || hooked) of the next token's distribution in nats, mean over all tokens."""
    rows = []
    for some in tokens.split(AT_ONCE):
        wanted = log_predictions(model, some)
        with torch.no_grad(), model.hooks(fwd_hooks=list(hooks)):
            rows.append(divergence(wanted, logits_of(model, some)).cpu())
    return float(torch.cat(rows).mean())


def log_predictions(model: Model, tokens: Int[Tensor, "prompt pos"]) -> Float[Tensor, "prompt pos vocabulary"]:
    with torch.no_grad():
        return logits_of(model, tokens).double().log_softmax(-1)


def divergence(
    wanted: Float[Tensor, "prompt pos vocabulary"], logits: Float[Tensor, "prompt pos vocabulary"]
) -> Float[Tensor, "prompt pos"]:
    return (wanted.exp() * (wanted - logits.double().log_softmax(-1))).sum(-1)
