"""Capture: q, k and what else is needed of a forward pass, handed to a consumer layer by layer.

with capturing(model, consumer):        # every pass inside the block, with whatever hooks are at work
    model(tokens)

run_capture(model, tokens, consumer)    # one pass, no further than the last layer asked for
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.capture.padding import NO_PADDING, REMEDY, pad_token, require_whole, text_of_pass
from tl_posgen.models.geometry.probe import Probed
from tl_posgen.models.geometry.proof import as_streamed, layer_capture, tolerance, verify_capture
from tl_posgen.models.layers.capture import FORMED, PARTS, QUERIES_AND_KEYS, EditedCapture, LayerCapture
from tl_posgen.models.layers.fused import LayerAttention
from tl_posgen.models.layers.projections import projection_weights, prove_projections
from tl_posgen.models.memory import trim
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Heads, Layers, select_heads
from tl_posgen.models.session import UNPADDED, Session, session_of
from tl_posgen.models.streaming.stream import require_fits, streaming, streaming_by_policy
from tl_posgen.progress import count_pass

Consumer = Callable[[LayerCapture], None]
TRIMMED = 2.0  # seconds after which what layers left in the heap goes back to the system: half of the peak otherwise
_EDITED = (*QUERIES_AND_KEYS, "attn_scores")  # where hooks may change scores


@contextmanager
def capturing(
    model: Model | Session,
    consumer: Consumer,
    needs: Iterable[str] = frozenset(),
    layers: Layers = None,
    heads: Heads = None,
    *,
    prove: bool = True,
) -> Iterator[None]:
    """While the block runs, every forward pass calls `consumer(LayerCapture)` once per layer and prompt.

    In a batch, the consumer is shown every prompt's layer 0, then every prompt's layer 1, and so on;
    `LayerCapture.prompt` tells them apart, and goes on counting over forward passes. Captured is what a layer ends up
    with after all hooks, whenever these were added.

    Args:
        needs: what to capture beyond q and k, of {"v", "attn_scores", "pattern", "resid", "inputs"}; "inputs" are what
            enters W_Q and W_K, with the proved projections.
        layers, heads: which; all if left out. Heads are "L3H1", "3.1" or (3, 1), several in a list, or a frame with the
            columns layer and head.
        prove: False leaves out the comparison with the scores that the pass used, for a consumer of the pattern alone
            where hooks of ours have replaced the scores.

    Raises:
        InputError: a layer, a head or a need that does not exist; with needs={"inputs"}, a model that splits its
            attention's input by head; later, in the forward pass: a KV cache, padding that cannot be told from text.
        UnsupportedModelError: a chosen layer whose scores cannot be recomputed from its q and k; with
            needs={"inputs"}, one whose queries or keys are something else than an affine map of one input, with a norm
            or clipping after it (adapters, quantised weights).
    """
    session = session_of(model)
    with ExitStack() as stack:
        if session.needs_streaming:
            stack.enter_context(streaming(session))
        stack.enter_context(_PassCapture(session, consumer, needs, layers, heads, prove=prove).attached())
        yield


def run_capture(
    model: Model | Session,
    tokens: Int[Tensor, "batch pos"],
    consumer: Consumer,
    needs: Iterable[str] = frozenset(),
    layers: Layers = None,
    heads: Heads = None,
) -> Float[Tensor, "batch pos d_vocab"] | None:
    """Run the model on `tokens` without gradients, and capture it on the way.

    Args:
        tokens: prompts; padding behind shorter ones is left out where it can be told from text.
        needs: as in `capturing`, and "logits": what the model predicts.

    Returns:
        The logits where they are needed. Without them the pass ends with the last chosen layer, and gives None.

    For the other arguments and errors see `capturing`. Also InputError: a prompt longer than the model takes.

    Example:
        >>> from tl_posgen import load_model
        >>> model, shapes = load_model("mini"), []
        >>> tokens = torch.arange(9)[None]
        >>> run_capture(model, tokens, lambda c: shapes.append((c.layer, tuple(c.q.shape))), heads=[(1, 0), (2, 3)])
        >>> shapes
        [(1, (1, 9, 32)), (2, (1, 9, 32))]
        >>> logits = run_capture(model, tokens, lambda capture: None, needs=frozenset({"logits"}))
        >>> torch.equal(logits, model(tokens))
        True
    """
    session, needs = session_of(model), checked_needs(needs, (*PARTS, "inputs", "logits"))
    tokens = tokens.to(session.device)
    require_fits(session, tokens.shape[1])
    with streaming_by_policy(session, tokens.shape[1]):
        capture = _PassCapture(session, consumer, needs - {"logits"}, layers, heads, tokens)
        if len(tokens) == 1:  # one prompt is padded to nothing, whatever its tokens
            capture.pad = NO_PADDING
        options: dict[str, Any] = {"return_type": "logits"}
        if "logits" not in needs:
            options = {"return_type": None, "stop_at_layer": max(capture.heads) + 1}
        count_pass(len(tokens))
        ending = session.backend.ending_behind(options.get("stop_at_layer"))
        with torch.no_grad(), session.exclusive(capture), capture.attached(), ending:
            predicted = session.backend.model(tokens, **options, **session.backend.options(tokens))
    if silent := [layer for layer in capture.heads if layer not in capture.fired]:
        raise UnsupportedModelError(
            f"layer {silent[0]}: the hooks of its attention did not fire, so nothing of it was captured; was its "
            "forward function replaced?"
        )
    return predicted if "logits" in needs else None


def checked_needs(needs: Iterable[str], available: Sequence[str], remedy: str = "") -> frozenset[str]:
    """Return the parts of a capture that are asked for; InputError for one that is not `available`."""
    if isinstance(needs, str):
        raise InputError(f"needs={needs!r}: give a set of names, such as needs={{{needs!r}}}")
    if unknown := sorted(map(str, set(needs) - set(available))):
        raise InputError(f"cannot capture {', '.join(unknown)}; choose from {', '.join(available)}{remedy}")
    return frozenset(needs)


class _PassCapture:
    """Gathers the parts of a layer as its hooks fire, cuts them to the text, proves them, and calls the consumer.

    `tokens` are the ids that will be run; where left out, those that each pass embeds. For the other arguments see
    `tl_posgen.models.capture.capturing.capturing`.
    """

    def __init__(
        self,
        session: Session,
        consumer: Consumer,
        needs: Iterable[str],
        layers: Layers,
        heads: Heads,
        tokens: Int[Tensor, "batch pos"] | None = None,
        *,
        prove: bool = True,
    ):
        self.prove = prove
        self.session, self.consumer, self.needs = session, consumer, checked_needs(needs, (*PARTS, "inputs"))
        session.require_evaluation()
        self.heads = select_heads(session, layers, heads)
        self.layers = [session.layer(index) for index in self.heads]
        self.tokens, self.embeds_tokens = tokens, tokens is None
        self.embedded: Tensor | None = None  # by the pass that begins
        self.pad = pad_token(session.model.tokenizer)
        self.parts: dict[str, Tensor] = {}
        self.last = "pattern" if "pattern" in self.needs else "attn_scores"  # to fire of what is captured of a layer
        self.mask: Any = None  # what the first layer's attention is given as one
        self.shape, self.spans = (0, 0), list[slice]()  # of the pass, and the text of each prompt
        self.n_passed = 0  # chosen layers that have passed, silent ones too
        self.fired: set[int] = set()  # layers that were handed over
        self.owner, self.stream = session.owner, session.streamed.by
        self.prompts_before = self.prompts_seen = 0
        self.thread = threading.get_ident()
        wanted = self.needs | {"resid", "q", "k", "attn_scores"}
        parts = [part for part in PARTS if part in wanted and not (self.stream and part in FORMED)]
        self.receivers = {
            probed.names[part]: partial(self.receive, probed, part) for probed in self.layers for part in parts
        }
        self.points = session.model.hook_dict  # which a bridge works out anew whenever it is asked
        if "inputs" in self.needs:
            for probed in self.layers:  # refused before anything runs
                projection_weights(session.attention(probed.geometry.layer), probed.geometry)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """While the block runs, forward passes are captured."""
        session = self.session
        with ExitStack() as stack:
            if self.embeds_tokens:
                first = session.attention(self.layers[0].geometry.layer)
                stack.callback(session.embedding.register_forward_pre_hook(self.receive_tokens).remove)
                stack.callback(first.register_forward_pre_hook(self.receive_mask, with_kwargs=True).remove)
            stack.enter_context(session.exclusive(session.owner))
            for layer in self.heads if "inputs" in self.needs else ():
                receive = partial(self.receive_inputs, layer)
                handle = session.attention(layer).register_forward_pre_hook(receive, with_kwargs=True)
                stack.callback(handle.remove)
            stack.enter_context(watching(session.model, self.receivers))
            if self.stream is not None:
                self.stream.listeners.append(self.receive_streamed)
                stack.callback(self.stream.listeners.remove, self.receive_streamed)
            yield

    def receive_tokens(self, _embedding: torch.nn.Module, args: tuple) -> None:
        # TransformerLens' run_with_hooks calls forward directly, so only the embedding is sure to be called
        seen = args[0] if args and isinstance(args[0], Tensor) else None
        self.embedded = seen if seen is not None and seen.ndim == 2 and not seen.is_floating_point() else None

    def receive_mask(self, _attention: torch.nn.Module, _args: tuple, kwargs: Mapping[str, Any]) -> None:
        if self.is_own_pass():
            self.mask = kwargs.get("attention_mask")

    def receive_inputs(self, layer: int, _attention: Any, args: tuple, kwargs: Mapping[str, Any]) -> None:
        # asked of the module, as hook_normalized is before the norm's weight in some norms and after it in others
        x = kwargs.get(self.session.backend.attention_input, args[0] if args else None)
        if not isinstance(x, Tensor) or x.ndim != 3:
            raise InputError(
                f"layer {layer}: its attention is not given one input for all heads; "
                "call model.set_use_split_qkv_input(False) and model.set_use_attn_in(False)"
            )
        self.parts["inputs"] = x.detach()

    def is_own_pass(self) -> bool:
        """Tell passes that are to be captured from those that this package makes for itself."""
        return self.session.owner in (self, self.owner, UNPADDED)

    def receive(self, probed: Probed, part: str, value: Tensor) -> None:
        if not self.is_own_pass():
            return
        self.session.require_shown(probed)
        if part == "resid":  # the first to fire: what an interrupted pass left behind goes
            self.parts.clear()
            if self.embeds_tokens and probed is self.layers[0]:
                self.tokens, self.embedded = self.embedded, None
                if self.session.backend.start_of_pass() is not None:
                    self.tokens = None  # those in the place of the residual stream that was given
        if threading.get_ident() != self.thread:
            raise InputError(
                "this model runs in two threads while it is captured in one; give each thread its own model"
            )
        self.parts[part] = value.detach()
        if part == self.last:
            self.hand_over(probed)

    def receive_streamed(self, layer: int, done: LayerAttention) -> None:
        """Take a layer of a streamed pass; one whose scores are hooked has formed them."""
        if layer not in self.heads or not self.is_own_pass():
            return
        require_whole(layer, done.q.shape[2], done.k.shape[2])
        formed = {"attn_scores": done.scores, "pattern": done.pattern}
        wanted = self.needs | {"attn_scores"}
        self.parts |= {part: x.detach() for part, x in formed.items() if x is not None and part in wanted}
        self.hand_over(self.session.layer(layer), done)

    def hand_over(self, probed: Probed, streamed: LayerAttention | None = None) -> None:
        """Make a capture of each prompt, proved by the scores that the pass used, and give them to the consumer; of no
        layer before the one at which the pass starts."""
        if probed.geometry.layer < (self.session.backend.start_of_pass() or 0):
            self.parts.clear()
            return
        with torch.no_grad():  # norms of queries and keys have weights
            parts = {part: probed.read(part, value) for part, value in self.parts.items()}
        self.parts.clear()
        layer, (batch, _, length, _) = probed.geometry.layer, parts["q"].shape
        if "attn_scores" in parts:
            require_whole(layer, *parts["attn_scores"].shape[2:])
            streamed = None
        tokens = self.tokens if self.tokens is not None and self.tokens.shape == (batch, length) else None
        if probed is self.layers[0]:
            self.session.require_evaluation()
            self.prompts_before, self.prompts_seen = self.prompts_seen, self.prompts_seen + batch
            mask, self.mask = self.mask, None
            self.shape, self.spans = (batch, length), text_of_pass(mask, batch, length, tokens, self.pad)
        place = list(self.heads).index(layer)
        if self.shape != (batch, length) or 0 < place < self.n_passed:
            first, why = self.layers[0].geometry.layer, ""
            if any(self.shape) and self.shape != (batch, length):
                why = (
                    f"{batch} prompts of {length} tokens, where layer {first} had {self.shape[0]} of {self.shape[1]}: "
                    "a hook cut the residual stream, or "
                )
            raise InputError(f"layer {layer}: {why}the pass skipped layer {first}, which begins it")
        self.n_passed = place + 1
        edited = {
            "all_scores": any(self.is_hooked(layer, name) for name in _EDITED),
            "all_patterns": self.is_hooked(layer, "pattern"),
        }
        captures, sinks = [], self.session.sinks(layer)
        for row, span in enumerate(self.spans):
            prompt_parts = {part: value[row] for part, value in parts.items()}
            needs = self.needs & prompt_parts.keys()
            ids = None if tokens is None else tokens[row]
            capture = layer_capture(
                probed.geometry, prompt_parts, self.heads[layer], needs, self.prompts_before + row, ids, span, sinks
            )
            if streamed is not None:
                capture = as_streamed(capture, streamed, row, span, prompt_parts["q"].dtype)
            elif self.prove:
                capture = proved_capture(capture, prompt_parts, span, **edited)
            else:
                capture.proved = False
            captures.append(capture)
        projections = self.session.projections(layer) if "inputs" in self.needs else None
        for capture in captures:
            if projections is not None and capture.inputs is not None:
                allowed = tolerance(parts["q"].dtype)
                prove_projections(projections, capture.inputs, capture.q, capture.k, capture.heads, allowed)
                capture.projections = projections
        self.fired.add(layer)
        for capture in captures:
            self.consumer(capture)
        trim(every=TRIMMED)

    def is_hooked(self, layer: int, name: str) -> bool:
        """Tell whether a hook point of attention has hooks besides this capture's own."""
        name = f"blocks.{layer}.attn.hook_{name}"
        return name in self.points and len(self.points[name]._forward_hooks) > (name in self.receivers)


