"""Proof of a model's KV cache: a step that reads it computes what a pass over the whole prompt does."""

from typing import Any

import torch
from torch import Tensor

from tl_posgen.models.backends.backend import Backend
from tl_posgen.models.conversion.source import first_line
from tl_posgen.models.geometry.plain_proof import first_output, without_hooks
from tl_posgen.models.layers.fused import FAILURES
from tl_posgen.models.same_logits import how_they_differ

N_TOKENS = 24


def cached_difference(backend: Backend) -> str:
    """Say how the last block's output at the last of a few random tokens differs where the tokens before it come from
    the KV cache, the user's hooks left out; "" if it does not. Compared as in `logit_error`."""
    model, tokens, outputs = backend.model, backend.some_tokens(N_TOKENS), list[Tensor]()

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
