"""Heads ablated: their outputs at zero, at their mean, or those of another prompt."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.hooks.replace_scores import HookList
from tl_posgen.models.loss import token_losses
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Heads, select_heads
from tl_posgen.models.session import session_of
from tl_posgen.models.tokens import bundled_text, check_numbers, spread, to_prompts

How = Literal["zero", "mean", "resample"]
LENGTH, N_PROMPTS = 256, 8  # of the reference, where they are left out


def ablate_heads(
    model: Model,
    heads: Heads,
    how: How | str = "zero",
    *,
    reference: Any = None,
    length: int | None = None,
    n_prompts: int = N_PROMPTS,
    seed: int = 0,
) -> HookList:
    """z_i of chosen heads <- 0, E z over a reference's prompts and positions, or z_i of one of its prompts.

    Args:
        heads: "3.1", "L3H1", (layer, head) pairs, a frame with the columns layer and head, or indices for all layers.
        how: "zero", "mean", or "resample": what the head wrote at the same position of a prompt of the reference, drawn
            for each prompt that runs.
        reference: prompts as `analyze` takes them; the bundled book if left out. "zero" reads none.
        length: tokens of its prompts; 256, or what the model takes, if left out.
        n_prompts: at most so many of them, spread over it.
        seed: of the prompts that "resample" draws.

    Returns:
        Hooks for `model.hooks(fwd_hooks=...)` or `run_with_hooks`, alone or joined to others.

    Raises:
        InputError: no such head, another `how`, unusable prompts; later, in the forward pass: prompts longer than those
            that "resample" draws from.
        UnsupportedModelError: a layer whose heads' outputs cannot be hooked.

    Source: usual interventions of the field.

    Example:
        >>> import torch
        >>> from tl_posgen import load_model
        >>> model, tokens = load_model("mini"), torch.arange(12)[None]
        >>> hooks = ablate_heads(model, "3.1", "mean", length=32, n_prompts=2)
        >>> torch.allclose(model.run_with_hooks(tokens, fwd_hooks=hooks), model(tokens))
        False
    """
    if how not in get_args(How):
        raise InputError(f"how {how!r}: choose {', '.join(get_args(How))}")
    session, selected = session_of(model), select_heads(model, heads=heads)
    if how == "zero":
        nothing = torch.zeros(session.model.cfg.n_heads, 1)
        return [edit for layer, some in selected.items() for edit in with_outputs(layer, some, nothing)]
    check_numbers(session, length, n_prompts)
    length = session.limit.cut(LENGTH) if length is None else length
    text = bundled_text() if reference is None else reference
    tokens = torch.stack(list(spread(to_prompts(session, text, length), n_prompts)))
    if how == "mean":
        means = mean_outputs(model, tokens, list(selected))
        return [edit for layer, some in selected.items() for edit in with_outputs(layer, some, means[layer])]
    drawn = _outputs_of(model, tokens, list(selected))
    return [edit for layer, some in selected.items() for edit in _with_drawn_outputs(layer, some, drawn[layer], seed)]


def _name_of(layer: int) -> str:
    """Return the name of the hook point of the heads' outputs."""
    return f"blocks.{layer}.attn.hook_z"


def _outputs_of(
    model: Model, tokens: Int[Tensor, "prompt pos"], layers: Sequence[int], *, mean: bool = False
) -> Mapping[int, Float[Tensor, "prompt *place head d_value"]]:
    """Return, by layer, what every head wrote (hook_z) at every position of these prompts, or its mean over them."""
    kept: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def add(layer: int, z: Tensor, hook: object) -> None:
        of_heads = z.detach().flatten(2).unflatten(-1, (model.cfg.n_heads, -1))
        kept[layer].append((double(of_heads).mean(1) if mean else of_heads).cpu())

    session = session_of(model)
    session.found()  # proved by passes of its own, before those that count
    token_losses(session, tokens, [(_name_of(layer), partial(add, layer)) for layer in layers])
    if silent := [layer for layer, seen in kept.items() if not seen]:
        raise UnsupportedModelError(f"layer {silent[0]}: {_name_of(silent[0])} did not fire, so no head can be ablated")
    return {layer: torch.cat(seen) for layer, seen in kept.items()}


def mean_outputs(
    model: Model, tokens: Int[Tensor, "prompt pos"], layers: Sequence[int]
) -> dict[int, Float[Tensor, "head d_value"]]:
    """Return, by layer, the mean of every head's output over these prompts and their positions."""
    return {layer: one.mean(0) for layer, one in _outputs_of(model, tokens, layers, mean=True).items()}


def with_outputs(layer: int, heads: Sequence[int], outputs: Float[Tensor, "head d_value"]) -> HookList:
    """z of these heads <- one vector a head, at every position of every prompt."""

    def edit(z: Tensor, hook: object) -> Tensor:
        of_heads = z.flatten(2).unflatten(-1, (len(outputs), -1)).clone()
        of_heads[:, :, list(heads)] = outputs[list(heads)].to(of_heads)
        return of_heads.reshape(z.shape)

    return [(_name_of(layer), edit)]


def _with_drawn_outputs(
    layer: int, heads: Sequence[int], drawn: Float[Tensor, "prompt pos head d_value"], seed: int
) -> HookList:
    """z of these heads <- those at the same positions of a drawn prompt, one for each row of a pass."""

    def edit(z: Tensor, hook: object) -> Tensor:
        n_prompts, length, n_heads, _ = drawn.shape
        if z.shape[1] > length:
            raise InputError(f"resample: {z.shape[1]} tokens, and the reference's prompts have {length}; give length=")
        of_heads = z.flatten(2).unflatten(-1, (n_heads, -1)).clone()
        rows = torch.randint(n_prompts, (len(z),), generator=torch.Generator().manual_seed(seed))
        of_heads[:, :, list(heads)] = drawn[rows][:, : z.shape[1], list(heads)].to(of_heads)
        return of_heads.reshape(z.shape)

    return [(_name_of(layer), edit)]
