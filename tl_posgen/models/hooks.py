"""Capture: hook functions that hand q, k and what else is needed to a consumer, layer by layer, in one forward pass.

    hooks = capture_hooks(model, consumer)  # [(hook_name, fn), ...], like any other TransformerLens hooks
    model.run_with_hooks(tokens, fwd_hooks=my_hooks + hooks)

    with capturing(model, consumer):        # the same, and the consumer is told the tokens
        model(tokens)

    run_capture(model, tokens, consumer)    # the same, no further than the last layer asked for

The hooks change nothing in the model. One layer is held at a time, and dropped when the consumer has seen it.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.backend import Model, backend_of
from tl_posgen.models.capture import LayerCapture
from tl_posgen.models.probe import Probed, longest_prompt, probe, supported, unpadded
from tl_posgen.models.proof import without_row_offsets
from tl_posgen.models.sites import PARTS, at_least_float32, dispatch, plain_scores

Consumer = Callable[[LayerCapture], None]
HookList = list[tuple[str, Callable[..., None]]]


def capture_hooks(
    model: Model,
    consumer: Consumer,
    needs: frozenset[str] = frozenset(),
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    tokens: Int[Tensor, "batch pos"] | None = None,
) -> HookList:
    """TransformerLens hooks that call `consumer(LayerCapture)` once per layer and prompt, in the order of the layers.

    In a batch, the consumer is shown every prompt's layer 0, then every prompt's layer 1, and so on;
    `LayerCapture.prompt` tells them apart, and goes on counting over forward passes.

    Args:
        needs: what to capture beyond q and k, of {"v", "attn_scores", "pattern", "resid"}.
        layers, heads: which; all if left out. Heads are meant in every chosen layer.
        tokens: the ids that the model will be run on, if `LayerCapture.tokens` is wanted (see also `capturing`).

    Raises:
        InputError: a layer, a head or a need that does not exist; later, in the forward pass: padding or a KV cache.
        UnsupportedModelError: a chosen layer whose scores cannot be recomputed from its q and k.
    """

    def as_hook(take: Callable[[Tensor], None]) -> Callable[..., None]:
        return lambda value, hook: take(value)

    takes = _Capture(model, consumer, needs, layers, heads, tokens).takes()
    return [(name, as_hook(take)) for name, take in takes.items()]


@contextmanager
def capturing(
    model: Model,
    consumer: Consumer,
    needs: frozenset[str] = frozenset(),
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Iterator[None]:
    """While the block runs, every forward pass of the model is captured. For the arguments see `capture_hooks`."""
    capture = _Capture(model, consumer, needs, layers, heads, None)

    def see_tokens(_module: torch.nn.Module, args: tuple) -> None:
        # TransformerLens' run_with_hooks calls forward directly, so only the embedding is sure to be called
        seen = args[0] if args and isinstance(args[0], Tensor) else None
        capture.tokens = seen if seen is not None and seen.ndim == 2 and not seen.is_floating_point() else None

    handle = model.embed.register_forward_pre_hook(see_tokens)
    try:
        with model.hooks(fwd_hooks=dispatch(model, capture.takes())):
            yield
    finally:
        handle.remove()


def run_capture(
    model: Model,
    tokens: Int[Tensor, "batch pos"],
    consumer: Consumer,
    needs: frozenset[str] = frozenset(),
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> None:
    """Run the model on `tokens` without gradients, up to the last chosen layer, and capture it on the way.

    Args:
        tokens: prompts of one length, without padding.

    For the other arguments and errors see `capture_hooks`. Also InputError: a prompt longer than the model takes.
    """
    limit, why = longest_prompt(model)
    if limit is not None and tokens.shape[1] > limit:
        raise InputError(f"prompts of {tokens.shape[1]} tokens are too long: this model takes {limit}, {why}")
    tokens = tokens.to(next(model.parameters()).device)
    capture = _Capture(model, consumer, needs, layers, heads, tokens)
    behind = capture.layers[-1].geometry.layer + 1
    stop = behind if behind < model.cfg.n_layers else None
    with torch.no_grad(), model.hooks(fwd_hooks=dispatch(model, capture.takes())):
        model(tokens, return_type=None, stop_at_layer=stop, **unpadded(model, tokens))


def chosen(indices: Sequence[int] | None, n: int, kind: str) -> list[int]:
    """The chosen layers or heads in order, or all; InputError where one does not exist."""
    if indices is None:
        return list(range(n))
    for index in indices:
        if not (hasattr(index, "__index__") and 0 <= int(index) < n):
            raise InputError(f"{kind} {index!r} does not exist: this model has {kind}s 0 to {n - 1}")
    if not len(indices):
        raise InputError(f"no {kind}s chosen; leave {kind}s out to have all {n}")
    return sorted({int(index) for index in indices})


class _Capture:
    """The parts of the layer that is running, until they are complete."""

    def __init__(
        self,
        model: Model,
        consumer: Consumer,
        needs: frozenset[str],
        layers: Sequence[int] | None,
        heads: Sequence[int] | None,
        tokens: Int[Tensor, "batch pos"] | None,
    ):
        if unknown := set(needs) - set(PARTS):
            raise InputError(f"cannot capture {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
        backend_of(model)
        indices = chosen(layers, model.cfg.n_layers, "layer")
        self.heads = chosen(heads, model.cfg.n_heads, "head")
        probed = probe(model)
        self.layers = [supported(probed[index]) for index in indices]
        self.consumer = consumer
        self.needs = frozenset(needs)
        self.tokens = tokens
        # the scores come last but for the pattern; they are always looked at, because padding shows in them
        self.last = "pattern" if "pattern" in needs else "attn_scores"
        self.parts: dict[str, Tensor] = {}
        self.prompts_before = self.prompts_seen = 0

    def takes(self) -> dict[str, Callable[[Tensor], None]]:
        """Hook name -> what to do with its tensor."""
        wanted = [part for part in PARTS if part in self.needs | {"resid", "q", "k", "attn_scores"}]
        return {probed.sites.names[part]: partial(self.take, probed, part) for probed in self.layers for part in wanted}

    def take(self, probed: Probed, part: str, value: Tensor) -> None:
        if part == "resid":  # the first to fire: what an interrupted pass left behind goes
            self.parts.clear()
        self.parts[part] = value.detach()
        if part == self.last:
            self.hand_over(probed)

    def hand_over(self, probed: Probed) -> None:
        parts = {part: probed.sites.read(part, value) for part, value in self.parts.items()}
        self.parts.clear()
        batch, _, length, _ = parts["q"].shape
        if probed is self.layers[0]:
            self.prompts_before, self.prompts_seen = self.prompts_seen, self.prompts_seen + batch
        refuse_padding(probed, plain_scores(parts["attn_scores"][:, 0], parts["q"].dtype))
        tokens = self.tokens if self.tokens is not None and self.tokens.shape == (batch, length) else None
        for row in range(batch):
            prompt = {part: value[row] for part, value in parts.items()}
            ids = None if tokens is None else tokens[row]
            self.consumer(layer_capture(probed, prompt, self.heads, self.needs, self.prompts_before + row, ids))


def layer_capture(
    probed: Probed,
    parts: Mapping[str, Tensor],
    heads: Sequence[int],
    needs: Container[str],
    prompt: int,
    tokens: Int[Tensor, " pos"] | None,
) -> LayerCapture:
    """One prompt's parts, each [head, pos, d] or as it should be, made into what analyzers are handed."""
    geometry = probed.geometry

    def of_heads(x: Tensor) -> Tensor:
        group = geometry.n_heads // len(x)  # 1 where keys are already one per query head
        rows = [head // group for head in heads]
        # all heads as they are need no copy: of a pattern it would cost more than the softmax that made it
        return at_least_float32(x if rows == list(range(len(x))) else x[rows])

    capture = LayerCapture(geometry, heads, prompt, tokens, of_heads(parts["q"]), of_heads(parts["k"]))
    if "v" in needs:
        capture.v = of_heads(parts["v"])
    if "attn_scores" in needs:
        capture.attn_scores = plain_scores(parts["attn_scores"][list(heads)], parts["q"].dtype)
        if geometry.alibi_slopes is not None:
            capture.attn_scores = without_row_offsets(capture.attn_scores, capture.q, capture.k, geometry.scale)
    if "pattern" in needs:
        capture.pattern = of_heads(parts["pattern"])
    if "resid" in needs:
        capture.resid = at_least_float32(parts["resid"])
    return capture


def refuse_padding(probed: Probed, attn_scores: Float[Tensor, "batch query key"]) -> None:
    """Positions must be 0 .. n - 1 and all keys tokens: no KV cache, no padding, no other window than was probed.

    Args:
        attn_scores: of any one head, because masks are alike in all.
    """
    n_queries, n_keys = attn_scores.shape[1:]
    if n_queries != n_keys:
        raise InputError(
            f"layer {probed.geometry.layer}: {n_queries} queries see {n_keys} keys, so a KV cache is in use; "
            "capture a forward pass over the whole prompt instead"
        )
    if (attn_scores.amax(1) == -torch.inf).any():
        raise InputError(
            f"layer {probed.geometry.layer}: some tokens are masked for every query, so the prompt is padded; "
            "run prompts of one length together, or each by itself"
        )
    visible: Bool[Tensor, "batch query key"] = attn_scores != -torch.inf
    if (visible > probed.geometry.visible(n_keys, visible.device)).any():
        raise UnsupportedModelError(
            f"layer {probed.geometry.layer}: queries see keys that the causal mask, or the window that was probed "
            f"(window {probed.geometry.window}), should hide from them"
        )
