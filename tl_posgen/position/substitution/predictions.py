"""Compare predictions under hooks with those of the unchanged model: the loss, and the KL between them."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.hooks.replace_scores import HookList
from tl_posgen.models.loss import judged, logits_of
from tl_posgen.models.model import Model
from tl_posgen.models.wrapped import WrappedModel, wrap


def losses_and_kl(
    model: Model | WrappedModel, tokens: Int[Tensor, "prompt pos"], conditions: Sequence[HookList]
) -> tuple[Float[Tensor, "condition prompt target"], Float[Tensor, "condition prompt"]]:
    """Return the loss of every token under the hooks of each condition, and each prompt's mean KL(unchanged || hooked)
    of the next token, in nats; the unchanged model, which also is a condition without hooks, runs once."""
    wrapped = wrap(model)
    losses, kl = [], []
    with wrapped.exclusive(wrapped.owner), torch.no_grad():
        for row in tokens.to(wrapped.device).split(1):
            unchanged = logits_of(wrapped, row)
            wanted = double(unchanged).log_softmax(-1)
            for hooks in conditions:
                with wrapped.model.hooks(fwd_hooks=hooks):
                    logits = logits_of(wrapped, row) if hooks else unchanged
                losses.append(judged(logits, row).cpu())
                kl.append(divergence(wanted, logits).mean(1).cpu())
    by_prompt = (-1, len(conditions))
    losses, kl = (torch.cat(one).unflatten(0, by_prompt).transpose(0, 1) for one in (losses, kl))
    return losses, kl


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
