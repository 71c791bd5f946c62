"""Capture: hook functions that hand q, k and what else is needed to a consumer, layer by layer, in one forward pass.

    hooks = capture_hooks(model, consumer)  # [(hook_name, fn), ...], like any other TransformerLens hooks
    model.run_with_hooks(tokens, fwd_hooks=my_hooks + hooks)

    with capturing(model, consumer):        # the same, and the consumer is told the tokens
        model(tokens)

    run_capture(model, tokens, consumer)    # the same, no further than the last layer asked for

The hooks change nothing in the model. One layer is held at a time, and dropped when the consumer has seen it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.backends.sites import PARTS, checked_needs
from tl_posgen.models.capture.padding import PadToken
from tl_posgen.models.capture.pass_capture import Consumer, PassCapture, show
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Heads, Layers
from tl_posgen.models.streaming.stream import require_fits, streaming, streaming_if_chosen
from tl_posgen.models.wrapped import WrappedModel, wrap
from tl_posgen.progress import count

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

    takes = PassCapture(model, consumer, needs, layers, heads, tokens, in_order=True).takes()
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
        capture = PassCapture(model, consumer, needs, layers, heads, None)
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
    capture = PassCapture(model, consumer, needs - {"logits"}, layers, heads, tokens)
    if len(tokens) == 1:  # one prompt is padded to nothing, whatever its tokens
        capture.pad = PadToken()
    options: dict[str, Any] = {"return_type": "logits"}
    if "logits" not in needs:
        behind = max(capture.heads) + 1
        options = {"return_type": None, "stop_at_layer": behind if behind < model.cfg.n_layers else None}
    count(len(tokens))
    with torch.no_grad(), wrapped.exclusive(capture), capture.attached():
        predicted = wrapped.backend.model(tokens, **options, **wrapped.backend.options(tokens))
    if silent := [layer for layer in capture.heads if layer not in capture.fired]:
        raise UnsupportedModelError(
            f"layer {silent[0]}: the hooks of its attention did not fire, so nothing of it was captured; was its "
            "forward function replaced?"
        )
    return predicted if "logits" in needs else None
