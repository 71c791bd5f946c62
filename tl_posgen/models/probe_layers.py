"""Probing: one short forward pass, and from what its hooks carried a proved description of every layer."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from tl_posgen.errors import UnsupportedModelError
from tl_posgen.models.backend import Backend
from tl_posgen.models.geometry import LayerGeometry
from tl_posgen.models.model import Model
from tl_posgen.models.proof import prove, refuse_patterns
from tl_posgen.models.sites import Sites, dispatch, plain_scores

PROBE_TOKENS = 48  # enough to leave a small window, few enough to cost nothing
HOOKS = ("q", "k", "attn_scores", "q_normed", "k_normed", "cos", "sin")


@dataclass(frozen=True)
class Probed:
    """One layer as the probe found it: its proved geometry, and the hooks to read it from."""

    geometry: LayerGeometry
    sites: Sites


Found: TypeAlias = Probed | UnsupportedModelError  # what a layer is, or why that cannot be said


def probe_layers(model: Model, backend: Backend) -> tuple[Found, ...]:
    """What was found in every layer, supported or not."""
    fired = probe_run(model, backend)
    rotates = any("cos" in hooks for hooks in fired.values())
    return tuple(probe_layer(backend, layer, fired[layer], rotates) for layer in range(model.cfg.n_layers))


def probe_layer(backend: Backend, layer: int, fired: Mapping[str, Tensor], rotates: bool) -> Found:
    try:
        for part in ("q", "k", "attn_scores"):
            if part not in fired:
                raise UnsupportedModelError(f"layer {layer}: its hook_{part} does not fire (no attention there?)")
        refuse_patterns(layer, fired["attn_scores"][0])
        sites = backend.sites(layer, fired)
        q, k = (sites.read(part, fired[sites.names[part].rpartition("hook_")[2]])[0] for part in ("q", "k"))
        plain = LayerGeometry(layer, "none", len(q), len(k), q.shape[-1], q.shape[-1] ** -0.5)
        drafts = backend.drafts(plain, fired, rotates)
        return Probed(prove(drafts, q, k, plain_scores(fired["attn_scores"][0], q.dtype)), sites)
    except UnsupportedModelError as refusal:
        return refusal.with_traceback(None)


def probe_run(model: Model, backend: Backend) -> dict[int, dict[str, Tensor]]:
    """layer -> hook -> what it carried while the model read a few random tokens."""
    n = min(PROBE_TOKENS, backend.limit().tokens or PROBE_TOKENS)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.cfg.d_vocab, (1, n), generator=generator).to(next(model.parameters()).device)
    fired: dict[int, dict[str, Tensor]] = defaultdict(dict)

    def remember(layer: int, name: str, value: Tensor) -> None:
        fired[layer][name] = value.detach()

    known = model.hook_dict
    places = {
        (layer, name): f"blocks.{layer}.attn.hook_{name}" for layer in range(model.cfg.n_layers) for name in HOOKS
    }
    hooks = dispatch(model, {place: partial(remember, *of) for of, place in places.items() if place in known})
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        model(tokens, return_type=None, **backend.options(tokens))
    return fired
