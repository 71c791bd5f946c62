"""Capture: q, k and what else is needed of a forward pass, handed to a consumer layer by layer.

with capturing(model, consumer):        # every pass inside the block, with whatever hooks are at work
    model(tokens)

run_capture(model, tokens, consumer)    # one pass, no further than the last layer asked for
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.errors import UnsupportedModelError
from tl_posgen.models.backends.sites import PARTS, checked_needs
from tl_posgen.models.capture.padding import PadToken
from tl_posgen.models.capture.pass_capture import Consumer, PassCapture
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Heads, Layers
from tl_posgen.models.streaming.stream import require_fits, streaming, streaming_by_policy
from tl_posgen.models.wrapped import WrappedModel, wrap
from tl_posgen.progress import count


@contextmanager
def capturing(
    model: Model | WrappedModel,
    consumer: Consumer,
    needs: Iterable[str] = frozenset(),
    layers: Layers = None,
    heads: Heads = None,
) -> Iterator[None]:
    """While the block runs, every forward pass calls `consumer(LayerCapture)` once per layer and prompt.

    In a batch, the consumer is shown every prompt's layer 0, then every prompt's layer 1, and so on;
    `LayerCapture.prompt` tells them apart, and goes on counting over forward passes. Captured is what a layer ends up
    with after all hooks, whenever these were added.

    Args:
        needs: what to capture beyond q and k, of {"v", "attn_scores", "pattern", "resid", "inputs"}; "inputs" are what
            enters W_Q and W_K, with the proved projections.
        layers, heads: which; all if left out. Heads are indices, meant in every chosen layer, or (layer, head) pairs,
            or a frame with the columns layer and head.

    Raises:
        InputError: a layer, a head or a need that does not exist; with needs={"inputs"}, a model that splits its
            attention's input by head; later, in the forward pass: a KV cache, padding that cannot be told from text.
        UnsupportedModelError: a chosen layer whose scores cannot be recomputed from its q and k; with
            needs={"inputs"}, one whose queries or keys are something else than an affine map of one input, with a norm
            or clipping after it (adapters, quantised weights).
    """
    wrapped = wrap(model)
    with ExitStack() as stack:
        if wrapped.needs_streaming:
            stack.enter_context(streaming(wrapped))
        stack.enter_context(PassCapture(wrapped, consumer, needs, layers, heads).attached())
        yield


def run_capture(
    model: Model | WrappedModel,
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
    tokens = tokens.to(wrapped.device)
    require_fits(wrapped, tokens.shape[1])
    with streaming_by_policy(wrapped, tokens.shape[1]):
        capture = PassCapture(wrapped, consumer, needs - {"logits"}, layers, heads, tokens)
        if len(tokens) == 1:  # one prompt is padded to nothing, whatever its tokens
            capture.pad = PadToken()
        options: dict[str, Any] = {"return_type": "logits"}
        if "logits" not in needs:
            behind = max(capture.heads) + 1
            options = {"return_type": None, "stop_at_layer": behind if behind < wrapped.model.cfg.n_layers else None}
        count(len(tokens))
        with torch.no_grad(), wrapped.exclusive(capture), capture.attached():
            predicted = wrapped.backend.model(tokens, **options, **wrapped.backend.options(tokens))
    if silent := [layer for layer in capture.heads if layer not in capture.fired]:
        raise UnsupportedModelError(
            f"layer {silent[0]}: the hooks of its attention did not fire, so nothing of it was captured; was its "
            "forward function replaced?"
        )
    return predicted if "logits" in needs else None
