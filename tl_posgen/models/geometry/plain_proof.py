"""Proofs of the whole model: a TransformerBridge computes what the Hugging Face model does that it is made of, and a
step with the KV cache what a pass over the whole prompt does."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tl_posgen.models.backends.backend import Backend, Origin
from tl_posgen.models.backends.bridge import original
from tl_posgen.models.conversion.files import first_line
from tl_posgen.models.conversion.quiet import quiet
from tl_posgen.models.layers.fused import FAILURES
from tl_posgen.models.same_logits import centred, how_they_differ, rounding_remedy

N_TOKENS = 48

_N_CACHED = 24


def difference(backend: Backend, origin: Origin) -> str:
    """Say how the model's logits differ from those of the plain Hugging Face model; "" if they do not.

    A bridge of the same config with random weights tells a fault of the bridge from weights that the user changed.
    """
    reason = compare_with_hf(backend)
    if reason == "":
        return ""
    with quiet(seed=0):
        made, _ = backend.random_init(origin, moved=True)
    of_others = compare_with_hf(type(backend)(made))
    return (reason or of_others) if of_others else ""


def compare_with_hf(backend: Backend) -> str | None:
    """Say how the model's logits of a few random tokens differ from the plain Hugging Face model's, the user's hooks
    left out; "" if they do not, None where the plain model no longer has the same weights."""
    model, tokens = backend.model, backend.some_tokens(N_TOKENS)
    dtype = next(model.parameters()).dtype
    with torch.no_grad(), without_hooks(model):
        with backend.plain() as plain:
            if plain is None:
                return None if backend.wraps_another else ""
            try:
                expected = centred(plain(tokens).logits)
            except RuntimeError as error:
                return f"the Hugging Face model that it wraps cannot run ({first_line(error)})"
        differ = how_they_differ(centred(model(tokens)), expected, dtype)
        if not differ:
            return ""
        parting = _where_streams_part(backend, tokens)
    return (
        f"{parting}this TransformerBridge computes something else than the Hugging Face model that it wraps: logits "
        f"{differ}. What it shows is not that model's attention; report the difference to TransformerLens."
        + rounding_remedy(dtype)
    )


def _where_streams_part(backend: Backend, tokens: Int[Tensor, "1 pos"]) -> str:
    """Name the first layer whose output differs from the plain model's; "" where that cannot be said."""
    model, streams = backend.model, []
    for passing in (model, None):
        entering: list[Tensor] = []
        with ExitStack() as stack:
            run = passing or stack.enter_context(backend.plain())
            for block in model.blocks:
                module = block if passing else original(block)
                handle = module.register_forward_hook(
                    lambda _module, _args, out, seen=entering: seen.append(first_output(out))
                )
                stack.callback(handle.remove)
            run(tokens)
        streams.append(entering)
    for layer, (own, expected) in enumerate(zip(*streams, strict=False)):
        if own.shape != expected.shape:
            return ""
        if not float((own - expected).abs().max()) <= 1e-3 * float(expected.abs().max()):
            return f"layer {layer}: the residual streams part here; "
    return ""


def first_output(output: Any) -> Tensor:
    """Return a block's output, without what else it hands over."""
    return (output[0] if isinstance(output, tuple) else output).detach().float()


@contextmanager
def without_hooks(model: Any) -> Iterator[None]:
    """While the block runs, no hook of TransformerLens is called."""
    points = list({id(point): point for point in model.hook_dict.values()}.values())
    lists = [hooks for point in points for hooks in (point._forward_hooks, point._forward_pre_hooks)]
    held = [dict(hooks) for hooks in lists]
    try:
        for hooks in lists:
            hooks.clear()
        yield
    finally:
        for hooks, before in zip(lists, held, strict=True):
            hooks.update(before)


def cached_difference(backend: Backend) -> str:
    """Say how the last block's output at the last of a few random tokens differs where the tokens before it come from
    the KV cache, the user's hooks left out; "" if it does not. Compared as in `logit_error`."""
    model, tokens, outputs = backend.model, backend.some_tokens(_N_CACHED), list[Tensor]()

    def keep(_module: Any, _args: Any, output: Any) -> None:
        outputs.append(first_output(output)[:, -1:])

    with torch.no_grad(), without_hooks(model):
        handle = model.blocks[-1].register_forward_hook(keep)
        try:
            model(tokens, return_type=None, **backend.options(tokens))
            context = backend.context()
            for part in (tokens[:, :-1], tokens[:, -1:]):
                context.read(part)
        except (*FAILURES, KeyError) as error:
            return f"it cannot run with one ({first_line(error)})"
        finally:
            handle.remove()
    differ = how_they_differ(outputs[-1], outputs[0], next(model.parameters()).dtype)
    return f"outputs {differ}" if differ else ""
