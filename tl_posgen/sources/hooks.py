"""Queries and keys of a running model without what one source writes into them."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double
from tl_posgen.core.options import require
from tl_posgen.errors import InputError, UnsupportedModelError, check_seed
from tl_posgen.hooks.draws import generator_at
from tl_posgen.hooks.replace_scores import HookList, RowByRow, replace_scores, scores_with
from tl_posgen.models.geometry.plain_proof import without_hooks
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Heads, select_heads
from tl_posgen.models.session import Session, session_of
from tl_posgen.residual.reference import Reference, reference_of
from tl_posgen.residual.residual_sources import ROUNDING, Side, SourceReader, called, frozen_layer, near
from tl_posgen.rope.rotation import complex_planes, from_complex_planes

Removed = Literal["constant", "varying", "all"]
On = Literal["keys", "queries"]
SIDES: Mapping[str, Side] = {"keys": "key", "queries": "query"}


def remove_source(
    model: Model,
    source: str | Sequence[str],
    part: Removed = "constant",
    on: On = "keys",
    heads: Heads = None,
    *,
    reference: Any = None,
    control: bool = False,
    seed: int = 0,
) -> HookList:
    """k_j <- k_j - kbar_s (constant), k_j - (k_{s,j} - kbar_s) (varying), or k_j - k_{s,j} (all), in chosen heads.

    k_{s,j} is what source s writes into key j in the pass that runs, norms frozen at their divisors there; kbar_s is
    its mean over a reference text. Before RoPE and after qk-norm; every query head sees its key changed by itself, so
    heads that share a key and were not chosen keep it. On queries alike.

    Args:
        source: as `Sources` names them: "embed", "pos_embed", "L0H3", "L0 attention" (all its heads), "L0 MLP", biases
            such as "L0 MLP bias" and "b_K", "embed + L0 MLP"; or several, which are removed together.
        part: what of it is removed.
        on: "keys" or "queries".
        heads: as in `replace_scores`; if left out, all of the layers into which one of the sources writes.
        reference: what `tl_posgen.prompt.reference_of` returned, or a text; the bundled book if left out.
        control: the constant with a random phase in every plane that rotates, as large and as constant, in its place.
            The coordinates that do not rotate (partial rotary) are removed as they are: they know no position, and on
            keys add one number to all scores of a row, which softmax does not see.
        seed: of these phases, one draw for each layer and key head (query head on queries).

    Returns:
        Hooks for `model.hooks(fwd_hooks=...)` or `run_with_hooks`, alone or joined to others; of two lists that replace
        scores of one head the last holds, so give its sources together. A constant needs nothing of the prompt, and
        also works with a KV cache. Where nothing rotates a constant in keys adds one number to all scores of a row,
        which softmax does not see.

    Raises:
        InputError: no such source, part or head; a control of something else than a constant; later, in the forward
            pass: padded prompts, of which other parts than the constant cannot be read.
        UnsupportedModelError: queries or keys that cannot be traced to their sources; a control where nothing rotates.

    Source: ours.

    Example:
        >>> from tl_posgen import load_model
        >>> model, tokens = load_model("mini"), torch.arange(12)[None]
        >>> hooks = remove_source(model, "L0 MLP", heads="1.2", reference="Down, down, down. Would the fall never end?")
        >>> torch.allclose(model.run_with_hooks(tokens, fwd_hooks=hooks), model(tokens), atol=1e-3)
        False
    """
    require("source", source, str | Sequence[str])
    require("part", part, Removed)
    require("on", on, On)
    require("control", control, bool)
    seed, asked = check_seed(seed), [source] if isinstance(source, str) else list(source)
    if not asked:
        raise InputError('source: give one at least, such as "L0 MLP"')
    if control and part != "constant":
        raise InputError(f"control=True with part={part!r}: random phases are those of a constant; leave one out")
    session = session_of(model)
    chosen = select_heads(session.model, None, heads)
    if not isinstance(reference, Reference):
        reference = reference_of(session.model, reference, layers=list(chosen))
    names = _names_by_layer(session, reference, chosen, SIDES[on], asked, optional=heads is None)
    chosen = {layer: of for layer, of in chosen.items() if layer in names}
    constants = {}
    for layer, removed in names.items():
        means = reference.layers[layer]
        rows = [place for place, name in enumerate(means.sources[SIDES[on]]) if name in removed]
        constants[layer] = means.source_means[SIDES[on]][rows].sum(0)
    if control:
        constants = {layer: turned(session.layer(layer).geometry, one, on, seed) for layer, one in constants.items()}
    live = None if part == "constant" else _LiveSources(session, max(chosen), names, SIDES[on])

    def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        gone = _of_heads(constants, capture)
        if live is not None:
            written = live.part_of(capture)
            gone = written - gone.to(written) if part == "varying" else written
        if on == "keys":
            return scores_with(capture, k=capture.k - gone.to(capture.k))
        return scores_with(capture, q=capture.q - gone.to(capture.q))

    by_row = RowByRow(scores_of) if live is None else scores_of
    heads = [(layer, head) for layer, of in chosen.items() for head in of]
    return [*(live.hooks(chosen) if live else []), *replace_scores(model, by_row, heads=heads)]


def _of_heads(constants: Mapping[int, Tensor], capture: LayerCapture) -> Float[Tensor, "head 1 d_head"]:
    """Return the constants of the heads of a capture."""
    return constants[capture.layer][list(capture.heads), None]


def _names_by_layer(
    session: Session,
    reference: Reference,
    chosen: Mapping[int, Sequence[int]],
    side: Side,
    asked: Sequence[str],
    *,
    optional: bool,
) -> dict[int, set[str]]:
    """Return, by layer, the names of the sources that are removed there.

    Args:
        optional: whether a layer may lack a source, if another has it.
    """
    found: dict[int, set[str]] = {layer: set() for layer in chosen}
    missing: dict[str, InputError] = {}
    there: set[str] = set()
    for layer in chosen:
        every = reference.of_layer(session.layer(layer).geometry).sources.get(side, ())
        if not every:
            raise InputError("the reference has no sources; make it with reference_of(model, text, sources=True)")
        known = [name for name in every if name != ROUNDING]
        for one in asked:
            try:
                found[layer] |= set(_expanded(one, known))
                there.add(one)
            except LookupError as error:
                words = f"layer {layer}: no source {error.args[0]!r} before it; it has {', '.join(known)}"
                missing[one] = InputError(words)
                if not optional:
                    raise missing[one] from None
    if nowhere := [one for one in asked if one not in there]:
        raise missing[nowhere[0]]
    return {layer: names for layer, names in found.items() if names}


def _expanded(name: str, known: Sequence[str]) -> list[str]:
    """Return the sources that a name stands for: "L0 attention" for all heads of a layer, "embed + L0 MLP" for these.

    Example:
        >>> _expanded("embed + L0 attention", ["embed", "L0H0", "L0H1", "L0 MLP"])
        ['embed', 'L0H0', 'L0H1']
    """
    if name in known:
        return [name]
    if " + " in name.strip(" +"):
        return [each for one in name.split(" + ") for each in _expanded(one, known)]
    layer = re.fullmatch(r"(L\d+) attention", name)
    heads = [one for one in known if layer and re.fullmatch(rf"{layer[1]}H\d+", one)]
    if not heads:
        raise LookupError(name)
    return heads


def turned(
    geometry: LayerGeometry, constant: Float[Tensor, "head d_head"], on: On, seed: int
) -> Float[Tensor, "head d_head"]:
    """Return constants with a random phase in each rotary plane, one for all query heads of a key."""
    n_planes = len(geometry.rope.inv_freq)
    if not n_planes:
        raise UnsupportedModelError(
            f"layer {geometry.layer}: nothing rotates, so a constant has no phases to be drawn; leave control out"
        )
    drawn = torch.rand(geometry.n_heads, n_planes, generator=generator_at(seed, layer=geometry.layer), dtype=DOUBLE)
    angles = 2 * torch.pi * drawn
    if on == "keys":
        angles = angles[geometry.key_heads(range(geometry.n_heads))]
    z = complex_planes(double(constant), geometry.rope)
    z[:, :n_planes] *= torch.polar(torch.ones_like(angles), angles).to(z)
    return from_complex_planes(z, geometry.rope, geometry.d_head)


class _LiveSources:
    """Vectors that sources write into queries or keys in the pass that runs."""

    def __init__(self, session: Session, last: int, names: Mapping[int, set[str]], side: Side):
        self.session, self.names, self.reader = session, names, SourceReader(session, last)
        self.side: Side = side
        self.resid: dict[int, Tensor] = {}

    def hooks(self, layers: Mapping[int, Sequence[int]]) -> HookList:
        """Return the hooks that read the pass; they stand before those that use it."""

        def keep(name: str, value: Tensor, hook: object) -> None:
            self.reader.keep(name, value)

        def keep_resid(layer: int, value: Tensor, hook: object) -> None:
            self.resid[layer] = value.detach()

        found: HookList = [(name, partial(keep, name)) for name in self.reader.points()]
        return found + [(f"blocks.{layer}.hook_resid_pre", partial(keep_resid, layer)) for layer in layers]

    def part_of(self, capture: LayerCapture) -> Float[Tensor, "head pos d_head"]:
        """Return what the sources of a layer write into its queries or keys."""
        x = double(self.resid[capture.layer][capture.prompt]).float().to(capture.device)
        if len(x) != capture.length:
            raise InputError(
                "remove_source: of padded prompts what a source writes cannot be read; run prompts of one length, or "
                'take part="constant"'
            )
        written = self.reader.sources(capture.layer, x, capture.prompt)
        capture.resid, capture.inputs = x, self.inputs_of(capture, x)
        capture.projections = self.session.projections(capture.layer)
        frozen = frozen_layer(self.session, capture, self.side)
        wanted = [place for place, name in enumerate(frozen.names(written.names)) if name in self.names[capture.layer]]
        return frozen.of_heads(capture.heads).vectors(written.values)[wanted].sum(0)

    def inputs_of(self, capture: LayerCapture, x: Float[Tensor, "pos d_model"]) -> Float[Tensor, "pos d_model"]:
        """Return what entered W_K: the residual stream, or the norm of it that gives the keys of the pass."""
        projections, block = self.session.projections(capture.layer), self.session.backend.model.blocks[capture.layer]
        norms = [one for name, one in block.named_children() if name.startswith("ln")]
        with torch.no_grad(), without_hooks(self.session.model):
            for norm in (None, *norms):
                inputs = x if norm is None else called(norm, self.session, x)
                keys = projections.keys(inputs.to(projections.w_k.device))[list(capture.heads)]
                if near(keys.to(capture.k), capture.k, self.session.dtype):
                    return inputs
        raise UnsupportedModelError(
            f"layer {capture.layer}: no norm of the block gives the keys of this pass (other hooks change them?), "
            'so they cannot be traced to what earlier layers wrote; part="constant" needs no tracing'
        )
