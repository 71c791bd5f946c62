"""The residual stream as a sum of what embeddings, heads and MLPs wrote, and queries and keys as linear maps of it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.capture.capturing import run_capture, watching
from tl_posgen.models.geometry.proof import tolerance
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.same_logits import without_hooks
from tl_posgen.models.selection import head_name, select_heads
from tl_posgen.models.session import Session, session_of
from tl_posgen.residual.numbers import REST, FrozenMap, FrozenNorm, SourceSums, freeze, frozen_map

By = Literal["layer", "head"]
Side = Literal["q", "k"]
ROUNDING = "rounding"  # what half precision takes away, as a source
REMEDY = "explain takes parts of your own, parts={name: [pos, d_model]} with rest=True"


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
    layers = list(select_heads(session, layer))
    if len(layers) != 1:
        raise InputError(f"layer={layer!r}: give one layer")
    if not isinstance(tokens, Tensor) or not tokens.numel() or tokens.numel() != max(tokens.shape, default=0):
        shape_or_type = f"shape {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise InputError(f"tokens of {shape_or_type}: give the token ids of one prompt, as model.to_tokens(text) does")
    ((capture, reader),) = read_prompts(session, [tokens.flatten()], needs={"resid"}, layers=layers)
    return reader.of_capture(capture)


def read_prompts(
    session: Session,
    rows: Iterable[Int[Tensor, " _"]],
    by: By = "head",
    needs: Iterable[str] = ("resid", "inputs"),
    **where: Any,
) -> Iterator[tuple[LayerCapture, "SourceReader"]]:
    """Yield every chosen layer of every prompt, with a reader of what earlier layers wrote in that pass.

    Args:
        by: whether a source is a head, or all heads of a layer.
        needs: of `run_capture`; without "resid" nothing can be read.
        where: layers or heads.
    """
    last = max(select_heads(session, **where)) if "resid" in needs else 0
    for number, row in enumerate(rows):
        reader, captures = SourceReader(session, last, by), list[LayerCapture]()
        with watching(session.model, {name: partial(reader.keep, name) for name in reader.points()}):
            run_capture(session, row[None], captures.append, needs, **where)
        while captures:  # let go one by one
            captures[0].prompt = number
            yield captures.pop(0), reader


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
        hook_points = self.session.model.hook_dict
        names = ["blocks.0.hook_resid_pre", "hook_pos_embed"]
        for layer in range(self.before):
            names += [f"blocks.{layer}.{point}" for point in ("attn.hook_z", "hook_attn_out", "hook_mlp_out")]
        return [name for name in names if name in hook_points]

    def keep(self, name: str, value: Tensor, hook: Any = None) -> None:
        """Keep what a hook point carries, of the last pass."""
        self.seen[name] = value.detach()
        self.written.clear()

    def of_capture(self, capture: LayerCapture) -> ResidualSources:
        """Return the sources before the layer of a capture with its residual stream, of one prompt."""
        assert capture.resid is not None
        return self.sources(capture.layer, capture.resid.to(capture.device))  # layers may be spread over devices

    def sources(self, layer: int, residual: Float[Tensor, "pos d_model"], row: int = 0) -> ResidualSources:
        """Return the sources before a layer whose residual stream this is, of one prompt of the batch; call it when
        the pass has come so far."""
        named, residual = dict[str, Tensor](), double(residual)
        with torch.no_grad(), without_hooks(self.session.model):  # norms are called, which have hooks
            for index in range(-1, layer):
                if (index, row) not in self.written:
                    sources = self._of_layer(index, row) if index >= 0 else self._embeddings(row)
                    self.written[index, row] = {name: value for name, value in sources.items() if bool(value.any())}
                named |= self.written[index, row]
        values = torch.stack([value.to(residual.device) for value in named.values()])
        off, ends = float((values.sum(0) - residual).abs().max()), values.aminmax()
        if not off <= tolerance(self.session.dtype) * max(-float(ends.min), float(ends.max)):
            raise UnsupportedModelError(
                f"layer {layer}: what earlier layers wrote does not add up to its residual stream: off by {off:.2g} "
                f"where it reaches {float(residual.abs().max()):.2g} (blocks that scale what they "
                f"add? hooks that change it, given behind those that read it?); {REMEDY}"
            )
        return ResidualSources(tuple(named), values, residual)

    def _read(self, name: str, row: int) -> Tensor:
        if name not in self.seen:
            raise UnsupportedModelError(f"{name} does not fire, so what it carries cannot be a source; {REMEDY}")
        value = self.seen[name]
        return double(value[min(row, len(value) - 1)])

    def _embeddings(self, row: int) -> dict[str, Tensor]:
        """Return what enters layer 0: learned positions, and all else as the embedding."""
        entering = self._read("blocks.0.hook_resid_pre", row)
        if "hook_pos_embed" not in self.seen:
            return {"embed": entering}
        positions = double(self.seen["hook_pos_embed"]).to(entering).reshape(-1, *entering.shape)
        positions = positions[min(row, len(positions) - 1)]
        return {"embed": entering - positions, "pos_embed": positions}

    def _of_layer(self, layer: int, row: int) -> dict[str, Tensor]:
        """Return what each head of a layer wrote, or all of them together, its MLP, and their biases; that of an MLP
        apart only where no norm stands behind it."""
        attn, block = self.session.attention(layer), self.session.backend.model.blocks[layer]
        of_mlp = dict[str, Tensor]()
        if hasattr(block, "mlp"):
            out, bias = self._read(f"blocks.{layer}.hook_mlp_out", row), getattr(block.mlp, "b_out", None)
            of_mlp[f"L{layer} MLP"] = out
            if isinstance(bias, Tensor) and bias.shape == out.shape[-1:] and not hasattr(block, "ln2_post"):
                bias = double(bias.detach()).expand_as(out)
                of_mlp |= {f"L{layer} MLP": out - bias, f"L{layer} MLP bias": bias}
        bias, out = getattr(attn, "b_O", None), self._read(f"blocks.{layer}.hook_attn_out", row)
        bias = {} if bias is None else {f"L{layer} attention bias": double(bias.detach()).expand_as(out)}
        if self.by == "layer" and not hasattr(block, "ln1_post"):
            return {f"L{layer} attention": out - sum(bias.values()), **bias, **of_mlp}
        z, weight = self._read(f"blocks.{layer}.attn.hook_z", row), double(attn.W_O.detach())
        z = z if z.ndim == 3 else z.unflatten(-1, (len(weight), -1))
        if self.by == "head":
            values = torch.einsum("phd,hdm->hpm", z, weight)
            named = {head_name(layer, head): value for head, value in enumerate(values)} | bias
        else:
            named = {f"L{layer} attention": torch.einsum("phd,hdm->pm", z, weight)} | bias
        before = torch.stack(list(named.values())).sum(0)
        if not is_close(before, out, self.session.dtype):
            norm = _norm_between(self.session, layer, before, out)
            if norm is None:
                raise UnsupportedModelError(
                    f"layer {layer}: what its heads write through W_O does not add up to what its attention adds to "
                    f"the residual stream, nor does a norm of it (hooks that change it, given behind those that "
                    f"read it?); {REMEDY}"
                )
            named = {name: norm.linear(value) for name, value in named.items()}
            named[f"L{layer} attention norm bias"] = norm.beta.expand_as(out)
        return named | of_mlp


def is_close(x: Tensor, y: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether two streams are equal but for rounding in the model's dtype."""
    return bool((double(x) - double(y)).abs().max() <= tolerance(dtype) * double(y).abs().max())


