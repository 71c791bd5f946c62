"""Which split carries the model best? Chosen by loss on some prompts, reported on others, beside controls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.experiments.loss import losses_of, token_losses
from tl_posgen.interventions.scores import ScoresOf
from tl_posgen.interventions.substitution import FreeSplit, Part, by_free_split, by_split, substitute
from tl_posgen.maths.splits import DistanceLaw, triangle
from tl_posgen.models.backend import Model
from tl_posgen.models.probe import probe, supported, unpadded

WIDTHS = (2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0)
LAW_DISTANCES = 24
RATE = 0.04
AT_ONCE = 4  # prompts per step


@dataclass(frozen=True)
class Found:
    """One split that a search found.

    Attributes:
        family: see `searched`.
        parameters: how many numbers were chosen.
        losses: of the prompts that were not searched on.
        chosen_on: mean loss of those that were.
        prediction_kl: KL(untouched || substituted) of the next token's distribution, on prompts not searched on.
        law: p(d) per head, where one was searched. turn: |Rbar| per plane, where that was.
    """

    family: str
    parameters: int
    losses: Float[Tensor, " prompt"]
    chosen_on: float
    prediction_kl: float
    law: Float[Tensor, "layer head distance"] | None = None
    turn: Float[Tensor, "layer head plane"] | None = None


def searched(
    model: Model,
    chosen_on: Int[Tensor, "prompt pos"],
    reported_on: Int[Tensor, "prompt_left_out pos"],
    options: dict[str, Any],
    *,
    steps: int,
    seed: int,
    progress: bool,
) -> tuple[list[Found], float]:
    """The best split of every family, and the best width of a triangle.

    - triangle: p(d) proportional to width - d, the best of WIDTHS, one for the model.
    - law: a p(d) on 0 .. 23 per head, by gradient descent from that triangle.
    - free: Rbar and the reference key per head (see `FreeSplit`), by gradient descent from that triangle.
    - imitating: as free, chosen by KL of the predictions from the untouched model's instead of by loss.
    - position, meaning: the controls. As free, with the other part missing: what so many numbers do by themselves.
    """

    device = next(model.parameters()).device
    chosen_on, reported_on = chosen_on.to(device), reported_on.to(device)

    def found(family: str, parameters: int, by: ScoresOf, **more: Tensor) -> Found:
        hooks = substitute(model, by, **options)
        losses = token_losses(model, reported_on, hooks).mean(1)
        chosen = float(token_losses(model, chosen_on, hooks).mean())
        return Found(family, parameters, losses, chosen, prediction_kl(model, reported_on, hooks), **more)

    def descend(family: str, parameters: list[Tensor], by: Callable[[], ScoresOf], imitate: bool = False) -> None:
        _descend(model, chosen_on, options, parameters, by, imitate, family, steps, seed, progress)

    width = best_width(model, chosen_on, options, progress)
    result = [found("triangle", 1, by_split(triangle(width)))]
    logits = (width - torch.arange(LAW_DISTANCES).double()).clamp(min=0.02).log()
    logits = logits.repeat(model.cfg.n_layers, model.cfg.n_heads, 1).requires_grad_(True)
    descend("law", [logits], lambda: by_split(laws_of(logits)))
    result.append(found("law", logits.numel(), by_split(laws_of(logits.detach())), law=logits.detach().softmax(-1)))
    for family in ("free", "imitating", "position", "meaning"):
        part: Part = family if family in ("position", "meaning") else "both"
        splits = free_splits(model, width)
        turns, shifts = [split.turn for split in splits.values()], [split.shift for split in splits.values()]
        parameters = (turns if part != "position" else []) + (shifts if part != "meaning" else [])
        parameters = [parameter.requires_grad_(True) for parameter in parameters]
        descend(family, parameters, lambda s=splits, p=part: by_free_split(s, p), family == "imitating")
        turn = torch.stack([torch.view_as_complex(turn.detach()).abs().cpu() for turn in turns])
        more = {} if part == "position" else {"turn": turn}
        result.append(found(family, sum(x.numel() for x in parameters), by_free_split(splits, part), **more))
    return result, width


def best_width(model: Model, tokens: Int[Tensor, "prompt pos"], options: dict[str, Any], progress: bool) -> float:
    losses = {}
    for width in tqdm(WIDTHS, desc="search, triangle", unit="width", disable=not progress):
        losses[width] = float(
            token_losses(model, tokens, substitute(model, by_split(triangle(width)), **options)).mean()
        )
    return min(losses, key=losses.__getitem__)


def laws_of(logits: Float[Tensor, "layer head distance"]) -> dict[int, DistanceLaw]:
    distances = torch.arange(logits.shape[-1])
    return {layer: DistanceLaw(distances, row.softmax(-1)) for layer, row in enumerate(logits)}


def free_splits(model: Model, width: float) -> dict[int, FreeSplit]:
    """Where descent starts: the Rbar of a triangle, and the mean key as it is."""
    splits = {}
    for probed in probe(model):
        geometry = supported(probed).geometry
        turn = torch.view_as_real(triangle(width).mean_turn(geometry.rope, geometry.d_head)).float()
        shift = torch.zeros(geometry.n_heads, geometry.d_head, device=turn.device)
        splits[geometry.layer] = FreeSplit(turn.repeat(geometry.n_heads, 1, 1), shift)
    return splits


def _descend(
    model: Model,
    tokens: Int[Tensor, "prompt pos"],
    options: dict[str, Any],
    parameters: Sequence[Tensor],
    by: Callable[[], ScoresOf],
    imitate: bool,
    family: str,
    steps: int,
    seed: int,
    progress: bool,
) -> None:
    """Adam with a cosine schedule on `parameters`, in place, a few prompts at a time."""
    optimiser = torch.optim.Adam(parameters, lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(steps, 1))
    generator = torch.Generator().manual_seed(seed)
    for _ in tqdm(range(steps), desc=f"search, {family}", unit="step", disable=not progress):
        some = tokens[torch.randperm(len(tokens), generator=generator)[:AT_ONCE]]
        wanted = log_predictions(model, some) if imitate else None
        with torch.enable_grad(), model.hooks(fwd_hooks=substitute(model, by(), **options)):
            logits = model(some, return_type="logits", **unpadded(model, some))
            loss = losses_of(logits, some).mean() if wanted is None else divergence(wanted, logits).mean()
        # only the split learns: gradients are taken for it alone, the model's weights collect none
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True
        ):
            parameter.grad = gradient  # None for a layer that is not replaced
        optimiser.step()
        schedule.step()


def prediction_kl(model: Model, tokens: Int[Tensor, "prompt pos"], hooks: Sequence[Any]) -> float:
    """KL(untouched || hooked) of the next token's distribution in nats, mean over all tokens."""
    rows = []
    for some in tokens.split(AT_ONCE):
        wanted = log_predictions(model, some)
        with torch.no_grad(), model.hooks(fwd_hooks=list(hooks)):
            rows.append(divergence(wanted, model(some, return_type="logits", **unpadded(model, some))).cpu())
    return float(torch.cat(rows).mean())


def log_predictions(model: Model, tokens: Int[Tensor, "prompt pos"]) -> Float[Tensor, "prompt pos vocabulary"]:
    with torch.no_grad():
        return model(tokens, return_type="logits", **unpadded(model, tokens)).double().log_softmax(-1)


def divergence(
    wanted: Float[Tensor, "prompt pos vocabulary"], logits: Float[Tensor, "prompt pos vocabulary"]
) -> Float[Tensor, "prompt pos"]:
    return (wanted.exp() * (wanted - logits.double().log_softmax(-1))).sum(-1)
