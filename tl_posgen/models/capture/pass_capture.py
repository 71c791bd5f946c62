"""The capture of forward passes: the parts of the layer that is running, until they are complete and proved."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tl_posgen.errors import InputError
from tl_posgen.models.backends.sites import FORMED, PARTS, checked_needs, hook_points
from tl_posgen.models.capture.padding import (
    PadToken,
    mask_leaves,
    masked_spans,
    require_padding,
    require_whole,
    rows_of_spans,
    spans_of_pass,
)
from tl_posgen.models.capture.reading import layer_capture, proved_capture
from tl_posgen.models.conversion.weights import trim
from tl_posgen.models.geometry.pass_proof import as_streamed
from tl_posgen.models.geometry.probe import Probed
from tl_posgen.models.geometry.proof import tolerance
from tl_posgen.models.layers.capture import EditedCapture, LayerCapture
from tl_posgen.models.layers.fused import LayerAttention
from tl_posgen.models.layers.projections import attention_inputs, projection_weights, prove_projections
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Heads, Layers, select_heads
from tl_posgen.models.wrapped import WrappedModel

Consumer = Callable[[LayerCapture], None]
TRIMMED = 2.0  # seconds after which what layers left in the heap goes back to the system: half of the peak otherwise
EDITED = ("q", "k", "q_normed", "k_normed", "rot_q", "rot_k", "attn_scores")  # where hooks may change scores


class PassCapture:
    """Gathers the parts of a layer as its hooks fire, cuts them to the text, proves them, and calls the consumer.

    `tokens` are the ids that will be run; where left out, those that each pass embeds. For the other arguments see
    `tl_posgen.models.capture.capturing.capturing`.
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
        self.last = "pattern" if "pattern" in self.needs else "attn_scores"  # to fire of what is captured of a layer
        self.spans: list[slice] = []  # the text of each prompt
        self.seen: Tensor | None = None  # [batch, pos]: what the first layer's mask leaves of them
        self.fired: set[int] = set()  # layers that were handed over
        self.owner, self.stream = wrapped.owner, wrapped.streamed.by
        self.prompts_before = self.prompts_seen = 0
        self.thread = threading.get_ident()
        wanted = self.needs | {"resid", "q", "k", "attn_scores"}
        parts = [part for part in PARTS if part in wanted and not (self.stream and part in FORMED)]
        self.receivers = {
            probed.sites.names[part]: partial(self.receive, probed, part) for probed in self.layers for part in parts
        }
        self.points = wrapped.model.hook_dict  # which a bridge works out anew whenever it is asked
        if "inputs" in self.needs:
            for probed in self.layers:  # refused before anything runs
                projection_weights(wrapped.attention(probed.geometry.layer), probed.geometry)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """While the block runs, forward passes are captured."""
        wrapped = self.wrapped
        attentions = {layer: wrapped.attention(layer) for layer in (self.heads if "inputs" in self.needs else ())}
        with ExitStack() as stack:
            if self.embeds_tokens:
                stack.callback(wrapped.embedding.register_forward_pre_hook(self.receive_tokens).remove)
            stack.enter_context(wrapped.exclusive(wrapped.owner))
            receive = partial(self.parts.__setitem__, "inputs")
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

    def receive(self, probed: Probed, part: str, value: Tensor) -> None:
        if not self.is_own_pass():
            return
        self.wrapped.require_shown(probed)
        if part == "resid":  # the first to fire: what an interrupted pass left behind goes
            self.parts.clear()
            if self.embeds_tokens and probed is self.layers[0]:
                self.tokens, self.embedded = self.embedded, None
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
        self.hand_over(self.wrapped.layer(layer), done)

    def hand_over(self, probed: Probed, streamed: LayerAttention | None = None) -> None:
        """Make a capture of each prompt, proved by the scores that the pass used, and give them to the consumer."""
        with torch.no_grad():  # norms of queries and keys have weights
            parts = {part: probed.sites.read(part, value) for part, value in self.parts.items()}
        self.parts.clear()
        layer, (batch, _, length, _) = probed.geometry.layer, parts["q"].shape
        tokens = self.tokens if self.tokens is not None and self.tokens.shape == (batch, length) else None
        formed = "attn_scores" in parts
        edited = formed and any(self.is_hooked(layer, name) for name in EDITED)
        padding = None if streamed is None else streamed.mask.padding
        if first := probed is self.layers[0]:
            self.wrapped.require_evaluation()
            self.prompts_before, self.spans = self.prompts_seen, [slice(0, length)] * batch
            plain = batch == 1 and self.pad.index is None
            self.seen = rows_of_spans(self.spans, length, parts["q"].device) if plain else None
        find_text = partial(self.find_text, probed, parts, padding, tokens, edited)
        captures_of = partial(self.captures_of, probed, parts, tokens, streamed, edited)
        captures = None
        seen = self.seen if self.seen is not None and self.seen.shape == (batch, length) else None  # of this pass
        if formed and not edited and seen is not None:  # the mask is looked at together with the scores
            captures = captures_of(mask_leaves(probed.geometry, parts["attn_scores"], parts["q"].dtype, seen))
        if captures is None or any(isinstance(capture, EditedCapture) for capture in captures):
            find_text()
            captures = captures_of()
        projections = self.wrapped.projections(layer) if "inputs" in self.needs else None
        for capture in captures:
            if projections is not None and capture.inputs is not None:
                allowed = tolerance(parts["q"].dtype)
                prove_projections(projections, capture.inputs, capture.q, capture.k, capture.heads, allowed)
                capture.projections = projections
        if first:
            self.prompts_seen += batch
        self.fired.add(layer)
        for capture in captures:
            self.consumer(capture)
        trim(every=TRIMMED)

    def captures_of(
        self,
        probed: Probed,
        parts: Mapping[str, Tensor],
        tokens: Int[Tensor, "batch pos"] | None,
        streamed: LayerAttention | None,
        edited: bool,
        masked: Bool[Tensor, ""] | None = None,
    ) -> list[LayerCapture]:
        """Return the proved capture of each prompt; where `masked` is false, `EditedCapture`s."""
        layer, formed = probed.geometry.layer, "attn_scores" in parts
        needs = self.needs if formed else self.needs - set(FORMED)
        compared = {"all_scores": edited, "all_patterns": self.is_hooked(layer, "pattern"), "mask_holds": masked}
        captures = []
        for row, span in enumerate(self.spans):
            prompt = {part: value[row] for part, value in parts.items()}
            ids, number = None if tokens is None else tokens[row], self.prompts_before + row
            what = probed, prompt, self.heads[layer], needs, number, ids, span
            if formed or streamed is None:
                captures.append(proved_capture(*what, **compared))
            else:
                rotated = streamed.of_prompt(row, span, self.heads[layer])
                captures.append(as_streamed(layer_capture(*what), *rotated, parts["q"].dtype))
        return captures

    def find_text(
        self,
        probed: Probed,
        parts: Mapping[str, Tensor],
        padding: Bool[Tensor, "batch pos"] | None,
        tokens: Int[Tensor, "batch pos"] | None,
        edited: bool,
    ) -> None:
        """Keep where the text of every prompt stands, of what the layer's mask leaves; it must be the same in all
        layers. `edited`: a hook may have hidden tokens."""
        length = parts["q"].shape[2]
        spans = masked_spans(probed.geometry, parts, padding)
        if edited:
            require_padding(spans, length, tokens, self.pad)
        masked, spans = spans, spans_of_pass(spans, length, tokens, self.pad)
        if probed is self.layers[0]:
            self.spans, self.seen = spans, rows_of_spans(masked, length, parts["q"].device)
        elif spans != self.spans:
            raise InputError(
                f"layer {probed.geometry.layer} masks other tokens for every query than layer "
                f"{self.layers[0].geometry.layer}, so it is no padding; let a hook that hides a token leave it visible "
                "to itself"
            )

    def is_hooked(self, layer: int, name: str) -> bool:
        """Tell whether a hook point of attention has hooks besides this capture's own."""
        name = f"blocks.{layer}.attn.hook_{name}"
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
