"""Loss of a running model, token by token."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double, double_device
from tl_posgen.errors import InputError
from tl_posgen.models.model import Model
from tl_posgen.models.session import Session, session_of
from tl_posgen.models.streaming.stream import streaming_by_policy
from tl_posgen.models.tokens import to_prompts
from tl_posgen.progress import count_pass

Hooks = Sequence[tuple[Any, Any]]
AT_ONCE = 128  # positions whose probabilities are in memory


def token_losses(
    model: Model | Session, tokens: Int[Tensor, "prompt pos"], hooks: Hooks = (), *, batch: int = 8
) -> Float[Tensor, "prompt target"]:
    """-ln p(token_{t+1} | tokens up to t) in nats for t = 0 .. pos - 2, float64, on the CPU, without gradients; or the
    metric that was chosen in its place.

    Args:
        tokens: prompts of one length, no padding.
        hooks: interventions at work meanwhile.
        batch: prompts per forward pass.

    Example:
        >>> import torch
        >>> from tl_posgen import load_model
        >>> token_losses(load_model("mini"), torch.arange(12)[None]).shape
        torch.Size([1, 11])
    """
    session = session_of(model)
    session.require_evaluation()
    rows = []
    with session.exclusive(session.owner), torch.no_grad(), session.under(hooks):
        for some in tokens.to(session.device).split(batch):
            rows.append(judged(session, logits_of(session, some), some).cpu())
    return torch.cat(rows)


def logits_of(model: Model | Session, tokens: Int[Tensor, "prompt pos"]) -> Float[Tensor, "prompt pos vocabulary"]:
    """Return the logits of prompts of one length without padding, on the model's device."""
    session = session_of(model)
    with streaming_by_policy(session, tokens.shape[1]):
        count_pass(len(tokens))
        return session.model(tokens, return_type="logits", **session.backend.options(tokens))


def judged(
    session: Session, logits: Float[Tensor, "prompt pos vocabulary"], tokens: Int[Tensor, "prompt pos"]
) -> Float[Tensor, "prompt target"]:
    """-ln softmax(logits_t)[token_{t+1}], the cross-entropy of each next token; or the values of the metric that was
    chosen in its place. In float64."""
    if (metric := session.choices.metric) is not None:
        return metric.values(logits, tokens)
    # log_softmax in the logits' own precision would round away small differences, in float64 it takes 8 times theirs
    targets = tokens[:, 1:, None].to(double_device(logits.device))
    blocks = zip(logits[:, :-1].split(AT_ONCE, 1), targets.split(AT_ONCE, 1), strict=True)
    return torch.cat([-double(some).log_softmax(-1).gather(-1, next_)[..., 0] for some, next_ in blocks], 1)


def prompts_of_one_length(
    model: Model | Session, prompts: Any, length: int | None, n_prompts: int | None, *, consecutive: bool = False
) -> Int[Tensor, "prompt pos"]:
    """Return `to_prompts` within the training context, stacked; texts of different lengths need `length`."""
    session = session_of(model)
    if length is not None:
        require_context(session, length)
    rows = to_prompts(session, prompts, length, n_prompts, consecutive=consecutive)
    require_one_length(rows)
    require_context(session, len(rows[0]))
    return torch.stack(rows)


def require_one_length(rows: Sequence[Int[Tensor, " _"]]) -> None:
    """Refuse prompts of different lengths."""
    lengths = sorted({len(row) for row in rows})
    if len(lengths) > 1:
        raise InputError(f"prompts of {lengths[0]} to {lengths[-1]} tokens: give length= to cut them to one length")


def require_context(session: Session, length: int) -> None:
    """Refuse what is longer than the training context, even where the model could run it: the loss there answers
    another question, that of length_extrapolation."""
    n_ctx = session.model.cfg.n_ctx
    if length > n_ctx:
        raise InputError(
            f"prompts of {length} tokens: this model's training context has {n_ctx}; cut them with length=, "
            "or ask length_extrapolation what happens beyond"
        )
