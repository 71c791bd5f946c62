"""How far predictions under hooks are from those of the unchanged model: the loss, and the KL between them."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.models.loss import judged, logits_of
from tl_posgen.models.model import Model
from tl_posgen.models.wrapped import WrappedModel, wrap


def losses_and_kl(
    model: Model | WrappedModel, tokens: Int[Tensor, "prompt pos"], hooks: Sequence[Any]
) -> tuple[Float[Tensor, "prompt target"], Float[Tensor, " prompt"]]:
    """Return the loss of every token under hooks, and each prompt's mean KL(unchanged || hooked) of the next token, in
    nats; the model runs twice on every prompt."""
    wrapped = wrap(model)
    losses, kl = [], []
    with wrapped.exclusive(wrapped.owner), torch.no_grad():
        for row in tokens.to(wrapped.device).split(1):
            wanted = log_predictions(wrapped, row)
            with wrapped.model.hooks(fwd_hooks=list(hooks)):
                logits = logits_of(wrapped, row)
            losses.append(judged(logits, row).cpu())
            kl.append(divergence(wanted, logits).mean(1).cpu())
    return torch.cat(losses), torch.cat(kl)


def log_predictions(
    model: Model | WrappedModel, tokens: Int[Tensor, "prompt pos"]
) -> Float[Tensor, "prompt pos vocabulary"]:
    """Return ln p of every next token, nothing changed, in float64 where the device has it."""
    with torch.no_grad():
        return double(logits_of(model, tokens)).log_softmax(-1)


def divergence(
    wanted: Float[Tensor, "prompt pos vocabulary"], logits: Float[Tensor, "prompt pos vocabulary"]
) -> Float[Tensor, "prompt pos"]:
    """KL(wanted || softmax(logits)) of every next token, wanted being logarithms, in nats."""
    return (wanted.exp() * (wanted - double(logits).log_softmax(-1))).sum(-1)
