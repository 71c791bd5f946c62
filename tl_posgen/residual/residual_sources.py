"""Sources of the residual stream at a layer's input: what the embedding, earlier heads and MLPs wrote."""

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
from tl_posgen.models.wrapped import WrappedModel, wrap
from tl_posgen.residual.numbers.frozen_norm import FrozenNorm, freeze

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
    wrapped = wrap(model)
    layers = list(select_heads(wrapped.model, layer))
    if len(layers) != 1:
        raise InputError(f"layer={layer!r}: give one layer")
    if not isinstance(tokens, Tensor) or not tokens.numel() or tokens.numel() != max(tokens.shape, default=0):
        given = f"shape {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise InputError(f"tokens of {given}: give the token ids of one prompt, as model.to_tokens(text) does")
    reading, found = SourceReader(wrapped, layers[0]), list[LayerCapture]()
    with reading.attached():
        run_capture(wrapped, tokens.reshape(1, -1), found.append, {"resid"}, layers=layers)
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

    wrapped: WrappedModel
    before: int
    by: By = "head"
    seen: dict[str, Tensor] = field(default_factory=dict)
    written: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict)

    def points(self) -> list[str]:
        """Return the names of the hook points that are read."""
        known = self.wrapped.model.hook_dict
        names = ["blocks.0.hook_resid_pre", "hook_pos_embed"]
        for layer in range(self.before):
            names += [f"blocks.{layer}.{one}" for one in ("attn.hook_z", "hook_attn_out", "hook_mlp_out")]
        return [name for name in names if name in known]

    @contextmanager
    def attached(self) -> Iterator[None]:
        """While the block runs, forward passes are read; the last one is kept."""
        receivers: dict[str, Callable[[Tensor], None]] = {name: partial(self.keep, name) for name in self.points()}
        with watching(self.wrapped.model, receivers):
            yield

    def keep(self, name: str, value: Tensor) -> None:
        self.seen[name] = value.detach()
        self.written.clear()

    def sources(self, layer: int, residual: Float[Tensor, "pos d_model"], row: int = 0) -> ResidualSources:
        """Return the sources before a layer whose residual stream this is, of one prompt of the batch; call it when
        the pass has come so far."""
        with torch.no_grad(), without_hooks(self.wrapped.model):  # norms are called, which have hooks
            named = dict(self.before_layer(-1, row, residual))
            for index in range(layer):
                named |= self.before_layer(index, row, residual)
        residual = double(residual)  # layers may be spread over devices
        values = torch.stack([value.to(residual.device) for value in named.values()])
        low, high = values.aminmax()
        off, reach = float((values.sum(0) - residual).abs().max()), float(torch.maximum(-low, high))
        if not off <= tolerance(self.wrapped.dtype) * reach:
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
        attn, block = self.wrapped.attention(layer), self.wrapped.backend.model.blocks[layer]
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
        if near(before, out, self.wrapped.dtype):
            return named
        norm = norm_between(self.wrapped, layer, before, out)
        if norm is None:
            raise UnsupportedModelError(
                f"layer {layer}: what its heads write through W_O does not add up to what its attention adds to the "
                f"residual stream, nor does a norm of it; {REMEDY}"
            )
        named = {name: norm.linear(value) for name, value in named.items()}
        return {**named, f"L{layer} attention norm bias": norm.beta.expand_as(out)}

    def mlp(self, layer: int, row: int) -> dict[str, Tensor]:
        """Return what the MLP of a layer wrote, its bias apart unless a norm stands behind it; nothing without one."""
        block = self.wrapped.backend.model.blocks[layer]
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


def norm_between(wrapped: WrappedModel, layer: int, x: Tensor, y: Tensor) -> FrozenNorm | None:
    """Return the norm of a block that makes y [pos, d_model] of x, frozen; None where none of its norms does."""
    for name, module in wrapped.backend.model.blocks[layer].named_children():
        if name.startswith("ln"):
            frozen = freeze(partial(called, module, wrapped), x, y)
            if frozen.error <= tolerance(wrapped.dtype):
                return frozen
    return None


def called(module: torch.nn.Module, wrapped: WrappedModel, x: Float[Tensor, "row d"]) -> Float[Tensor, "row d"]:
    """Return what a module of the model makes of rows, in the model's dtype and on the module's device."""
    device = next((one.device for one in module.parameters()), x.device)
    return module(x[None].to(device, wrapped.dtype))[0].to(x.device)
