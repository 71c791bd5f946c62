"""Which law of distances p(d) should the meaning part be averaged over? Chosen on some prompts, reported on others."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.experiments.loss import losses_of, token_losses
from tl_posgen.interventions.substitution import by_split, substitute
from tl_posgen.maths.splits import DistanceLaw, triangle
from tl_posgen.models.backend import Model
from tl_posgen.models.probe import unpadded

Scope = Literal["model", "layer", "head"]

SCOPES: tuple[Scope, ...] = ("model", "layer", "head")
WIDTHS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0, 32.0)
GENERAL_DISTANCES = 24


@dataclass(frozen=True)
class Found:
    """One law that a search found.

    Attributes:
        family: "triangle", p(d) proportional to width - d, or "general", any p on 0 .. 23.
        scope: one law for the "model", per "layer" or per "head".
        loss: on the prompts that were not searched on; loss_chosen_on: on those that were.
        weights: p, row by row.
        law_width: of one triangle for the model, else None.
    """

    family: str
    scope: Scope
    loss: float
    loss_chosen_on: float
    weights: Float[np.ndarray, "layer head distance"]
    law_width: float | None = None


def searched(
    model: Model, tokens: Int[Tensor, "prompt pos"], options: dict[str, Any], *, steps: int, seed: int, progress: bool
) -> list[Found]:
    """The best laws by loss on the first half of the prompts, with their loss on the second half.

    Triangles: every width of WIDTHS for the model; then, from the best, one pass over the layers, and from there one
    pass over the heads, each trying the neighbouring widths and keeping what lowers the loss. General laws: gradient
    descent (Adam) through the model on the logarithms of p, from the best triangle; one, one per layer, one per head.
    """
    half = len(tokens) // 2
    chosen_on, reported_on = tokens[:half], tokens[half:]

    def loss_on(some: Tensor, laws: dict[int, DistanceLaw]) -> float:
        return float(token_losses(model, some, substitute(model, by_split(laws), **options)).mean())

    def found(family: str, scope: Scope, laws: dict[int, DistanceLaw], width: float | None = None) -> Found:
        losses = loss_on(reported_on, laws), loss_on(chosen_on, laws)
        return Found(family, scope, *losses, stacked(laws, model.cfg.n_heads), width)

    widths = search_widths(model, lambda some: loss_on(chosen_on, triangles(some)), progress)
    start = float(widths["model"][0, 0])
    result = [
        found("triangle", scope, triangles(widths[scope]), start if scope == "model" else None) for scope in SCOPES
    ]
    for scope in SCOPES if steps else ():
        laws = descend(model, chosen_on, options, scope, start, steps=steps, seed=seed, progress=progress)
        result.append(found("general", scope, laws))
    return result


def triangles(widths: Float[Tensor, "layer head"]) -> dict[int, DistanceLaw]:
    return {layer: triangle(row) for layer, row in enumerate(widths)}


def stacked(laws: dict[int, DistanceLaw], n_heads: int) -> Float[np.ndarray, "layer head distance"]:
    """All laws on one axis of distances."""
    n = max(law.weights.shape[-1] for law in laws.values())
    rows = np.zeros((len(laws), n_heads, n))
    for layer, law in laws.items():
        rows[layer, :, : law.weights.shape[-1]] = law.weights.detach().cpu().numpy()
    return rows


def search_widths(
    model: Model, loss: Callable[[Tensor], float], progress: bool
) -> dict[str, Float[Tensor, "layer head"]]:
    """Triangle widths for the model, per layer and per head, each scope starting from the one before."""
    shape = (model.cfg.n_layers, model.cfg.n_heads)
    tried = [(loss(torch.full(shape, width, dtype=torch.float64)), width) for width in WIDTHS]
    lowest, best = min(tried)
    widths = torch.full(shape, best, dtype=torch.float64)
    found = {"model": widths}
    layers = [(layer, slice(None)) for layer in range(shape[0])]
    heads = [(layer, head) for layer in range(shape[0]) for head in range(shape[1])]
    for scope, places in (("layer", layers), ("head", heads)):
        widths = widths.clone()
        for place in tqdm(places, desc=f"widths, one a {scope}", unit=scope, disable=not progress):
            for width in neighbours(float(widths[place].flatten()[0]) if scope == "layer" else float(widths[place])):
                candidate = widths.clone()
                candidate[place] = width
                value = loss(candidate)
                if value < lowest:
                    lowest, widths = value, candidate
        found[scope] = widths
    return found


def neighbours(width: float) -> list[float]:
    """The two narrower and the two wider candidates."""
    at = WIDTHS.index(width)
    return [WIDTHS[other] for other in range(max(0, at - 2), min(len(WIDTHS), at + 3)) if other != at]


def descend(
    model: Model,
    tokens: Int[Tensor, "prompt pos"],
    options: dict[str, Any],
    scope: Scope,
    width: float,
    *,
    steps: int,
    seed: int,
    progress: bool,
    rate: float = 0.05,
) -> dict[int, DistanceLaw]:
    """Adam on ln p, p on the distances 0 .. 23, by the loss of the substituted model on a few prompts at a time."""
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    shape = {"model": (1, 1), "layer": (n_layers, 1), "head": (n_layers, n_heads)}[scope]
    distances = torch.arange(GENERAL_DISTANCES)
    logits = (width - distances.double()).clamp(min=0.02).log().expand(*shape, -1).clone().requires_grad_(True)

    def laws() -> dict[int, DistanceLaw]:
        weights = logits.softmax(-1).expand(n_layers, n_heads, -1)
        return {layer: DistanceLaw(distances, weights[layer]) for layer in range(n_layers)}

    optimiser = torch.optim.Adam([logits], lr=rate)
    generator = torch.Generator().manual_seed(seed)
    for _ in tqdm(range(steps), desc=f"general law, one a {scope}", unit="step", disable=not progress):
        some = tokens[torch.randperm(len(tokens), generator=generator)[:4]]
        with torch.enable_grad(), model.hooks(fwd_hooks=substitute(model, by_split(laws()), **options)):
            loss = losses_of(model(some, return_type="logits", **unpadded(model, some)), some).mean()
        # only the law learns: gradients are taken for it alone, the model's weights collect none
        (logits.grad,) = torch.autograd.grad(loss, [logits])
        optimiser.step()
    return {layer: DistanceLaw(law.distances, law.weights.detach()) for layer, law in laws().items()}
