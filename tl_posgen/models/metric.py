"""A metric of the user's choice in the place of the loss, wherever a running model is judged."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.errors import InputError
from tl_posgen.models.session import session_of

Judge = Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True)
class Metric:
    """value(logits [prompt, pos, vocabulary], tokens [prompt, pos]) -> [prompt, pos - 1], one for each predicted token,
    or [prompt], one for the whole prompt.

    Attributes:
        name: in sentences and titles.
        value: differentiable or not; logits have the model's precision.

    Example:
        >>> def confidence(logits, tokens):
        ...     return logits[:, :-1].softmax(-1).amax(-1)
        >>> import torch
        >>> Metric("largest probability", confidence).values(torch.zeros(2, 5, 8), torch.zeros(2, 5, dtype=int))[0]
        tensor([0.1250, 0.1250, 0.1250, 0.1250], dtype=torch.float64)
    """

    name: str
    value: Judge

    def __call__(self, logits: Float[Tensor, "prompt pos vocabulary"], tokens: Any = None) -> Tensor:
        """Return the values that the metric gives of logits, such as those of `model(tokens)` or
        `model.run_with_hooks(tokens, fwd_hooks=...)`; differentiable where it is.

        Args:
            tokens: [prompt, pos], which were run; `logit_difference` reads none.
        """
        return self.value(logits, tokens)

    def values(
        self,
        logits: Float[Tensor, "prompt pos vocabulary"],
        tokens: Int[Tensor, "prompt pos"],
        *,
        per_token: bool = False,
    ) -> Float[Tensor, "prompt target"]:
        """Return the values in float64, that of a whole prompt at each of its targets.

        Args:
            per_token: refuse one value for a whole prompt, where parts of a prompt are told apart.

        Raises:
            InputError: values of another shape, not finite, or complex.
        """
        values, (n, length) = self.value(logits, tokens), tokens.shape
        if not isinstance(values, Tensor) or values.shape not in ((n,), (n, length - 1)):
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise InputError(
                f"metric {self.name!r}: gives {shape} for {n} prompts of {length} tokens; give [{n}] or "
                f"[{n}, {length - 1}], a value a prompt or a predicted token"
            )
        if per_token and values.ndim == 1:
            raise InputError(
                f"metric {self.name!r}: gives one value for a whole prompt, and parts of prompts are compared here; "
                f"give a function of one value a predicted token, [{n}, {length - 1}]"
            )
        if values.is_complex() or not bool(values.isfinite().all()):
            raise InputError(f"metric {self.name!r}: gives values that are not finite, or complex")
        return double(values.reshape(n, -1)).expand(n, length - 1)


def logit_difference(model: Any, right: str | int, wrong: str | int, *, at: int = -1) -> Metric:
    """logit(right) - logit(wrong) after the token at position `at`, one value a prompt: called on logits, or `metric=`.

    Args:
        right, wrong: ids, or text that is one token of the model's tokenizer, such as " Mary".

    Raises:
        InputError: text that is not one token; ids that the model lacks; one token twice; later, when the model is
            judged: a prompt without a position `at`.

    Example:
        >>> from tl_posgen import analyze, load_model
        >>> model = load_model("mini")
        >>> metric = logit_difference(model, " and", " the")
        >>> metric.name
        "logit of ' and' - ' the'"
        >>> metric(model(model.to_tokens("Down, down, down."))).shape  # of each prompt
        torch.Size([1])
        >>> report = analyze(model, "Down, down, down.", measures="loss", metric=metric, nulls=0, progress=False)
        >>> report["loss"].findings()[1].split(",")[0]
        "loss: in the place of the loss stands the metric logit of ' and' - ' the'"
    """
    if isinstance(at, bool) or not isinstance(at, Integral):
        raise InputError(f"at = {at!r}: give a whole number, the position of a token")
    tl_model, ids, names = session_of(model).model, list[int](), [right, wrong]
    for token in names:
        index: Any = token
        if isinstance(token, str):
            if tl_model.tokenizer is None:
                raise InputError(f"{token!r}: this model has no tokenizer; give token ids")
            token_ids = tl_model.tokenizer(token, add_special_tokens=False).input_ids
            if len(token_ids) != 1:
                raise InputError(
                    f"{token!r} is {len(token_ids)} tokens of this model; give text that is one token, or its id"
                )
            index = token_ids[0]
        if isinstance(index, bool) or not isinstance(index, Integral) or not 0 <= int(index) < tl_model.cfg.d_vocab:
            raise InputError(f"token {token!r}: this model has the ids 0 to {tl_model.cfg.d_vocab - 1}")
        ids.append(int(index))
    if ids[0] == ids[1]:
        raise InputError(f"metric: {right!r} and {wrong!r} are one token; their difference is always 0")

    def difference(logits: Tensor, tokens: Any) -> Tensor:
        if logits.ndim != 3:
            raise InputError(f"metric: logits of shape {list(logits.shape)}; give [prompt, pos, vocabulary]")
        if not -logits.shape[1] <= at < logits.shape[1]:
            raise InputError(f"metric: position {at} is outside a prompt of {logits.shape[1]} tokens")
        pair = double(logits[:, at, ids])
        return pair[:, 0] - pair[:, 1]

    plus, minus = (repr(name) if isinstance(name, str) else str(index) for name, index in zip(names, ids, strict=True))
    place = "" if at == -1 else f" at {at}"
    return Metric(f"logit of {plus} - {minus}{place}", difference)


def as_metric(metric: Any) -> Metric | None:
    """Return a metric, made of a function under its own name; InputError for anything else."""
    if metric is None or isinstance(metric, Metric):
        return metric
    if not callable(metric):
        raise InputError("metric: give a function of logits and tokens, or tl_posgen.logit_difference(model, ...)")
    try:
        inspect.signature(metric).bind("logits", "tokens")
    except TypeError as error:
        raise InputError(f"metric: give a function of logits and tokens; this one takes others ({error})") from None
    except ValueError:  # of a built-in function nothing is known
        pass
    value: Any = metric
    return Metric(str(getattr(value, "__name__", type(value).__name__)), value)