def proved_capture(capture: LayerCapture, parts: Mapping[str, Tensor], span: slice, **edited: bool) -> LayerCapture:
    """Return what `verify_capture` makes of a prompt's capture; InputError where scores are NaN, or padding before the
    text is seen."""
    scores = parts.get("attn_scores")
    verified = verify_capture(capture, scores, parts.get("pattern"), parts["q"].dtype, span, **edited)
    if isinstance(verified, EditedCapture) and scores is not None and scores[:, span].isnan().any():
        raise InputError(
            f"layer {capture.layer}: scores are NaN; look for NaN in what hooks give, in the weights, and in padding "
            "that this model does not mask cleanly (run prompts one at a time)"
        )
    if span.start and isinstance(verified, EditedCapture) and verified.used is None:
        raise InputError(
            f"prompt {capture.prompt}: {span.start} tokens before its text are padding, which the pass did not mask or "
            f"a hook shows. {verified.why} To have it masked, {REMEDY}"
        )
    return verified


@contextmanager
def watching(model: Model, receivers: Mapping[str, Callable[[Tensor], None]]) -> Iterator[None]:
    """While the block runs, each function is given what its hook point ends up with: after all other hooks, whenever
    those are added, and whatever `model.reset_hooks()` removes."""

    def hand_over(receive: Callable[[Tensor], None], point: Any, _args: tuple, value: Tensor) -> None:
        receive(value if point.hook_conversion is None else point.hook_conversion.convert(value))

    def move_last(hook_id: int, point: Any, _args: tuple) -> None:
        point._forward_hooks.move_to_end(hook_id)

    points: Any = model.hook_dict
    if missing := [name for name in receivers if name not in points]:
        raise UnsupportedModelError(f"this model has no {missing[0]}, so its attention cannot be captured")
    with ExitStack() as stack:
        for name in receivers:
            point = points[name]
            handle = point.register_forward_hook(partial(hand_over, receivers[name]))
            stack.callback(handle.remove)
            stack.callback(point.register_forward_pre_hook(partial(move_last, handle.id)).remove)
        yield
