"""One forward pass as it is captured: the parts of the layer that is running, until they are complete."""

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
from tl_posgen.models.geometry.pass_proof import as_streamed, as_used, checked_rows, is_softmax, require_softmax
from tl_posgen.models.geometry.probe import Probed
from tl_posgen.models.geometry.proof import tolerance
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.fused import LayerAttention
from tl_posgen.models.layers.projections import attention_inputs, projection_weights, prove_projections
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Heads, Layers, select_heads
from tl_posgen.models.wrapped import wrap
from tl_posgen.rope.rotation import at_least_float32

Consumer = Callable[[LayerCapture], None]
FORMED = ("attn_scores", "pattern")  # by a pass that is not streamed
EDITED = ("q", "k", "q_normed", "k_normed", "rot_q", "rot_k", "attn_scores")  # where hooks may change scores


class PassCapture:
    """The parts of the layer that is running, until they are complete."""

    def __init__(
        self,
        model: Model,
        consumer: Consumer,
        needs: Iterable[str],
        layers: Layers,
        heads: Heads,
        tokens: Int[Tensor, "batch pos"] | None,
        *,
        in_order: bool = False,
    ):
        """
        Args:
            in_order: whether other hooks may stand behind these, and change what these have seen.
        """
        self.needs, self.wrapped = checked_needs(needs, (*PARTS, "inputs")), wrap(model)
        self.wrapped.require_evaluation()
        self.heads = select_heads(model, layers, heads)
        self.layers = [self.wrapped.layer(index) for index in self.heads]
        self.consumer, self.tokens, self.in_order = consumer, tokens, in_order
        self.pad = PadToken.of(self.wrapped.model.tokenizer)
        self.parts: dict[str, Tensor] = {}
        self.waiting: list[tuple[LayerCapture, Tensor]] = []  # for the pattern, with the scores of some rows
        self.spans: list[slice] = []
        self.fired: set[int] = set()  # layers that were handed over
        self.tokens_of_pass = False  # whether tokens are those that the pass embeds
        self.embedded: Tensor | None = None  # by the pass that begins
        self.owner = self.wrapped.owner
        self.stream = None if in_order else self.wrapped.streamed.by
        self.prompts_before = self.prompts_seen = 0
        self.thread = threading.get_ident()
        self.names = frozenset(self.takes())
        self.points = model.hook_dict  # which a bridge works out anew whenever it is asked
        if "inputs" in self.needs:
            for probed in self.layers:  # refused before anything runs
                projection_weights(self.wrapped.attention(probed.geometry.layer), probed.geometry)

    def takes(self) -> dict[str, Callable[[Tensor], None]]:
        """Hook name -> what to do with its tensor."""
        wanted = self.needs | {"resid", "q", "k", "attn_scores"} | ({"pattern"} if self.in_order else set())
        parts = [part for part in PARTS if part in wanted and not (self.stream and part in FORMED)]
        return {probed.sites.names[part]: partial(self.take, probed, part) for probed in self.layers for part in parts}

    @contextmanager
    def attached(self) -> Iterator[None]:
        model, asked = self.wrapped.model, self.heads if "inputs" in self.needs else ()
        attentions = {layer: self.wrapped.attention(layer) for layer in asked}
        inputs = attention_inputs(attentions, self.wrapped.backend.attention_input, partial(self.keep, "inputs"))
        with self.wrapped.exclusive(self.wrapped.owner), inputs, watching(model, self.takes()):
            if self.stream is None:
                yield
                return
            self.stream.listeners.append(self.take_streamed)
            try:
                yield
            finally:
                self.stream.listeners.remove(self.take_streamed)

    def see_tokens(self, _embedding: torch.nn.Module, args: tuple) -> None:
        # TransformerLens' run_with_hooks calls forward directly, so only the embedding is sure to be called
        seen = args[0] if args and isinstance(args[0], Tensor) else None
        self.embedded = seen if seen is not None and seen.ndim == 2 and not seen.is_floating_point() else None

    def keep(self, part: str, value: Tensor) -> None:
        self.parts[part] = value.detach()

    def take(self, probed: Probed, part: str, value: Tensor) -> None:
        if not self.in_order and self.wrapped.owner not in (self, self.owner):
            return  # a pass that this package makes for itself
        self.wrapped.require_shown(probed)
        if part == "resid":  # the first to fire: what an interrupted pass left behind goes
            self.parts.clear()
            self.waiting.clear()
            if self.tokens_of_pass and probed is self.layers[0]:
                self.tokens, self.embedded = self.embedded, None
            if self.in_order:
                self.thread = threading.get_ident()
        if threading.get_ident() != self.thread:
            raise InputError(
                "this model runs in two threads while it is captured in one; give each thread its own model"
            )
        self.keep(part, value)
        if part == "attn_scores":
            self.take_scores(probed)
        if part == "pattern":
            self.take_pattern(probed)
        if part == ("pattern" if self.takes_pattern else "attn_scores"):
            self.hand_over(probed)

    def hand_over(self, probed: Probed) -> None:
        captures = [capture for capture, _ in self.waiting]
        self.waiting.clear()
        self.fired.add(probed.geometry.layer)
        for capture in captures:
            self.consumer(capture)

    def take_streamed(self, layer: int, done: LayerAttention) -> None:
        """A layer of a streamed pass; one whose scores are hooked has formed them."""
        if layer not in self.heads or self.wrapped.owner not in (self, self.owner):
            return
        require_whole(layer, done.q.shape[2], done.k.shape[2])
        probed = self.wrapped.layer(layer)
        if done.scores is None or done.pattern is None:
            self.take_scores(probed, done)
        else:
            self.parts["attn_scores"] = done.scores.detach()
            self.take_scores(probed)
            if self.takes_pattern:
                self.parts["pattern"] = done.pattern.detach()
                self.take_pattern(probed)
        self.hand_over(probed)

    def take_scores(self, probed: Probed, streamed: LayerAttention | None = None) -> None:
        """Everything but the pattern is there: cut to the text, and compared with the scores that the pass used."""
        with torch.no_grad():  # norms of queries and keys have weights
            parts = {part: probed.sites.read(part, value) for part, value in self.parts.items()}
        self.parts.clear()
        batch, _, length, _ = parts["q"].shape
        layer, dtype, scores = probed.geometry.layer, parts["q"].dtype, parts.get("attn_scores")
        tokens = self.tokens if self.tokens is not None and self.tokens.shape == (batch, length) else None
        others = scores is not None and self.others_hook(layer)
        if scores is not None:
            spans = spans_of_scores(probed.geometry, plain_scores(scores[:, 0], dtype))
        else:
            assert streamed is not None
            padding = streamed.mask.padding
            spans = [slice(0, length)] * batch if padding is None else spans_of_mask(padding)
        if others:
            require_padding(spans, length, tokens, self.pad)
        spans = spans_of_pass(spans, length, tokens, self.pad)
        if probed is self.layers[0]:
            self.wrapped.require_evaluation()
            self.spans, self.prompts_before, self.prompts_seen = spans, self.prompts_seen, self.prompts_seen + batch
        elif spans != self.spans:
            raise InputError(
                f"layer {layer} masks other tokens for every query than layer {self.layers[0].geometry.layer}, so it "
                "is no padding; let a hook that hides a token leave it visible to itself"
            )
        projections = self.wrapped.projections(layer) if "inputs" in self.needs else None
        for row, span in enumerate(spans):
            prompt = {part: value[row] for part, value in parts.items()}
            ids = None if tokens is None else tokens[row]
            needs = self.needs - ({"pattern"} if streamed is None else set(FORMED))
            capture = layer_capture(probed, prompt, self.heads[layer], needs, self.prompts_before + row, ids, span)
            used = capture.q.new_zeros(0, 0, 0) if scores is None else cut("attn_scores", scores[row], span)
            if streamed is None:
                capture = as_used(capture, used, dtype, every_row=others)
            else:
                capture = as_streamed(capture, *streamed.met(row, span, capture.heads), dtype)
            if projections is not None and capture.inputs is not None:
                allowed = tolerance(dtype)
                prove_projections(projections, capture.inputs, capture.q, capture.k, capture.heads, allowed)
                capture.projections = projections
            formed = self.takes_pattern and streamed is None
            rows = plain_scores(used[:, self.pattern_rows(capture)], dtype) if formed else used[:, :0]
            self.waiting.append((capture, rows))

    @property
    def takes_pattern(self) -> bool:
        return self.in_order or "pattern" in self.needs

    def pattern_rows(self, capture: LayerCapture) -> Tensor:
        """The rows of the pattern that are held against the scores: all where hooks may have edited some."""
        name = f"blocks.{capture.layer}.attn.hook_pattern"
        point = self.points.get(name)
        alone = point is not None and len(point._forward_hooks) <= (name in self.names)
        return checked_rows(capture.length) if alone else torch.arange(capture.length, device="cpu")

    def others_hook(self, layer: int) -> bool:
        """Whether hooks other than these are at work in the attention of this layer."""
        names = [f"blocks.{layer}.attn.hook_{name}" for name in EDITED]
        points = {name: self.points[name] for name in names if name in self.points}
        return any(len(point._forward_hooks) > (name in self.names) for name, point in points.items())

    def take_pattern(self, probed: Probed) -> None:
        pattern = probed.sites.read("pattern", self.parts.pop("pattern"))
        for row, ((capture, rows), span) in enumerate(zip(self.waiting, self.spans, strict=True)):
            own = cut("pattern", pattern[row], span)
            compared = own[:, self.pattern_rows(capture)]
            if self.in_order:
                require_softmax(probed.geometry, rows, compared, own.dtype)
            else:
                capture.edited_pattern = not is_softmax(rows, compared, own.dtype, sinks=probed.geometry.sinks)
            if "pattern" in self.needs:
                capture.pattern = at_least_float32(own if len(own) == len(capture.heads) else own[list(capture.heads)])


@contextmanager
def watching(model: Model, takes: Mapping[str, Callable[[Tensor], None]]) -> Iterator[None]:
    """While the block runs, each function is given what its hook point ends up with: after all other hooks, whenever
    those are added, and whatever `model.reset_hooks()` removes."""
    with ExitStack() as stack:
        for name, point in hook_points(model, takes).items():
            handle = point.register_forward_hook(partial(show, takes[name]))
            stack.callback(handle.remove)
            stack.callback(point.register_forward_pre_hook(partial(move_last, handle.id)).remove)
        yield


def show(take: Callable[[Tensor], None], point: Any, _args: tuple, value: Tensor) -> None:
    take(value if point.hook_conversion is None else point.hook_conversion.convert(value))


def move_last(own: int, point: Any, _args: tuple) -> None:
    point._forward_hooks.move_to_end(own)
