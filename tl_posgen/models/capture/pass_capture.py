"""The capture of forward passes: the parts of the layer that is running, until they are complete and proved."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tl_posgen.errors import InputError
from tl_posgen.models.backends.sites import PARTS, checked_needs, hook_points, plain_scores
from tl_posgen.models.capture.padding import (
    PadToken,
    require_padding,
    require_whole,
    spans_of_mask,
    spans_of_pass,
    spans_of_scores,
)
from tl_posgen.models.capture.reading import cut, layer_capture
from tl_posgen.models.geometry.pass_proof import as_proved, as_streamed, checked_rows, is_softmax
from tl_posgen.models.geometry.probe import Probed
from tl_posgen.models.geometry.proof import tolerance
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.fused import LayerAttention
from tl_posgen.models.layers.projections import attention_inputs, projection_weights, prove_projections
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Heads, Layers, select_heads
from tl_posgen.models.wrapped import WrappedModel
from tl_posgen.rope.rotation import at_least_float32

Consumer = Callable[[LayerCapture], None]
FORMED = ("attn_scores", "pattern")  # by a pass that is not streamed
EDITED = ("q", "k", "q_normed", "k_normed", "rot_q", "rot_k", "attn_scores")  # where hooks may change scores


class PassCapture:
    """Gathers the parts of a layer as its hooks fire, cuts them to the text, proves them, and calls the consumer.

    Args:
        tokens: the ids that will be run; where left out, those that each pass embeds.

    For the other arguments see `tl_posgen.models.capture.capturing.capturing`.
    """

    def __init__(
        self,
        wrapped: WrappedModel,
        consumer: Consumer,
        needs: Iterable[str],
        layers: Layers,
        heads: Heads,
        tokens: Int[Tensor, "batch pos"] | None = None,
    ):
        self.wrapped, self.consumer, self.needs = wrapped, consumer, checked_needs(needs, (*PARTS, "inputs"))
        wrapped.require_evaluation()
        self.heads = select_heads(wrapped.model, layers, heads)
        self.layers = [wrapped.layer(index) for index in self.heads]
        self.tokens, self.embeds_tokens = tokens, tokens is None
        self.embedded: Tensor | None = None  # by the pass that begins
        self.pad = PadToken.of_tokenizer(wrapped.model.tokenizer)
        self.parts: dict[str, Tensor] = {}
        self.waiting: list[tuple[LayerCapture, Tensor]] = []  # for the pattern, with the scores of some rows
        self.spans: list[slice] = []
        self.fired: set[int] = set()  # layers that were handed over
        self.owner, self.stream = wrapped.owner, wrapped.streamed.by
        self.prompts_before = self.prompts_seen = 0
        self.thread = threading.get_ident()
        self.receivers = self.receivers_by_name()
        self.points = wrapped.model.hook_dict  # which a bridge works out anew whenever it is asked
        if "inputs" in self.needs:
            for probed in self.layers:  # refused before anything runs
                projection_weights(wrapped.attention(probed.geometry.layer), probed.geometry)

    def receivers_by_name(self) -> dict[str, Callable[[Tensor], None]]:
        """Return what is called with the tensor of each hook."""
        wanted = self.needs | {"resid", "q", "k", "attn_scores"}
        parts = [part for part in PARTS if part in wanted and not (self.stream and part in FORMED)]
        return {
            probed.sites.names[part]: partial(self.receive, probed, part) for probed in self.layers for part in parts
        }

    @contextmanager
    def attached(self) -> Iterator[None]:
        """While the block runs, forward passes are captured."""
        wrapped = self.wrapped
        attentions = {layer: wrapped.attention(layer) for layer in (self.heads if "inputs" in self.needs else ())}
        with ExitStack() as stack:
            if self.embeds_tokens:
                stack.callback(wrapped.embedding.register_forward_pre_hook(self.receive_tokens).remove)
            stack.enter_context(wrapped.exclusive(wrapped.owner))
            receive = partial(self.store, "inputs")
            stack.enter_context(attention_inputs(attentions, wrapped.backend.attention_input, receive))
            stack.enter_context(watching(wrapped.model, self.receivers))
            if self.stream is not None:
                self.stream.listeners.append(self.receive_streamed)
                stack.callback(self.stream.listeners.remove, self.receive_streamed)
            yield

    def receive_tokens(self, _embedding: torch.nn.Module, args: tuple) -> None:
        # TransformerLens' run_with_hooks calls forward directly, so only the embedding is sure to be called
        seen = args[0] if args and isinstance(args[0], Tensor) else None
        self.embedded = seen if seen is not None and seen.ndim == 2 and not seen.is_floating_point() else None

    def is_own_pass(self) -> bool:
        """Tell passes that are to be captured from those that this package makes for itself."""
        return self.wrapped.owner in (self, self.owner)

    def store(self, part: str, value: Tensor) -> None:
        self.parts[part] = value.detach()

    def receive(self, probed: Probed, part: str, value: Tensor) -> None:
        if not self.is_own_pass():
            return
        self.wrapped.require_shown(probed)
        if part == "resid":  # the first to fire: what an interrupted pass left behind goes
            self.parts.clear()
            self.waiting.clear()
            if self.embeds_tokens and probed is self.layers[0]:
                self.tokens, self.embedded = self.embedded, None
        if threading.get_ident() != self.thread:
            raise InputError(
                "this model runs in two threads while it is captured in one; give each thread its own model"
            )
        self.store(part, value)
        if part == "attn_scores":
            self.add_scores(probed)
        if part == "pattern":
            self.add_pattern(probed)
        if part == ("pattern" if "pattern" in self.needs else "attn_scores"):
            self.hand_over(probed)

    def receive_streamed(self, layer: int, done: LayerAttention) -> None:
        """Take a layer of a streamed pass; one whose scores are hooked has formed them."""
        if layer not in self.heads or not self.is_own_pass():
            return
        require_whole(layer, done.q.shape[2], done.k.shape[2])
        probed = self.wrapped.layer(layer)
        if done.scores is None or done.pattern is None:
            self.add_scores(probed, done)
        else:
            self.store("attn_scores", done.scores)
            self.add_scores(probed)
            if "pattern" in self.needs:
                self.store("pattern", done.pattern)
                self.add_pattern(probed)
        self.hand_over(probed)

    def hand_over(self, probed: Probed) -> None:
        captures = [capture for capture, _ in self.waiting]
        self.waiting.clear()
        self.fired.add(probed.geometry.layer)
        for capture in captures:
            self.consumer(capture)

    def add_scores(self, probed: Probed, streamed: LayerAttention | None = None) -> None:
        """Make captures of everything but the pattern, and compare them with the scores that the pass used."""
        with torch.no_grad():  # norms of queries and keys have weights
            parts = {part: probed.sites.read(part, value) for part, value in self.parts.items()}
        self.parts.clear()
        layer, (batch, _, length, _), dtype = probed.geometry.layer, parts["q"].shape, parts["q"].dtype
        tokens = self.tokens if self.tokens is not None and self.tokens.shape == (batch, length) else None
        others = streamed is None and self.others_hook(layer)
        self.find_text(probed, parts, streamed, tokens, others)
        projections = self.wrapped.projections(layer) if "inputs" in self.needs else None
        needs = self.needs - ({"pattern"} if streamed is None else set(FORMED))
        for row, span in enumerate(self.spans):
            prompt = {part: value[row] for part, value in parts.items()}
            ids, number = None if tokens is None else tokens[row], self.prompts_before + row
            capture = layer_capture(probed, prompt, self.heads[layer], needs, number, ids, span)
            rows = capture.q[:, :0]
            if streamed is None:
                used = cut("attn_scores", prompt["attn_scores"], span)
                capture = as_proved(capture, used, None, dtype, every_row=others)
                if "pattern" in self.needs:
                    rows = plain_scores(used[:, self.pattern_rows(capture)], dtype)
            else:
                capture = as_streamed(capture, *streamed.of_prompt(row, span, capture.heads), dtype)
            if projections is not None and capture.inputs is not None:
                allowed = tolerance(dtype)
                prove_projections(projections, capture.inputs, capture.q, capture.k, capture.heads, allowed)
                capture.projections = projections
            self.waiting.append((capture, rows))

    def find_text(
        self,
        probed: Probed,
        parts: Mapping[str, Tensor],
        streamed: LayerAttention | None,
        tokens: Int[Tensor, "batch pos"] | None,
        others: bool,
    ) -> None:
        """Find where the text of every prompt stands, which must be the same in all layers of a pass.

        Args:
            others: whether a hook may have hidden tokens.
        """
        batch, _, length, _ = parts["q"].shape
        if streamed is None:
            spans = spans_of_scores(probed.geometry, plain_scores(parts["attn_scores"][:, 0], parts["q"].dtype))
        elif streamed.mask.padding is None:
            spans = [slice(0, length)] * batch
        else:
            spans = spans_of_mask(streamed.mask.padding)
        if others:
            require_padding(spans, length, tokens, self.pad)
        spans = spans_of_pass(spans, length, tokens, self.pad)
        if probed is self.layers[0]:
            self.wrapped.require_evaluation()
            self.spans, self.prompts_before, self.prompts_seen = spans, self.prompts_seen, self.prompts_seen + batch
        elif spans != self.spans:
            raise InputError(
                f"layer {probed.geometry.layer} masks other tokens for every query than layer "
                f"{self.layers[0].geometry.layer}, so it is no padding; let a hook that hides a token leave it visible "
                "to itself"
            )

    def add_pattern(self, probed: Probed) -> None:
        pattern = probed.sites.read("pattern", self.parts.pop("pattern"))
        for row, ((capture, rows), span) in enumerate(zip(self.waiting, self.spans, strict=True)):
            own = cut("pattern", pattern[row], span)
            compared = own[:, self.pattern_rows(capture)]
            capture.edited_pattern = not is_softmax(rows, compared, own.dtype, sinks=probed.geometry.sinks)
            capture.pattern = at_least_float32(own if len(own) == len(capture.heads) else own[list(capture.heads)])

    def pattern_rows(self, capture: LayerCapture) -> Tensor:
        """Return the rows of the pattern that are compared with the scores: all where hooks may have edited some."""
        alone = not self.is_hooked(f"blocks.{capture.layer}.attn.hook_pattern")
        return checked_rows(capture.length) if alone else torch.arange(capture.length, device="cpu")

    def others_hook(self, layer: int) -> bool:
        """Tell whether hooks other than these are at work before the scores of this layer."""
        return any(self.is_hooked(f"blocks.{layer}.attn.hook_{name}") for name in EDITED)

    def is_hooked(self, name: str) -> bool:
        """Tell whether a hook point has hooks besides this capture's own."""
        return name in self.points and len(self.points[name]._forward_hooks) > (name in self.receivers)


@contextmanager
def watching(model: Model, receivers: Mapping[str, Callable[[Tensor], None]]) -> Iterator[None]:
    """While the block runs, each function is given what its hook point ends up with: after all other hooks, whenever
    those are added, and whatever `model.reset_hooks()` removes."""
    with ExitStack() as stack:
        for name, point in hook_points(model, receivers).items():
            handle = point.register_forward_hook(partial(hand_value, receivers[name]))
            stack.callback(handle.remove)
            stack.callback(point.register_forward_pre_hook(partial(move_last, handle.id)).remove)
        yield


def hand_value(receive: Callable[[Tensor], None], point: Any, _args: tuple, value: Tensor) -> None:
    receive(value if point.hook_conversion is None else point.hook_conversion.convert(value))


def move_last(own: int, point: Any, _args: tuple) -> None:
    point._forward_hooks.move_to_end(own)
