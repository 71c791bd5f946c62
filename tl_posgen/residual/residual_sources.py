"""The residual stream as a sum of what embeddings, heads and MLPs wrote, and queries and keys as linear maps of it."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.capture.capturing import run_capture, watching
from tl_posgen.models.geometry.plain_proof import without_hooks
from tl_posgen.models.geometry.proof import tolerance
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.selection import head_name, select_heads
from tl_posgen.models.session import Session, session_of
from tl_posgen.residual.numbers import FrozenMap, FrozenNorm, freeze, frozen_map

By = Literal["layer", "head"]
REMEDY = "give parts of your own, parts={name: [pos, d_model]} with rest=True"


@dataclass(frozen=True)
class ResidualSources:
    """x_t = sum_s r_{s,t}: the residual stream at the input of a layer, float64.

    Attributes:
        names: "embed", "pos_embed" (learned positions), and of every earlier layer "L0H0", ... (a head's output through
            its slice of W_O), "L0 attention bias", "L0 MLP", "L0 MLP bias"; what is zero throughout, as a bias that the
            architecture lacks, is left out. A norm behind attention or MLP is frozen as it was in this pass.
        values: r.
        residual: x as the pass had it.
    """

    names: tuple[str, ...]
    values: Float[Tensor, "source pos d_model"]
    residual: Float[Tensor, "pos d_model"]


def residual_sources(model: Any, tokens: Int[Tensor, " pos"] | Int[Tensor, "1 pos"], layer: int) -> ResidualSources:
    """Return the sources of the residual stream at the input of a layer, from one forward pass of one prompt.

    Args:
        model: a HookedTransformer or a TransformerBridge.

    Raises:
        InputError: tokens of several prompts, or a layer that does not exist.
        UnsupportedModelError: they do not add up to the residual stream, as where blocks scale what they add.

    Example:
        >>> from tl_posgen import load_model
        >>> found = residual_sources(load_model("mini"), torch.arange(9), layer=1)
        >>> found.names
        ('embed', 'L0H0', 'L0H1', 'L0H2', 'L0H3', 'L0 MLP')
        >>> torch.allclose(found.values.sum(0), found.residual, atol=1e-4)
        True
    """
    session = session_of(model)
    layers = list(select_heads(session.model, layer))
    if len(layers) != 1:
        raise InputError(f"layer={layer!r}: give one layer")
    if not isinstance(tokens, Tensor) or not tokens.numel() or tokens.numel() != max(tokens.shape, default=0):
        given = f"shape {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise InputError(f"tokens of {given}: give the token ids of one prompt, as model.to_tokens(text) does")
    reading, found = SourceReader(session, layers[0]), list[LayerCapture]()
    with reading.attached():
        run_capture(session, tokens.reshape(1, -1), found.append, {"resid"}, layers=layers)
    resid = found[0].resid
    assert resid is not None
    return reading.sources(layers[0], resid)


@dataclass
class SourceReader:
    """Keeps what earlier layers wrote during a forward pass.

    Attributes:
        before: sources are those before this layer.
        by: whether each head is a source, "L0H3", or all heads of a layer are one, "L0 attention".
        seen: what hook points carried, by name.
        written: what was made of it so far, by place and prompt of the batch.
    """

    session: Session
    before: int
    by: By = "head"
    seen: dict[str, Tensor] = field(default_factory=dict)
    written: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict)

    def points(self) -> list[str]:
        """Return the names of the hook points that are read."""
        known = self.session.model.hook_dict
        names = ["blocks.0.hook_resid_pre", "hook_pos_embed"]
        for layer in range(self.before):
            names += [f"blocks.{layer}.{one}" for one in ("attn.hook_z", "hook_attn_out", "hook_mlp_out")]
        return [name for name in names if name in known]

    @contextmanager
    def attached(self) -> Iterator[None]:
        """While the block runs, forward passes are read; the last one is kept."""
        receivers: dict[str, Callable[[Tensor], None]] = {name: partial(self.keep, name) for name in self.points()}
        with watching(self.session.model, receivers):
            yield

    def keep(self, name: str, value: Tensor) -> None:
        self.seen[name] = value.detach()
        self.written.clear()

    def sources(self, layer: int, residual: Float[Tensor, "pos d_model"], row: int = 0) -> ResidualSources:
        """Return the sources before a layer whose residual stream this is, of one prompt of the batch; call it when
        the pass has come so far."""
        with torch.no_grad(), without_hooks(self.session.model):  # norms are called, which have hooks
            named = dict(self.before_layer(-1, row, residual))
            for index in range(layer):
                named |= self.before_layer(index, row, residual)
        residual = double(residual)  # layers may be spread over devices
        values = torch.stack([value.to(residual.device) for value in named.values()])
        low, high = values.aminmax()
        off, reach = float((values.sum(0) - residual).abs().max()), float(torch.maximum(-low, high))
        if not off <= tolerance(self.session.dtype) * reach:
            raise UnsupportedModelError(
                f"layer {layer}: what earlier layers wrote does not add up to its residual stream: off by {off:.2g} "
                f"where it reaches {float(residual.abs().max()):.2g} (blocks that scale what they add?); {REMEDY}"
            )
        return ResidualSources(tuple(named), values, residual)

    def before_layer(self, layer: int, row: int, residual: Float[Tensor, "pos d_model"]) -> dict[str, Tensor]:
        """Return what one layer wrote, or what enters the first one, layer -1; made once a pass."""
        if (layer, row) not in self.written:
            found = self.embeddings(row, residual) if layer < 0 else self.attention(layer, row) | self.mlp(layer, row)
            self.written[layer, row] = {name: value for name, value in found.items() if bool(value.any())}
        return self.written[layer, row]

    def read(self, name: str, row: int) -> Tensor:
        if name not in self.seen:
            raise UnsupportedModelError(f"{name} does not fire, so what it carries cannot be a source; {REMEDY}")
        value = self.seen[name]
        return double(value[min(row, len(value) - 1)])

    def embeddings(self, row: int, residual: Float[Tensor, "pos d_model"]) -> dict[str, Tensor]:
        """Return what enters layer 0: learned positions, and all else as the embedding."""
        entering = self.read("blocks.0.hook_resid_pre", row).to(residual.device)
        if "hook_pos_embed" not in self.seen:
            return {"embed": entering}
        positions = double(self.seen["hook_pos_embed"]).to(entering).reshape(-1, *entering.shape)
        positions = positions[min(row, len(positions) - 1)]
        return {"embed": entering - positions, "pos_embed": positions}

    def attention(self, layer: int, row: int) -> dict[str, Tensor]:
        """Return what each head of a layer wrote, or all of them together, and the bias."""
        attn, block = self.session.attention(layer), self.session.backend.model.blocks[layer]
        bias, out = getattr(attn, "b_O", None), self.read(f"blocks.{layer}.hook_attn_out", row)
        bias = None if bias is None else double(bias.detach()).expand_as(out)
        if self.by == "layer" and not hasattr(block, "ln1_post"):
            own = {} if bias is None else {f"L{layer} attention bias": bias}
            return {f"L{layer} attention": out if bias is None else out - bias, **own}
        z, weight = self.read(f"blocks.{layer}.attn.hook_z", row), double(attn.W_O.detach())
        z = z if z.ndim == 3 else z.unflatten(-1, (len(weight), -1))
        if self.by == "head":
            values = torch.einsum("phd,hdm->hpm", z, weight)
            named = {head_name(layer, head): one for head, one in enumerate(values)}
        else:
            named = {f"L{layer} attention": torch.einsum("phd,hdm->pm", z, weight)}
        if bias is not None:
            named[f"L{layer} attention bias"] = bias
        before = torch.stack(list(named.values())).sum(0)
        if near(before, out, self.session.dtype):
            return named
        norm = _norm_between(self.session, layer, before, out)
        if norm is None:
            raise UnsupportedModelError(
                f"layer {layer}: what its heads write through W_O does not add up to what its attention adds to the "
                f"residual stream, nor does a norm of it; {REMEDY}"
            )
        named = {name: norm.linear(value) for name, value in named.items()}
        return {**named, f"L{layer} attention norm bias": norm.beta.expand_as(out)}

    def mlp(self, layer: int, row: int) -> dict[str, Tensor]:
        """Return what the MLP of a layer wrote, its bias apart unless a norm stands behind it; nothing without one."""
        block = self.session.backend.model.blocks[layer]
        if not hasattr(block, "mlp"):
            return {}
        out = self.read(f"blocks.{layer}.hook_mlp_out", row)
        bias = getattr(block.mlp, "b_out", None)
        if not isinstance(bias, Tensor) or bias.shape != out.shape[-1:] or hasattr(block, "ln2_post"):
            return {f"L{layer} MLP": out}
        bias = double(bias.detach()).expand_as(out)
        return {f"L{layer} MLP": out - bias, f"L{layer} MLP bias": bias}


def place_of_source(name: str) -> tuple[int, int]:
    """Return where a source stands among others: embeddings, then layer by layer, then biases of queries and keys.

    Example:
        >>> sorted(["b_K", "L10 MLP", "L2H0", "embed"], key=place_of_source)
        ['embed', 'L2H0', 'L10 MLP', 'b_K']
    """
    layer = re.match(r"L(\d+)", name)
    return (1, int(layer[1])) if layer else (0 if "embed" in name else 2, 0)


def near(x: Tensor, y: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether two streams are equal but for rounding in the model's dtype."""
    return bool((double(x) - double(y)).abs().max() <= tolerance(dtype) * double(y).abs().max())