def called(module: torch.nn.Module, session: Session, x: Float[Tensor, "row d"]) -> Float[Tensor, "row d"]:
    """Return what a module of the model makes of rows, in the model's dtype and on the module's device."""
    device = next((parameter.device for parameter in module.parameters()), x.device)
    return module(x[None].to(device, session.dtype))[0].to(x.device)


def _norm_between(session: Session, layer: int, x: Tensor, y: Tensor) -> FrozenNorm | None:
    """Return the norm of a block that makes y [pos, d_model] of x, frozen; None where none of its norms does."""
    for name, module in session.backend.model.blocks[layer].named_children():
        if name.startswith("ln"):
            frozen = freeze(partial(called, module, session), x, y)
            if frozen.error <= tolerance(session.dtype):
                return frozen
    return None


def frozen_layer(session: Session, capture: LayerCapture, side: Side) -> FrozenMap:
    """Return the map from the residual stream to the queries, or keys, of all heads of the layer.

    Args:
        capture: with its `resid`, `inputs` and `projections`, after the pass.

    Raises:
        UnsupportedModelError: the attention's input is no norm of the residual stream, or queries and keys are clipped.
    """
    inputs, projections, dtype = capture.inputs, capture.projections, session.dtype
    assert capture.resid is not None
    assert inputs is not None
    assert projections is not None
    resid, untraced = capture.resid.to(inputs.device), "be traced to what earlier layers wrote"
    weight, bias = (projections.w_q, projections.b_q) if side == "q" else (projections.w_k, projections.b_k)
    finish = partial(projections.finish, side)
    with torch.no_grad(), without_hooks(session.model):
        if is_close(resid, inputs, dtype):  # there is none
            ones = torch.ones_like(double(resid))
            norm = FrozenNorm(ones[0], 0 * ones[0], False, ones[:, 0], 0.0)
        else:
            norm = _norm_between(session, capture.layer, resid, inputs)
        raw = inputs.to(weight.dtype) @ weight + (0 if bias is None else bias[:, None])
        finished = finish(raw)
        behind = None if is_close(raw, finished, dtype) else freeze(finish, raw, finished)
    if norm is None:
        raise UnsupportedModelError(
            f"layer {capture.layer}: no norm of the block makes its attention's input of the residual stream, so "
            f"queries and keys cannot {untraced}"
        )
    if behind is not None and behind.error > tolerance(dtype):
        raise UnsupportedModelError(
            f"layer {capture.layer}: what follows the projection to queries and keys is no norm (clipping?), so they "
            f"cannot {untraced}"
        )
    if side == "k":
        per_query_head = projections.per_query_head
        weight, bias = per_query_head(weight), None if bias is None else per_query_head(bias)
        if behind is not None:
            gamma, beta, factor = map(per_query_head, (behind.gamma, behind.beta, behind.factor))
            behind = FrozenNorm(gamma, beta, behind.centred, factor, behind.error)
    return frozen_map(norm, weight, bias, behind, ("ln bias", f"b_{side.upper()}", f"{side}_norm bias"))


