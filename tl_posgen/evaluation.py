"""Tasks of lm-evaluation-harness under interventions: an `LM` of the harness over a TransformerLens model.

Needs the extra `eval`: pip install "tl-posgen[eval]". Nothing here imports the harness or TransformerLens before use.
"""

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.arithmetic import double, summable
from tl_posgen.core.options import fits
from tl_posgen.errors import InputError, PosgenError
from tl_posgen.hooks.given import check_hooks
from tl_posgen.models.loading.load import open_model
from tl_posgen.models.loss import Hooks, logits_of
from tl_posgen.models.model import Model
from tl_posgen.models.tokens import bos_of
from tl_posgen.models.wrapped import wrap

if TYPE_CHECKING:
    from lm_eval.api.model import TemplateLM
else:
    TemplateLM = object  # the harness' own class joins the bases when the first LensLM is made, see __new__

Encoded: TypeAlias = tuple[tuple[str, str] | None, list[int], list[int]]  # the request, its context, its continuation

Row = TypeVar("Row")

OF_SAMPLING = ("do_sample", "temperature", "top_k", "top_p")  # greedy decoding does not read them
logger = logging.getLogger(__name__)


class MissingExtraError(PosgenError, ImportError):
    """Missing package that only one part of tl_posgen needs."""


class LensLM(TemplateLM):
    """ln p(continuation | context) = sum_t ln p(x_t | x_<t) of a hooked model, for the tasks of lm-evaluation-harness.

    `lm_eval.simple_evaluate(model=LensLM(model, fwd_hooks=hooks), tasks=[...])`. Tokens, truncation and windows are
    those of the harness' own `HFLM`: context and continuation are encoded together, spaces at the end of a context
    belong to the continuation, an empty context is the BOS (else EOS) token, and inputs longer than the model's
    context are cut on the left, with a warning in the log. `loglikelihood_rolling` also predicts a text's BOS token,
    as `HFLM` does. Interventions refuse padding and KV caches: a forward pass holds whole sequences of one length.

    Args:
        model: a HookedTransformer, a TransformerBridge, or a name or directory for `load_model`. Its
            cfg.default_prepend_bos decides whether a text begins with the BOS token.
        fwd_hooks: [(name, fn), ...], added for every forward pass and removed after it; or a function from the tokens
            [batch, pos] of a pass to such a list, for interventions made for one length. With batch_size=1 it may
            depend on the prompt.
        batch_size: sequences in a forward pass, at most.
        max_length: the context in tokens; the model's own if left out.
        progress: show progress bars.

    Raises:
        MissingExtraError: lm-evaluation-harness is not installed.
        InputError: a model without a tokenizer, a hook that the model does not have or never calls, a batch size or
            context below 1; later: a continuation that is empty or longer than the context, a generation that is not
            greedy.

    The harness' `use_cache` knows a response by its request alone: give each intervention a cache of its own.

    Example:
        >>> import pytest, torch
        >>> Instance = pytest.importorskip("lm_eval.api.instance").Instance  # the harness makes them of its tasks
        >>> requests = [Instance("loglikelihood", {}, ("I do not", " know"), 0)]
        >>> def silence(z, hook):
        ...     return torch.zeros_like(z)
        >>> hooks = [(f"blocks.{layer}.attn.hook_z", silence) for layer in range(4)]
        >>> for fwd_hooks in ([], hooks):
        ...     [(log_p, is_greedy)] = LensLM("mini", fwd_hooks, progress=False).loglikelihood(requests)
        ...     print(f"{log_p:.2f}", is_greedy)
        -1.36 True
        -6.35 False
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> "LensLM":
        return super().__new__(with_harness_base(cls))

    def __init__(
        self,
        model: Model | str | os.PathLike,
        fwd_hooks: Hooks | Callable[[Int[Tensor, "batch pos"]], Hooks] = (),
        *,
        batch_size: int = 8,
        max_length: int | None = None,
        progress: bool = True,
    ):
        super().__init__()
        for name, value in (("batch_size", batch_size), ("max_length", max_length)):
            if value is not None and not (fits(value, int) and value >= 1):
                raise InputError(f"{name} {value!r}: an integer is needed, 1 at least")
        self.model = open_model(model)
        self.bos = bos_of(self.model)
        self.tokenizer = self.model.tokenizer
        self._places: list[Any] = []  # where hooks were that were checked last
        self.fwd_hooks = fwd_hooks if callable(fwd_hooks) else self.checked(fwd_hooks)
        self.batch_size = batch_size
        self.max_length = max_length or self.model.cfg.n_ctx
        if max_length is not None:
            wrap(self.model).require_length(max_length)
        self.max_gen_toks = 256  # as HFLM, for tasks that do not say
        self.progress = progress
        self._device = next(self.model.parameters()).device

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Return the token that stands for an empty context."""
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return token
        raise InputError("an empty context needs a BOS or EOS token, and this model's tokenizer has neither")

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Return the description that the harness writes with its results, with the names of the hooks."""
        hooks = self.fwd_hooks
        names = [getattr(hooks, "__qualname__", repr(hooks))] if callable(hooks) else [str(name) for name, _ in hooks]
        return {
            "model_name": wrap(self.model).origin.name,
            "model_num_parameters": sum(weights.numel() for weights in self.model.parameters()),
            "model_dtype": str(next(self.model.parameters()).dtype),
            "fwd_hooks": names,
        }

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return token ids, with BOS if that is the model's convention; never a second BOS (chats begin with one)."""
        if add_special_tokens is None:
            add_special_tokens = not (self.bos and string.startswith(self.tokenizer.bos_token))
        ids = self.tokenizer(string, add_special_tokens=False, verbose=False).input_ids
        return [*self.bos, *ids] if add_special_tokens else ids

    def logits(self, rows: Sequence[Sequence[int]]) -> Float[Tensor, "batch pos vocabulary"]:
        """Return the logits of token ids of one length, under the hooks."""
        tokens = torch.tensor(rows, device=self._device)
        hooks = self.checked(self.fwd_hooks(tokens)) if callable(self.fwd_hooks) else self.fwd_hooks
        with torch.no_grad(), self.model.hooks(fwd_hooks=hooks):
            return logits_of(self.model, tokens)

    def checked(self, hooks: Hooks) -> Hooks:
        """Return the hooks; InputError for what is none or does not fire, looked at where their points are others than
        before."""
        hooks = list(hooks) if isinstance(hooks, Iterable) else hooks
        places = [pair[:1] if isinstance(pair, tuple) else pair for pair in hooks] if isinstance(hooks, list) else None
        if places != self._places:
            check_hooks(self.model, hooks)
            self._places = places or []
        return hooks

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """ln p(continuation | context) of each request, and whether greedy decoding would write the continuation."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or not self.progress)

    def _loglikelihood_tokens(
        self, requests: Sequence[Encoded], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return `loglikelihood` from token ids. Requests with the same input share a forward pass."""
        asking: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, (text, context, continuation) in enumerate(requests):
            context = context or [self.prefix_token_id]  # a context of spaces, which belong to the continuation
            if not 1 <= len(continuation) <= self.max_length:
                before, words = text or ("", "")
                raise InputError(
                    f"the continuation {words[:40]!r} of {before[-40:]!r} has {len(continuation)} tokens of its own, "
                    f"and 1 to {self.max_length} can be scored; leave this document out"
                )
            asking[tuple((context + continuation)[-self.max_length - 1 : -1])].append(number)
        self.warn_cut(sum(len(ids) + len(more) > self.max_length + 1 for _, ids, more in requests), len(requests))
        results: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(requests), desc="log-likelihood", unit="request", disable=disable_tqdm) as bar:
            for rows in batches(asking, len, self.batch_size):
                for row, logits in zip(rows, self.logits(rows), strict=True):
                    for number in asking[row]:
                        text, _, continuation = requests[number]
                        results[number] = score(logits, continuation)
                        if text is not None:  # a window of a longer text is not a request
                            self.cache_hook.add_partial("loglikelihood", text, results[number])
                    bar.update(len(asking[row]))
        return [results[number] for number in range(len(requests))]

    def warn_cut(self, n_cut: int, n: int) -> None:
        if n_cut:
            place = f"{n_cut} of {n} requests do not fit into {self.max_length} tokens"
            logger.warning("%s: their contexts are cut on the left, as HFLM does", place)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """sum_t ln p(x_t | the tokens before t that fit) of each text, in the harness' windows."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows: list[Encoded] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(*request.args)
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm or not self.progress)
        for number, (log_p, _) in zip(owners, scores, strict=True):
            totals[number] += log_p
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return greedy continuations up to a stop, without a KV cache: a pass over the sequence for each token."""
        drafts = [self.draft(*request.args) for request in requests]
        self.warn_cut(sum(draft.cut for draft in drafts), len(drafts))
        with tqdm(total=len(drafts), desc="texts", unit="text", disable=disable_tqdm or not self.progress) as bar:
            for batch in batches(drafts, lambda draft: len(draft.ids), self.batch_size):
                while batch:  # sequences of one length; finished ones leave
                    logits = self.logits([draft.ids + draft.written for draft in batch])
                    for draft, token in zip(batch, logits[:, -1].argmax(-1).tolist(), strict=True):
                        draft.written.append(token)
                        if self.finished(draft):
                            self.cache_hook.add_partial("generate_until", draft.request, self.text_of(draft))
                            bar.update()
                    batch = [draft for draft in batch if not self.finished(draft)]
        return [self.text_of(draft) for draft in drafts]

    def draft(self, context: str, gen_kwargs: dict[str, Any]) -> "Draft":
        """Return the draft of one request of `generate_until`; refuse other than greedy decoding."""
        from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

        options: dict[str, Any] = {**normalize_gen_kwargs(gen_kwargs, self.max_gen_toks)}
        stops = handle_stop_sequences(options.pop("until"), self.tokenizer.eos_token)
        limit, beams = options.pop("max_gen_toks"), options.pop("num_beams", 1)
        if options["do_sample"] or beams != 1 or set(options) - set(OF_SAMPLING):
            raise InputError(
                f"LensLM decodes greedily, up to a stop or max_gen_toks, and this task asks for {gen_kwargs}; change "
                'that with simple_evaluate(gen_kwargs={"do_sample": False, ...}), or leave the task out'
            )
        if not 1 <= limit < self.max_length:
            raise InputError(f"max_gen_toks {limit}: 1 to {self.max_length - 1} fit into this model's context")
        ids, room = self.tok_encode(context) or [self.prefix_token_id], self.max_length - limit
        return Draft((context, gen_kwargs), ids[-room:], len(ids) > room, [stop for stop in stops if stop], limit)

    def finished(self, draft: "Draft") -> bool:
        text = self.tokenizer.decode(draft.written, skip_special_tokens=False)  # a stop may be a special token
        return len(draft.written) == draft.limit or any(stop in text for stop in draft.stops)

    def text_of(self, draft: "Draft") -> str:
        from lm_eval.models.utils import postprocess_generated_text

        text = self.tokenizer.decode(draft.written, skip_special_tokens=True)
        return postprocess_generated_text(text, draft.stops, None)