def _norm_between(session: Session, layer: int, x: Tensor, y: Tensor) -> FrozenNorm | None:
    """Return the norm of a block that makes y [pos, d_model] of x, frozen; None where none of its norms does."""
    for name, module in session.backend.model.blocks[layer].named_children():
        if name.startswith("ln"):
            frozen = freeze(partial(called, module, session), x, y)
            if frozen.error <= tolerance(session.dtype):
                return frozen
    return None


def called(module: torch.nn.Module, session: Session, x: Float[Tensor, "row d"]) -> Float[Tensor, "row d"]:
    """Return what a module of the model makes of rows, in the model's dtype and on the module's device."""
    device = next((one.device for one in module.parameters()), x.device)
    return module(x[None].to(device, session.dtype))[0].to(x.device)


# Queries and keys


Side = Literal["query", "key"]
ROUNDING = "rounding"  # what half precision takes away, as a source


def frozen_layer(session: Session, capture: LayerCapture, side: Side) -> FrozenMap:
    """Return the map from the residual stream to the queries, or keys, of all heads of the layer.

    Args:
        capture: with its `resid`, `inputs` and `projections`, after the pass.

    Raises:
        UnsupportedModelError: the attention's input is no norm of the residual stream, or queries and keys are clipped.
    """
    resid, inputs, projections = capture.resid, capture.inputs, capture.projections
    assert resid is not None
    assert inputs is not None
    assert projections is not None
    part = side[0]
    weight, bias = (projections.w_q, projections.b_q) if part == "q" else (projections.w_k, projections.b_k)
    with torch.no_grad(), without_hooks(session.model):
        norm = _attention_norm(session, capture.layer, resid.to(inputs.device), inputs)
        raw = inputs.to(weight.dtype) @ weight + (0 if bias is None else bias[:, None])
        behind = _norm_behind(partial(projections.finish, part), raw, session.dtype, capture.layer)
    if part == "k":
        weight, bias = projections.per_query_head(weight), None if bias is None else projections.per_query_head(bias)
        if behind is not None:
            per_head = (projections.per_query_head(x) for x in (behind.gamma, behind.beta, behind.factor))
            gamma, beta, factor = per_head
            behind = FrozenNorm(gamma, beta, behind.centred, factor, behind.error)
    return frozen_map(norm, weight, bias, behind, ("ln bias", f"b_{part.upper()}", f"{part}_norm bias"))


