"""The one mechanism: scores computed anew from a layer's q, k and geometry, put where the model's own stood."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Real
from torch import Tensor

from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.capture import LayerCapture, finished_scores
from tl_posgen.models.model import Model
from tl_posgen.models.padding import spans_of_scores
from tl_posgen.models.probe_layers import Probed
from tl_posgen.models.reading import layer_capture
from tl_posgen.models.selection import Heads, Layers, select_heads
from tl_posgen.models.sites import plain_scores
from tl_posgen.models.wrapped import WrappedModel, wrap
from tl_posgen.rope.scores_at import scores_at_positions

ScoresOf = Callable[[LayerCapture], Float[Tensor, "head query key"]]
HookList = list[tuple[str, Callable[..., Any]]]


def replace_scores(
    model: Model,
    scores_of: ScoresOf,
    layers: Layers = None,
    heads: Heads = None,
    *,
    needs_positions: bool = False,
) -> HookList:
    """score_ij <- scores_of(capture)_ij for the chosen heads and layers, wherever key j is visible to query i.

    Args:
        scores_of: from a layer's q and k (before RoPE, after qk-norm) and geometry to scores [head, query, key] of the
            heads in `capture.heads`. A visible entry set to -inf hides that key. What it says of invisible entries is
            not read: they keep the number that the model masks with. It is called once per layer and prompt.
        layers, heads: which; all if left out. Heads are indices, meant in every chosen layer, or (layer, head) pairs,
            or a frame with the columns layer and head, so that what a measure found can be edited.
        needs_positions: refuse layers whose scores know no distance because positions are added to the residual stream.

    Returns:
        [(hook_name, fn), ...] for `model.hooks(fwd_hooks=...)` or `run_with_hooks`, alone or joined to other hooks.
        Nothing is changed in place, gradients flow, and two interventions on different heads can be added up.

    Raises:
        InputError: a layer or head that does not exist; later, in the forward pass: a KV cache.
        UnsupportedModelError: a chosen layer whose scores cannot be recomputed from q and k; later, in the forward
            pass: one whose attention TransformerBridge leaves to Hugging Face, outside of `tl_posgen.streaming`.

    Example:
        >>> import torch
        >>> from tl_posgen import load_model
        >>> model, tokens = load_model("mini"), torch.arange(12)[None]
        >>> same = model.run_with_hooks(tokens, fwd_hooks=replace_scores(model, lambda capture: capture.scores()))
        >>> torch.allclose(same, model(tokens), atol=1e-4)
        True
    """
    if not callable(scores_of):
        raise InputError(f"{scores_of!r} stands for no scores: give a function of a LayerCapture")
    wrapped, hooks = wrap(model), []
    for index, picked in select_heads(model, layers, heads).items():
        probed = wrapped.layer(index)
        if needs_positions and probed.geometry.encoding == "absolute":
            raise UnsupportedModelError(
                f"layer {index}: positions are embeddings added to the residual stream, so its scores have no distance "
                "to change; choose a model with rotary positions or ALiBi"
            )
        hooks += _LayerEdit(wrapped, probed, scores_of, picked).hooks()
    return hooks


class _LayerEdit:
    """q and k of one layer on their way to its scores."""

    def __init__(self, wrapped: WrappedModel, probed: Probed, scores_of: ScoresOf, heads: Sequence[int]):
        self.wrapped, self.probed, self.scores_of, self.heads = wrapped, probed, scores_of, heads
        self.parts: dict[str, Tensor] = {}

    def hooks(self) -> HookList:
        names = self.probed.sites.names
        return [*((names[part], partial(self.keep, part)) for part in ("q", "k")), (names["attn_scores"], self.edit)]

    def keep(self, part: str, value: Tensor, hook: object) -> None:
        self.parts[part] = self.probed.sites.read(part, value)

    def edit(self, attn_scores: Tensor, hook: object) -> Tensor:
        self.wrapped.require_shown(self.probed)
        parts = dict(self.parts)
        self.parts.clear()
        dtype = parts["q"].dtype
        spans = spans_of_scores(self.probed.geometry, plain_scores(attn_scores[:, 0], dtype))
        edited = attn_scores.clone()
        for row, span in enumerate(spans):
            prompt = {part: x[row] for part, x in parts.items()}
            capture = layer_capture(self.probed, prompt, self.heads, (), row, None, span)
            scores, own = self.scores_of(capture), attn_scores[row, self.heads, span, span]
            if not isinstance(scores, Tensor) or scores.shape != own.shape:
                raise InputError(
                    f"layer {capture.layer}: the new scores are {list(getattr(scores, 'shape', [])) or repr(scores)}, "
                    f"and {list(own.shape)} [head, query, key] are needed"
                )
            visible = plain_scores(own, dtype) != -torch.inf
            edited[row, self.heads, span, span] = torch.where(visible, scores.to(own.dtype), own)
        return edited


def finished(
    products: Float[Tensor, "head query key"],
    capture: LayerCapture,
    distance: int | float | Real[Tensor, "query key"] | None = None,
) -> Float[Tensor, "head query key"]:
    """cap(products_ij - slope d_ij), invisible entries as they come; see `finished_scores`."""
    return finished_scores(products, capture.geometry, capture.heads, distance)


def at_positions(
    capture: LayerCapture, query_positions: Real[Tensor, " pos"], key_positions: Real[Tensor, " pos"]
) -> Float[Tensor, "head query key"]:
    """The layer's scores with query i standing at query_positions[i] and key j at key_positions[j]."""
    geometry = capture.geometry
    query_positions, key_positions = (p.to(capture.q.device) for p in (query_positions, key_positions))
    products = scores_at_positions(capture.q, capture.k, geometry.rope, geometry.scale, query_positions, key_positions)
    return finished(products, capture, query_positions[:, None] - key_positions)
