"""Capture: hook functions that hand q, k and what else is needed to a consumer, layer by layer, in one forward pass.

    hooks = capture_hooks(model, consumer)  # [(hook_name, fn), ...], like any other TransformerLens hooks
    model.run_with_hooks(tokens, fwd_hooks=my_hooks + hooks)

    with capturing(model, consumer):        # the same, and the consumer is told the tokens
        model(tokens)

    run_capture(model, tokens, consumer)    # the same, no further than the last layer asked for

The hooks change nothing in the model. One layer is held at a time, and dropped when the consumer has seen it.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.capture import LayerCapture
from tl_posgen.models.fused import LayerAttention
from tl_posgen.models.model import Model
from tl_posgen.models.padding import PadToken, require_padding, spans_of_mask, spans_of_pass, spans_of_scores
from tl_posgen.models.pass_proof import as_streamed, as_used, checked_rows, is_softmax, require_softmax
from tl_posgen.models.probe_layers import Probed
from tl_posgen.models.projections import attention_inputs, projection_weights, prove_projections
from tl_posgen.models.proof import tolerance
from tl_posgen.models.reading import cut, layer_capture
from tl_posgen.models.selection import Heads, Layers, select_heads
from tl_posgen.models.sites import PARTS, checked_needs, hook_points, plain_scores
from tl_posgen.models.streaming import require_fits, streaming, streaming_if_chosen
from tl_posgen.models.wrapped import WrappedModel, wrap
from tl_posgen.rope.rotation import at_least_float32

Consumer = Callable[[LayerCapture], None]
FORMED = ("attn_scores", "pattern")  # by a pass that is not streamed
EDITED = ("q", "k", "q_normed", "k_normed", "rot_q", "rot_k", "attn_scores")  # where hooks may change scores
HookList = list[tuple[str, Callable[..., None]]]


def capture_hooks(
    model: Model,
    consumer: Consumer,
    needs: Iterable[str] = frozenset(),
    layers: Layers = None,
    heads: Heads = None,
    tokens: Int[Tensor, "batch pos"] | None = None,
) -> HookList:
    """TransformerLens hooks that call `consumer(LayerCapture)` once per layer and prompt, in the order of the layers.

    In a batch, the consumer is shown every prompt's layer 0, then every prompt's layer 1, and so on;
    `LayerCapture.prompt` tells them apart, and goes on counting over forward passes.

    Args:
        needs: what to capture beyond q and k, of {"v", "attn_scores", "pattern", "resid"}.
        layers, heads: which; all if left out. Heads are indices, meant in every chosen layer, or (layer, head) pairs,
            or a frame with the columns layer and head.
        tokens: the ids that the model will be run on, if `LayerCapture.tokens` is wanted (see also `capturing`).

    Raises:
        InputError: a layer, a head or a need that does not exist, or needs={"inputs"}, which no hook of TransformerLens
            carries; later, in the forward pass: a KV cache, padding that cannot be told from text, hooks behind these
            that edit scores or pattern.
        UnsupportedModelError: a chosen layer whose scores cannot be recomputed from its q and k.
    """
    if "inputs" in (needs := checked_needs(needs, (*PARTS, "inputs"))):
        raise InputError(
            "inputs: what enters W_Q and W_K shows at no hook of TransformerLens, so no list of hooks captures it; use "
            "`with tl_posgen.models.capturing(...)` or run_capture"
        )

    takes = _Capture(model, consumer, needs, layers, heads, tokens, in_order=True).takes()
    # edits of queries, keys, scores and pattern show in one another; those of what follows in nothing that is captured
    unseen = tuple(name for part, name in (("resid", "hook_resid_pre"), ("v", "hook_v")) if part in needs)
    return [(name, in_list(name, take, last=name.endswith(unseen))) for name, take in takes.items()]


def in_list(name: str, take: Callable[[Tensor], None], *, last: bool) -> Callable[..., None]:
    """A hook that shows a value to `take`; refused behind it are, where it must be the last, hooks of others."""

    def see(value: Tensor, hook: Any) -> None:
        if last:
            hooks = [getattr(one, "__name__", "") or repr(one) for one in hook._forward_hooks.values()]
            behind = hooks[hooks.index(repr(see)) + 1 :] if repr(see) in hooks else []
            if any(in_list.__name__ not in one and show.__name__ not in one for one in behind):
                raise InputError(
                    f"{name}: another hook stands behind that of capture_hooks, and could change what was captured; "
                    "let the capture hooks stand last in the list, or use `with tl_posgen.models.capturing(...)`"
                )
        take(value)

    return see


@contextmanager
def capturing(
    model: Model,
    consumer: Consumer,
    needs: Iterable[str] = frozenset(),
    layers: Layers = None,
    heads: Heads = None,
) -> Iterator[None]:
    """While the block runs, every forward pass of the model is captured.

    Args:
        needs: as in `capture_hooks`, and "inputs": what enters W_Q and W_K, and the proved projections.

    For the other arguments and errors see `capture_hooks`. Also UnsupportedModelError with needs={"inputs"}: a layer
    whose queries or keys are something else than an affine map of one input, with a norm or clipping after it
    (adapters, quantised weights); and InputError: a model that splits its attention's input by head.
    """
    with streaming(model) if wrap(model).needs_streaming else nullcontext():
        capture = _Capture(model, consumer, needs, layers, heads, None)
        capture.tokens_of_pass = True
        handle = capture.wrapped.embedding.register_forward_pre_hook(capture.see_tokens)
        try:
            with capture.attached():
                yield
        finally:
            handle.remove()


def run_capture(
    model: Model,
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
    wrapped, needs = wrap(model), checked_needs(needs, (*PARTS, "inputs", "logits"))
    wrapped.require_length(tokens.shape[1])
    tokens = tokens.to(next(model.parameters()).device)
    require_fits(model, tokens.shape[1])
    with streaming_if_chosen(model, tokens.shape[1]):
        return _run(wrapped, tokens, consumer, needs, layers, heads)


def _run(
    wrapped: WrappedModel,
    tokens: Int[Tensor, "batch pos"],
    consumer: Consumer,
    needs: frozenset[str],
    layers: Layers,
    heads: Heads,
) -> Float[Tensor, "batch pos d_vocab"] | None:
    model = wrapped.model
    capture = _Capture(model, consumer, needs - {"logits"}, layers, heads, tokens)
    if len(tokens) == 1:  # one prompt is padded to nothing, whatever its tokens
        capture.pad = PadToken()
    options: dict[str, Any] = {"return_type": "logits"}
    if "logits" not in needs:
        behind = max(capture.heads) + 1
        options = {"return_type": None, "stop_at_layer": behind if behind < model.cfg.n_layers else None}
    with torch.no_grad(), wrapped.exclusive(capture), capture.attached():
        predicted = wrapped.backend.model(tokens, **options, **wrapped.backend.options(tokens))
    if silent := [layer for layer in capture.heads if layer not in capture.fired]:
        raise UnsupportedModelError(
            f"layer {silent[0]}: the hooks of its attention did not fire, so nothing of it was captured; was its "
            "forward function replaced?"
        )
    return predicted if "logits" in needs else None


class _Capture:
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
        if done.q.shape[2] != done.k.shape[2]:
            raise InputError(
                f"layer {layer}: {done.q.shape[2]} queries see {done.k.shape[2]} keys, so a KV cache is in use; "
                "capture a forward pass over the whole prompt instead"
            )
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
        return checked_rows(capture.length) if alone or self.in_order else torch.arange(capture.length)

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
