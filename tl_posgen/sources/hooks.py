"""Queries and keys of a running model without what one source writes into them."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double
from tl_posgen.core.options import require
from tl_posgen.editing.draws import generator_at
from tl_posgen.editing.printed_hooks import HookList, printing_call
from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.editing.score_functions import RowByRow, scores_with
from tl_posgen.errors import InputError, UnsupportedModelError, check_seed
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.models.model import Model
from tl_posgen.models.same_logits import without_hooks
from tl_posgen.models.selection import Heads, select_heads
from tl_posgen.models.session import Session, session_of
from tl_posgen.residual.numbers import SourceSums
from tl_posgen.residual.reference import given_reference
from tl_posgen.residual.residual_sources import ROUNDING, Side, SourceReader, SourceVectors, called, is_close
from tl_posgen.rope.rotation import complex_planes, from_complex_planes

Removed = Literal["constant", "varying", "all"]
On = Literal["keys", "queries"]
SIDES: Mapping[str, Side] = {"keys": "k", "queries": "q"}


@printing_call
def remove_source(
    model: Model | Session,
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
            such as "L0 MLP bias" and "b_K"; or several, which are removed together.
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
        InputError: no such source, part or head; a control of something else than a constant; a reference of another
            model; later, in the forward pass: padded prompts, of which other parts than the constant cannot be read; in
            the backward pass: other parts than the constant, whose gradients are not computed.
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
    seed, sources = check_seed(seed), [source] if isinstance(source, str) else list(source)
    if not sources:
        raise InputError('source: give one at least, such as "L0 MLP"')
    if control and part != "constant":
        raise InputError(f"control=True with part={part!r}: random phases are those of a constant; leave one out")
    session, side = session_of(model), SIDES[on]
    chosen = select_heads(session, None, heads)
    reference = given_reference(session, reference, list(chosen), sources=True)
    sums = {layer: reference.of_layer(layer).sources.get(side) for layer in chosen}
    means = {layer: source_sums for layer, source_sums in sums.items() if source_sums is not None}
    if len(means) < len(sums):
        raise InputError("the reference has no sources; make it with reference_of(model, text, sources=True)")
    for name in sources:
        lacking = [layer for layer, source_sums in means.items() if not _meant([name], source_sums.names)]
        if len(lacking) == len(means) or (lacking and heads is not None):
            layer = lacking[0 if heads is not None else -1]
            available = ", ".join(source_name for source_name in means[layer].names if source_name != ROUNDING)
            raise InputError(f"layer {layer}: no source {name!r} before it; it has {available}")
    removed = {layer: names for layer, source_sums in means.items() if (names := _meant(sources, source_sums.names))}
    chosen = {layer: layer_heads for layer, layer_heads in chosen.items() if layer in removed}
    constants = {layer: means[layer].of_names(names).sum(0) / means[layer].n for layer, names in removed.items()}
    if control:
        constants = {
            layer: turned(session.layer(layer).geometry, constant, on, seed) for layer, constant in constants.items()
        }
    reader = SourceReader(session, max(chosen))

    def written(capture: LayerCapture) -> Float[Tensor, "head pos d_head"]:
        """Return what the sources write into the queries or keys of a layer in the pass that runs."""
        layer, x = capture.layer, reader.seen[_resid(capture.layer)][capture.prompt].float().to(capture.device)
        if len(x) != capture.length:
            raise InputError(
                "remove_source: of padded prompts what a source writes cannot be read; run prompts of one length, or "
                'take part="constant"'
            )
        of_layer = reader.sources(layer, x, capture.prompt)
        capture.resid, capture.projections = x, session.projections(layer)
        norms = [child for name, child in session.backend.model.blocks[layer].named_children() if name.startswith("ln")]
        with torch.no_grad(), without_hooks(session.model):
            for norm in (None, *norms):  # what entered W_K is the residual stream, or the norm that gives these keys
                inputs = x if norm is None else called(norm, session, x)
                keys = capture.projections.keys(inputs.to(capture.projections.w_k.device))[list(capture.heads)]
                if is_close(keys.to(capture.k), capture.k, session.dtype):
                    break
            else:
                raise UnsupportedModelError(
                    f"layer {layer}: no norm of the block gives the keys of this pass (other hooks change them?), so "
                    'they cannot be traced to what earlier layers wrote; part="constant" needs no tracing'
                )
        capture.inputs = inputs
        vectors = SourceVectors.of_capture(session, capture, of_layer, side)
        return SourceSums(1, vectors.names, vectors.vectors()).of_names(removed[layer]).sum(0)

    def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        gone = constants[capture.layer][list(capture.heads), None]
        if part != "constant":
            live = written(capture)
            gone = live - gone.to(live) if part == "varying" else live
        vectors = capture.k if on == "keys" else capture.q
        left = vectors - gone.to(vectors)
        return scores_with(capture, **{side: left if part == "constant" else _WithoutGradient.apply(left)})

    by_row = RowByRow(scores_of) if part == "constant" else scores_of
    points = [] if part == "constant" else [*reader.points(), *(_resid(layer) for layer in chosen if layer)]
    places = [(layer, head) for layer, layer_heads in chosen.items() for head in layer_heads]
    reading: HookList = [(name, partial(reader.keep, name)) for name in points]
    return [*reading, *replace_scores(model, by_row, heads=places)]


class _WithoutGradient(torch.autograd.Function):
    """x, with a backward pass that is refused."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise InputError(
            "remove_source: gradients of what a source writes in the pass that runs are not computed; take "
            'part="constant", whose gradients are'
        )


def _resid(layer: int) -> str:
    return f"blocks.{layer}.hook_resid_pre"


def _meant(names: Sequence[str], sources: Sequence[str]) -> list[str]:
    """Return the sources that names stand for: "L0 attention" for all heads of a layer.

    Example:
        >>> _meant(["embed", "L0 attention"], ["embed", "L0H0", "L0H1", "L0 MLP", "rounding"])
        ['embed', 'L0H0', 'L0H1']
    """
    layers = [name.removesuffix(" attention") for name in names if name.endswith(" attention")]
    return [
        source
        for source in sources
        if source != ROUNDING and (source in names or any(source.startswith(f"{layer}H") for layer in layers))
    ]


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
