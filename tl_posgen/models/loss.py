"""Loss of a running model, token by token."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double, elements_at_once, row_ranges
from tl_posgen.models.model import Model
from tl_posgen.models.session import UNPADDED, Session, session_of
from tl_posgen.models.streaming.stream import prompts_at_once, streaming_by_policy
from tl_posgen.progress import count_pass

Hooks = Sequence[tuple[Any, Any]]
AT_ONCE = 2**21  # probabilities in memory


def token_losses(
    model: Model | Session, tokens: Int[Tensor, "prompt pos"], hooks: Hooks = ()
) -> Float[Tensor, "prompt target"]:
    """-ln p(token_{t+1} | tokens up to t) in nats for t = 0 .. pos - 2, float64, on the CPU, without gradients; or the
    metric that was chosen in its place.

    Args:
        tokens: prompts of one length, no padding.
        hooks: interventions at work meanwhile.

    Example:
        >>> import torch
        >>> from tl_posgen import load_model
        >>> token_losses(load_model("mini"), torch.arange(12)[None]).shape
        torch.Size([1, 11])
    """
    session = session_of(model)
    return torch.cat(
        run_prompts(session, tokens, lambda logits, batch: losses_of_logits(session, logits, batch).cpu(), hooks)
    )


def run_prompts(
    model: Model | Session,
    tokens: Int[Tensor, "prompt pos"],
    of_logits: Callable[[Tensor, Tensor], Any],
    hooks: Hooks = (),
    first: int = 0,
) -> list[Any]:
    """Return what `of_logits(logits [prompt, _, vocabulary], tokens [prompt, pos])` gives of every batch of the
    prompts, run under hooks without gradients.

    Args:
        tokens: prompts of one length, no padding.
        of_logits: is given logits and tokens of a batch, on the model's device.
        hooks: interventions at work meanwhile.
        first: the position of the first logits that are computed.

    Raises:
        InputError: active dropout, autocast, a model that is measured in another thread, a hook point that there is
            not.
        UnsupportedModelError: quantised weights.

    Example:
        >>> import torch
        >>> from tl_posgen import load_model
        >>> run_prompts(load_model("mini"), torch.arange(108).reshape(9, 12), lambda logits, _: logits.shape[:2])
        [torch.Size([8, 12]), torch.Size([1, 12])]
    """
    session, values = session_of(model), []
    session.require_evaluation()
    n, only = tokens.shape[1], [("unembed.hook_in", lambda x, hook: x[:, first:])] if first else []
    with session.exclusive(session.owner), torch.no_grad(), session.under(hooks):
        for batch in tokens.to(session.device).split(prompts_at_once(session, n)):
            owner = session.owner or UNPADDED
            with streaming_by_policy(session, n), session.under(only), session.exclusive(owner):
                count_pass(len(batch))
                logits = session.model(batch, return_type="logits", **session.backend.options(batch))
            values.append(of_logits(logits, batch))
            del logits  # before the next pass
    return values


def losses_of_logits(
    session: Session,
    logits: Float[Tensor, "prompt pos vocabulary"],
    tokens: Int[Tensor, "prompt pos"],
    normalisers: Float[Tensor, "prompt pos"] | None = None,
    *,
    per_token: bool = False,
) -> Float[Tensor, "prompt target"]:
    """-ln softmax(logits_t)[token_{t+1}], the cross-entropy of each next token; or the values of the metric that was
    chosen in its place. In float64.

    Args:
        normalisers: those of the logits, where they are known.
        per_token: refuse a metric of one value a prompt.
    """
    if (metric := session.choices.metric) is not None:
        return metric.values(logits, tokens, per_token=per_token)
    logits = logits[:, :-1]
    of_all = normalisers_of(logits) if normalisers is None else normalisers[:, :-1]
    return of_all - double(logits.gather(-1, tokens[:, 1:, None].to(logits.device)))[..., 0]


def divergence(
    logits: Float[Tensor, "prompt pos vocabulary"],
    other_logits: Float[Tensor, "prompt pos vocabulary"],
    normalisers: Float[Tensor, "prompt pos"],
    of_others: Float[Tensor, "prompt pos"],
) -> Float[Tensor, "prompt pos"]:
    """KL(p || q) = sum p (x - y) - ln Z + ln Z', with p = softmax(x) of the logits x and q = softmax(y) of others, and
    their `normalisers_of`. In float64."""
    divergences = []
    for (at, x), (_, y) in zip(_blocks(logits), _blocks(other_logits), strict=True):
        p = (x - normalisers[:, at, None]).exp_()
        divergences.append(torch.linalg.vecdot(p, x - y) - normalisers[:, at] + of_others[:, at])
    return torch.cat(divergences, 1)


def normalisers_of(logits: Float[Tensor, "prompt pos vocabulary"]) -> Float[Tensor, "prompt pos"]:
    """ln Z = ln sum e^x over the vocabulary, so that ln softmax(x) = x - ln Z. In float64."""
    return torch.cat([x.logsumexp(-1) for _, x in _blocks(logits)], 1)


def _blocks(
    logits: Float[Tensor, "prompt pos vocabulary"],
) -> Iterator[tuple[slice, Float[Tensor, "prompt _ vocabulary"]]]:
    """Yield (positions, logits) of one block of positions after the other.

    In float64, as the logits' own precision would round away small differences; in blocks, as more would be 8 times
    what the logits take, and five times as slow where its memory is new each time.
    """
    n, row = max(1, logits.shape[1]), len(logits) * logits.shape[2]
    for start, stop in row_ranges(n, row, elements_at_once(logits.device, AT_ONCE)):
        yield slice(start, stop), double(logits[:, start:stop])