def _attention_norm(
    session: Session, layer: int, resid: Float[Tensor, "pos d_model"], inputs: Float[Tensor, "pos d_model"]
) -> FrozenNorm:
    """Return the norm before attention, frozen; the identity where there is none."""
    if near(resid, inputs, session.dtype):
        ones = torch.ones_like(double(resid))
        return FrozenNorm(ones[0], 0 * ones[0], False, ones[:, 0], 0.0)
    norm = _norm_between(session, layer, resid, inputs)
    if norm is None:
        raise UnsupportedModelError(
            f"layer {layer}: no norm of the block makes its attention's input of the residual stream, so queries and "
            "keys cannot be traced to what earlier layers wrote"
        )
    return norm


def _norm_behind(
    finish: partial, raw: Float[Tensor, "some_head pos d_head"], dtype: torch.dtype, layer: int
) -> FrozenNorm | None:
    """Return the norm of queries or keys, frozen; None where there is none."""
    found = finish(raw)
    if near(raw, found, dtype):
        return None
    norm = freeze(finish, raw, found)
    if norm.error > tolerance(dtype):
        raise UnsupportedModelError(
            f"layer {layer}: what follows the projection to queries and keys is no norm (clipping?), so they cannot be "
            "traced to what earlier layers wrote"
        )
    return norm


def source_vectors(
    frozen: FrozenMap,
    names: tuple[str, ...],
    sources: Float[Tensor, "source pos d_model"],
    whole: Float[Tensor, "pos d_head"],
    dtype: torch.dtype,
) -> tuple[tuple[str, ...], Float[Tensor, "all_source pos d_head"]]:
    """Return what each source adds to the queries or keys of one head, with names.

    Args:
        frozen: the map of one head.
        whole: the vectors that the pass had. In half precision what the sources leave of them is a source too.

    Raises:
        UnsupportedModelError: the vectors do not add up to `whole`.
    """
    vectors, names = frozen.vectors(sources)[:, 0], frozen.names(names)
    rest = double(whole) - vectors.sum(0)
    require_small(rest, whole, dtype)
    if dtype.itemsize < torch.float32.itemsize:
        return (*names, ROUNDING), torch.cat([vectors, rest[None]])
    return names, vectors


def require_small(rest: Tensor, whole: Tensor, dtype: torch.dtype) -> None:
    """Refuse sources that leave more of queries or keys than rounding does."""
    off, reach = float(rest.abs().max()), float(whole.abs().max())
    if not off <= tolerance(dtype) * reach:
        raise UnsupportedModelError(
            f"what the sources write does not add up to queries or keys: off by {off:.2g} where they reach {reach:.2g}"
        )