@dataclass
class Draft:
    """Unfinished continuation of a request: context ids (perhaps cut), stops, limit, and the tokens written so far."""

    request: tuple[str, dict[str, Any]]
    ids: list[int]
    cut: bool
    stops: list[str]
    limit: int
    written: list[int] = field(default_factory=list)


@cache
def with_harness_base(cls: type) -> type:
    """Return `cls` as a subclass of the harness' TemplateLM, which is imported only here."""
    try:
        from lm_eval.api.model import TemplateLM
    except ImportError as error:
        raise MissingExtraError(
            f'LensLM needs lm-evaluation-harness ({error}): pip install "tl-posgen[eval]"'
        ) from error
    return cls if issubclass(cls, TemplateLM) else type(cls.__name__, (cls, TemplateLM), {"__module__": cls.__module__})


def batches(rows: Iterable[Row], length: Callable[[Row], int], size: int) -> Iterator[list[Row]]:
    """Yield lists of at most `size` rows of one length, the longest first."""
    for _, group in groupby(sorted(rows, key=length, reverse=True), key=length):
        same = list(group)
        yield from (same[start : start + size] for start in range(0, len(same), size))


def score(logits: Float[Tensor, "pos vocabulary"], continuation: Sequence[int]) -> tuple[float, bool]:
    """(sum_t ln p(x_t), whether every x_t is the most likely token) of the last tokens of a sequence, float64."""
    logits = summable(logits[-len(continuation) :])
    targets = torch.tensor(continuation, device=logits.device)
    log_p = double(logits).log_softmax(-1).gather(-1, targets[:, None])
    return float(log_p.sum()), bool((logits.argmax(-1) == targets).all())
