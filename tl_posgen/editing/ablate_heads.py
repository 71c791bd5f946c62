"""Heads ablated: their outputs at zero, at their mean, or those of another prompt."""

import hashlib
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.editing.draws import generator_at
from tl_posgen.editing.printed_hooks import HookList, printing_call
from tl_posgen.errors import MOST_SEEDS, InputError, UnsupportedModelError, check_choice, check_seed, check_whole
from tl_posgen.models.capture.padding import require_places
from tl_posgen.models.loss import token_losses
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Heads, select_heads
from tl_posgen.models.session import Session, session_of
from tl_posgen.models.tokens import bundled_text, check_numbers, spread, to_prompts

How = Literal["zero", "mean", "resample"]
LENGTH, N_PROMPTS = 256, 8  # of the reference, where they are left out


@printing_call
def ablate_heads(
    model: Model | Session,
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
        heads: "L3H1", "3.1" or (3, 1), several in a list, or a frame with the columns layer and head.
        how: "zero", "mean", or "resample": what the head wrote at the same position of a prompt of the reference, drawn
            for each prompt that runs, by its tokens: the same for all heads, and again in every pass.
        reference: prompts as `analyze` takes them; the bundled book if left out. "zero" reads none.
        length: tokens of its prompts; 256, or what the model takes, if left out.
        n_prompts: at most so many of them, spread over it.
        seed: of the prompts that "resample" draws.

    Returns:
        Hooks for `model.hooks(fwd_hooks=...)` or `run_with_hooks`, alone or joined to others.

    Raises:
        InputError: no such head, another `how`, unusable prompts; later, in the forward pass of "resample": prompts
            longer than those that it draws from, a single token, as in steps with a KV cache, a pass that begins
            behind the first layer.
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
    check_choice("how", how, get_args(How))
    seed = check_seed(seed)
    session = session_of(model)
    selected = select_heads(session, heads=heads)
    n_heads = session.n_heads
    outputs = {layer: torch.zeros(1, 1, n_heads[layer], 1) for layer in selected}  # [prompt, pos, head, d_value]
    if how != "zero":
        check_whole("ablate_heads", 1, n_prompts=n_prompts)
        check_numbers(session, length, n_prompts)
        length = session.limit.cut(LENGTH) if length is None else length
        text = bundled_text() if reference is None else reference
        tokens = torch.stack(list(spread(to_prompts(session, text, length), n_prompts)))
        recorded: dict[int, list[Tensor]] = {layer: [] for layer in selected}

        def add(layer: int, z: Tensor, hook: object) -> None:
            of_heads = z.detach().flatten(2).unflatten(-1, (n_heads[layer], -1))
            recorded[layer].append((double(of_heads).mean(1, keepdim=True) if how == "mean" else of_heads).cpu())

        token_losses(session, tokens, [(_name_of(layer), partial(add, layer)) for layer in selected])
        if silent := [layer for layer, seen in recorded.items() if not seen]:
            name = _name_of(silent[0])
            raise UnsupportedModelError(f"layer {silent[0]}: {name} did not fire, so no head can be ablated")
        outputs = {layer: torch.cat(seen) for layer, seen in recorded.items()}
        if how == "mean":
            outputs = {layer: z.mean(0, keepdim=True) for layer, z in outputs.items()}

    seeds: list[int] = []  # of the prompts of the pass that entered the first layer last
    replaced: set[str] = set()  # the points at which it was given them

    def see(entering: Tensor, hook: object) -> None:
        rows = entering.detach().float().cpu().numpy()
        replaced.clear()
        seeds[:] = [int.from_bytes(hashlib.sha256(row.tobytes()).digest()[:4], "big") for row in rows]

    def edit(layer: int, z: Tensor, hook: Any) -> Tensor:
        chosen, written = selected[layer], outputs[layer]
        if how == "resample":
            require_places(layer, z.shape[1])
            if z.shape[1] > written.shape[1]:
                raise InputError(
                    f"resample: {z.shape[1]} tokens, and the reference's prompts have {written.shape[1]}; give length="
                )
            if len(seeds) != len(z) or hook.name in replaced:
                raise InputError(
                    "resample: a pass that begins behind the first layer, as with start_at_layer; run whole prompts"
                )
            replaced.add(hook.name)
            generators = [generator_at((seed + of_prompt) % MOST_SEEDS) for of_prompt in seeds]
            drawn = [int(torch.randint(len(written), (), generator=generator)) for generator in generators]
            written = written[drawn, : z.shape[1]]
        of_heads = z.flatten(2).unflatten(-1, (n_heads[layer], -1)).clone()
        of_heads[:, :, chosen] = written[:, :, chosen].to(of_heads)
        return of_heads.reshape(z.shape)

    # HookedTransformer.generate embeds without hook_embed
    seeing: HookList = [("blocks.0.hook_resid_pre", see)] if how == "resample" else []
    return [*seeing, *((_name_of(layer), partial(edit, layer)) for layer in selected)]


def _name_of(layer: int) -> str:
    """Return the name of the hook point of the heads' outputs."""
    return f"blocks.{layer}.attn.hook_z"