@dataclass(frozen=True)
class SourceVectors:
    """x_t = sum_s x_{s,t}: queries or keys of the heads of a capture as sums of what each source gives them, float64.

    Attributes:
        whole: the vectors that the pass had.
        written: the sources of the residual stream.
        frozen: makes queries or keys of them.
        names: of the sources, biases included; last what half precision took away, where the model's is that coarse.
    """

    whole: Float[Tensor, "head pos d_head"]
    written: ResidualSources
    frozen: FrozenMap
    names: tuple[str, ...]

    @classmethod
    def of_capture(
        cls, session: Session, capture: LayerCapture, written: ResidualSources, side: Side
    ) -> "SourceVectors":
        """Return one side of a capture with its resid, inputs and projections.

        Raises:
            UnsupportedModelError: what the sources give does not add up to the queries or keys.
        """
        vectors, dtype = double((capture.q if side == "q" else capture.k).detach()), session.dtype
        frozen = frozen_layer(session, capture, side).of_heads(capture.heads)
        off = float((frozen.vectors(written.residual[None]).sum(0) - vectors).abs().max())
        reach = float(vectors.abs().max())
        if not off <= tolerance(dtype) * reach:
            raise UnsupportedModelError(
                "what the sources write does not add up to queries or keys: "
                f"off by {off:.2g} where they reach {reach:.2g}"
            )
        names = (*written.names, *frozen.constants)
        return cls(vectors, written, frozen, (*names, ROUNDING) if dtype.itemsize < torch.float32.itemsize else names)

    def vectors(self) -> Float[Tensor, "source head pos d_head"]:
        """Return what each source gives to every vector."""
        return self._with_rounding(self.frozen.vectors(self.written.values), self.whole)

    def sums(self, tokens: slice = REST) -> SourceSums:
        """Return the sums over tokens of what each source gives."""
        vectors = self.whole[:, tokens]
        n = vectors.shape[1]
        values = n * self.frozen.mean_vectors(self.written.values, tokens)
        return SourceSums(n, self.names, self._with_rounding(values, vectors.sum(1)))

    def products(self, weights: Float[Tensor, "head pos d_head"], tokens: slice = REST) -> SourceSums:
        """Return the sums over tokens of the products of what each source gives with weights."""
        products = (self.whole * weights)[:, tokens]
        values = self.frozen.products(self.written.values, weights, tokens)
        return SourceSums(products.shape[1], self.names, self._with_rounding(values, products.sum((1, 2))))

    def _with_rounding(self, values: Float[Tensor, "source *rest"], total: Float[Tensor, "*rest"]) -> Tensor:
        return torch.cat([values, (total - values.sum(0))[None]]) if ROUNDING in self.names else values
