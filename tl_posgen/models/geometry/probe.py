"""Probing: one short forward pass, and from what its hooks carried a proved description of every layer."""

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tl_posgen.arithmetic import full_precision, summable
from tl_posgen.errors import ModelError, UnsupportedModelError
from tl_posgen.models.backends.backend import Backend, Read
from tl_posgen.models.geometry.proof import is_pattern, is_softmax, plain_scores, prove
from tl_posgen.models.layers.capture import PARTS
from tl_posgen.models.layers.fused import FAILURES, Attention, form
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.models.model import Model

HOOKS = ("q", "k", "attn_scores", "pattern", "q_normed", "k_normed", "cos", "sin")


@dataclass(frozen=True)
class Probed:
    """One layer as the probe found it: its proved geometry, and the hooks to read it from.

    Attributes:
        names: part of a capture -> name of its hook.
        read: makes a part of what its hook carries, see `Backend.reader`.
        left_to_hf: a bridge leaves its attention to Hugging Face, so that its scores show only while it is streamed.
    """

    geometry: LayerGeometry
    names: Mapping[str, str]
    read: Read
    left_to_hf: bool = False


ProbedOrReason: TypeAlias = Probed | UnsupportedModelError  # what a layer is, or why that cannot be said


@full_precision()
def probe_layers(model: Model, backend: Backend) -> tuple[ProbedOrReason, ...]:
    """Return what was found in every layer, supported or not."""
    fired = _probe_run(model, backend)
    left_to_hf = {
        layer for layer, hooks in fired.items() if "attn_scores" in hooks and is_pattern(hooks["attn_scores"])
    }
    if left_to_hf:

        def forming(layer: int) -> Attention:
            return lambda *arguments: form(backend.model.blocks[layer].attn, *arguments)["z"]

        with suppress(*FAILURES), backend.fused({}, forming):
            fired = _probe_run(model, backend)
    rotates = any("cos" in hooks for hooks in fired.values())
    layers = range(model.cfg.n_layers)
    return tuple(_probe_layer(backend, layer, fired[layer], rotates, layer in left_to_hf) for layer in layers)


@torch.no_grad()
def _probe_layer(
    backend: Backend, layer: int, fired: Mapping[str, Tensor], rotates: bool, left_to_hf: bool
) -> ProbedOrReason:
    try:
        for part in ("q", "k", "attn_scores"):
            if part not in fired:
                raise UnsupportedModelError(f"layer {layer}: its hook_{part} does not fire (no attention there?)")
        if is_pattern(fired["attn_scores"]):
            raise UnsupportedModelError(
                f"layer {layer}: hook_attn_scores carries the attention pattern after softmax, because "
                "TransformerBridge leaves the attention of this architecture to Hugging Face, which does not let it be "
                "replaced; load the model as a HookedTransformer with TransformerLens 3.9 "
                '(load_model(..., backend="hooked")) where that supports it'
            )
        names = {part: f"blocks.{layer}.attn.hook_{part}" for part in PARTS}
        names["resid"] = f"blocks.{layer}.hook_resid_pre"
        normed = "q_normed" in fired and "k_normed" in fired
        if normed:
            names |= {part: f"{names[part]}_normed" for part in ("q", "k")}
        read = backend.reader(layer, normed=normed, norms=left_to_hf)
        q, k = (summable(read(part, fired[f"{part}_normed" if normed else part])[0]) for part in ("q", "k"))
        plain = LayerGeometry(layer, "none", len(q), len(k), q.shape[-1], q.shape[-1] ** -0.5)
        drafts = backend.drafts(plain, fired, rotates, left_to_hf)
        scores, pattern = plain_scores(summable(fired["attn_scores"][0]), q.dtype), fired.get("pattern")
        geometry, sinks = prove(drafts, q, k, scores), False
        if pattern is not None:
            rows = scores, summable(pattern[0]), pattern.dtype
            sinks = not is_softmax(*rows) and is_softmax(*rows, sinks=True)
        return Probed(replace(geometry, sinks=sinks), names, read, left_to_hf)
    except UnsupportedModelError as refusal:
        return refusal.with_traceback(None)


def _probe_run(model: Model, backend: Backend) -> dict[int, dict[str, Tensor]]:
    """Return layer -> hook -> what it carried while the model read a few random tokens."""
    tokens = backend.some_tokens()
    fired: dict[int, dict[str, Tensor]] = defaultdict(dict)
    points = model.hook_dict
    places = {
        name: (layer, part)
        for layer in range(model.cfg.n_layers)
        for part in HOOKS
        if (name := f"blocks.{layer}.attn.hook_{part}") in points
    }
    by_point = {id(points[name]): place for name, place in places.items()}  # a bridge's hook.name can be an alias

    def remember(value: Tensor, hook: Any) -> None:
        layer, part = by_point[id(hook)]
        fired[layer][part] = value.detach()

    # one entry for all hooks, as a bridge works out its thousands of names anew for each
    with torch.no_grad(), model.hooks(fwd_hooks=[(places.__contains__, remember)]):
        try:
            model(tokens, return_type=None, **backend.options(tokens))
        except RuntimeError as error:
            if (dtype := next(model.parameters()).dtype) == model.cfg.dtype:
                raise
            raise ModelError(
                f"this model cannot run: its weights are {dtype}, and its config says {model.cfg.dtype} ({error}); "
                f"model.to({dtype}) sets both"
            ) from error
    return fired
