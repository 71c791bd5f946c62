"""Queries and keys of a running model without what one source writes into them."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.errors import InputError
from tl_posgen.hooks.replace_scores import HookList, finished, replace_scores
from tl_posgen.models.geometry.plain_proof import without_hooks
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.selection import Heads, select_heads
from tl_posgen.models.wrapped import WrappedModel, wrap
from tl_posgen.residual.frozen_layer import frozen_layer
from tl_posgen.residual.reference import Reference, reference_of
from tl_posgen.residual.residual_sources import SourceReader, called, near
from tl_posgen.rope.rotation import complex_planes, from_complex_planes, rotate

Removed = Literal["constant", "varying", "all"]


def remove_source(
    model: Any,
    source: str | Sequence[str],
    part: Removed = "constant",
    on: Literal["keys", "queries"] = "keys",
    heads: Heads = None,
    reference: Any = None,
    control: bool = False,
    seed: int = 0,
) -> HookList:
    """k_j <- k_j - kbar_s (constant), k_j - (k_s,j - kbar_s) (varying), or k_j - k_s,j (all), of chosen heads.

    k_s,j is what the source writes in this pass, norms frozen; kbar_s its mean over a reference text.

    Args:
        source: names as in `ResidualSources`, and of biases.
        reference: a Reference, or a text; the bundled book if left out.
        control: the constant with a random phase in every plane instead.

    Source: ours.
    """
    names = {source} if isinstance(source, str) else set(source)
    if part not in ("constant", "varying", "all") or on not in ("keys", "queries"):
        raise InputError(f"part {part!r} on {on!r}: choose constant, varying or all, on keys or queries")
    wrapped, side = wrap(model), "key" if on == "keys" else "query"
    picked = select_heads(wrapped.model, None, heads)
    if not isinstance(reference, Reference):
        reference = reference_of(wrapped.model, reference, layers=list(picked))
    reader = SourceReader(wrapped, max(picked))
    hooks: HookList = []
    resid: dict[int, Tensor] = {}
    constants = {layer: constant_of(reference, layer, side, names) for layer in picked}

    def keep(name: str, value: Tensor, hook: object) -> None:
        reader.keep(name, value)

    def keep_resid(layer: int, value: Tensor, hook: object) -> None:
        resid[layer] = value.detach()

    def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        constant = constants[capture.layer][list(capture.heads), None]
        if control:
            geometry = capture.geometry
            z = complex_planes(constant, geometry.rope)
            angles = torch.rand(z.shape, generator=torch.Generator().manual_seed(seed)) * 2 * torch.pi
            constant = from_complex_planes(
                z * torch.polar(torch.ones_like(angles), angles), geometry.rope, geometry.d_head
            )
        gone = constant
        if part != "constant":
            live = live_part(wrapped, reader, capture, resid[capture.layer], side, names)
            gone = live if part == "all" else live - constants[capture.layer][list(capture.heads), None]
        q, k = capture.q, capture.k
        q, k = (q, k - gone.to(k)) if on == "keys" else (q - gone.to(q), k)
        q, k = (rotate(x, capture.positions, capture.geometry.rope) for x in (q, k))
        return finished(capture.geometry.scale * q @ k.mT, capture)

    hooks += [(name, partial(keep, name)) for name in reader.points()]
    hooks += [(f"blocks.{layer}.hook_resid_pre", partial(keep_resid, layer)) for layer in picked]
    return hooks + replace_scores(wrapped.model, scores_of, heads=[(n, h) for n, of in picked.items() for h in of])


def constant_of(reference: Reference, layer: int, side: str, names: set[str]) -> Float[Tensor, "head d_head"]:
    """Return the mean of the sources over the reference."""
    found = reference.layers[layer]
    known = found.sources.get(side, ())
    if not names <= set(known):
        raise InputError(f"layer {layer}: no source {sorted(names - set(known))[0]!r}; it has {', '.join(known)}")
    return found.source_means[side][[known.index(name) for name in sorted(names)]].sum(0)


def live_part(
    wrapped: WrappedModel, reader: SourceReader, capture: LayerCapture, resid: Tensor, side: Any, names: set[str]
) -> Float[Tensor, "head pos d_head"]:
    """Return what the sources write in this pass."""
    x = double(resid[capture.prompt]).float()
    written = reader.sources(capture.layer, x, capture.prompt)
    projections = wrapped.projections(capture.layer)
    block = wrapped.backend.model.blocks[capture.layer]
    with torch.no_grad(), without_hooks(wrapped.model):
        norms = [called(one, wrapped, x) for name, one in block.named_children() if name.startswith("ln")]
        inputs = next(
            y for y in (x, *norms) if near(projections.keys(y)[list(capture.heads)], capture.k, wrapped.dtype)
        )
    capture.resid, capture.inputs, capture.projections = x, inputs, projections
    frozen = frozen_layer(wrapped, capture, side)
    all_names = frozen.names(written.names)
    vectors = frozen.of_heads(capture.heads).vectors(written.values)
    return vectors[[n for n, name in enumerate(all_names) if name in names]].sum(0)
