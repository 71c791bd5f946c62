"""How each layer makes its queries and keys: the attention's input, and W_Q, W_K with their biases, proved."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.backend import Model, backend_of
from tl_posgen.models.capture import LayerCapture
from tl_posgen.models.hooks import chosen, run_capture
from tl_posgen.models.probe import Probed, probe, supported
from tl_posgen.models.proof import tolerance
from tl_posgen.models.sites import at_least_float32


@dataclass(frozen=True)
class Projections:
    """Q = finish(H W_Q + b_Q), K = finish(H W_K + b_K): from a layer's normed input to what enters RoPE.

    Attributes:
        layer: index of the layer in the model.
        w_q, w_k: one matrix a query head, and one a key head; float32 at least.
        b_q, b_k: their biases, or None.
        n_heads: query heads; head h reads key head h // (n_heads / key heads).
    """

    layer: int
    w_q: Float[Tensor, "head d_model d_head"]
    w_k: Float[Tensor, "key_head d_model d_head"]
    b_q: Float[Tensor, "head d_head"] | None
    b_k: Float[Tensor, "key_head d_head"] | None
    n_heads: int
    _finish: Callable[[str, Tensor], Tensor] = field(repr=False)

    def queries(self, inputs: Float[Tensor, "pos d_model"]) -> Float[Tensor, "head pos d_head"]:
        """The queries that any inputs H would give, as they enter RoPE: after qk-norm and clipping."""
        return self._finish("q", _affine(inputs, self.w_q, self.b_q))

    def keys(self, inputs: Float[Tensor, "pos d_model"]) -> Float[Tensor, "head pos d_head"]:
        """The same of the keys, repeated for grouped heads: one row a query head, as in a capture."""
        return self.per_query_head(self._finish("k", _affine(inputs, self.w_k, self.b_k)))

    def per_query_head(self, x: Float[Tensor, "key_head *rest"]) -> Float[Tensor, "head *rest"]:
        return x.repeat_interleave(self.n_heads // len(x), dim=0)


Consumer = Callable[[LayerCapture, Float[Tensor, "pos d_model"], Projections], None]


def run_projections(
    model: Model,
    tokens: Int[Tensor, " pos"],
    consumer: Consumer,
    needs: frozenset[str] = frozenset(),
    layers: Sequence[int] | None = None,
) -> None:
    """One forward pass; `consumer(capture, inputs, projections)` for each layer, inputs being what enters W_Q and W_K.

    That `projections` make the captured queries and keys from `inputs` is proved for every layer before it is handed
    over: the error must be below the tolerance of the geometry's proof, as a share of the largest entry.

    Args:
        tokens: one prompt, without padding.
        needs, layers: as in `run_capture`.

    Raises:
        UnsupportedModelError: a layer whose queries or keys are something else than an affine map of one input (with
            a norm or clipping after it): adapters, quantised weights, latent attention.
        InputError: as `run_capture`; also a model that splits its attention's input by head.

    Example:
        >>> import torch
        >>> from tl_posgen import load_model
        >>> shapes = []
        >>> run_projections(load_model("mini"), torch.arange(9), lambda c, h, p: shapes.append((h.shape, p.w_q.shape)))
        >>> len(shapes), shapes[0][0][0], len(shapes[0][1])
        (4, 9, 3)
    """
    indices = chosen(layers, model.cfg.n_layers, "layer")
    found = {layer: projections_of(model, layer) for layer in indices}
    inputs: dict[int, Tensor] = {}
    allowed = tolerance(next(model.parameters()).dtype)

    def take(capture: LayerCapture) -> None:
        h = at_least_float32(inputs.pop(capture.layer)[0])
        prove_projections(found[capture.layer], h, capture, allowed)
        consumer(capture, h, found[capture.layer])

    with torch.no_grad(), attention_inputs(model, indices, inputs):
        run_capture(model, tokens[None], take, needs, indices)


def projections_of(model: Model, layer: int) -> Projections:
    """Weights and biases of one layer as the model has them; `run_projections` proves that they are all there is.

    Raises:
        UnsupportedModelError: the layer has no W_Q and W_K of the usual shape, or its geometry is not supported.
    """
    probed, attn = supported(probe(model)[layer]), model.blocks[layer].attn
    geometry = probed.geometry
    heads = {"Q": geometry.n_heads, "K": geometry.n_key_value_heads}
    weights = {side: getattr(attn, f"W_{side}", None) for side in heads}
    for side, weight in weights.items():
        if not isinstance(weight, Tensor) or weight.ndim != 3 or len(weight) % heads[side]:
            raise UnsupportedModelError(
                f"layer {layer}: its W_{side} is not one matrix a head, so queries and keys cannot be traced to the "
                "attention's input (latent attention, or quantised weights?)"
            )

    def one_a_head(x: Tensor | None, n: int) -> Tensor | None:
        # TransformerLens may give shared keys once for every query head
        return None if x is None else at_least_float32(x.detach())[:: len(x) // n]

    w_q, w_k = (one_a_head(weights[side], n) for side, n in heads.items())
    b_q, b_k = (one_a_head(getattr(attn, f"b_{side}", None), n) for side, n in heads.items())
    assert w_q is not None
    assert w_k is not None
    return Projections(layer, w_q, w_k, b_q, b_k, geometry.n_heads, partial(_finish, model, probed))


def prove_projections(
    projections: Projections, inputs: Float[Tensor, "pos d_model"], capture: LayerCapture, allowed: float
) -> None:
    """Recompute queries and keys: max |recomputed - captured| / max |captured| must not exceed `allowed`.

    Raises:
        UnsupportedModelError: it does; the message says which, by how much and likely why.
    """
    for name, made, actual in (("q", projections.queries, capture.q), ("k", projections.keys, capture.k)):
        error = float((made(inputs)[list(capture.heads)] - actual).abs().max() / actual.abs().max())
        if not error <= allowed:  # also when it is not a number
            raise UnsupportedModelError(
                f"layer {capture.layer}: its {name} differs by {error:.1e} of its largest entry from what its weight "
                "and bias make of the attention's input, so they are not the whole projection "
                "(adapters, quantised weights, a gate, or hooks that change it?)"
            )


@contextmanager
def attention_inputs(model: Model, layers: Sequence[int], seen: dict[int, Tensor]) -> Iterator[None]:
    """While the block runs, seen[layer] is what the layer's attention was last given: the stream after its norm."""

    def see(layer: int, _module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        # asked of the module, as hook_normalized is before the norm's weight in some norms and after it in others
        x = kwargs.get("query_input", kwargs.get("hidden_states", args[0] if args else None))
        if not isinstance(x, Tensor) or x.ndim != 3:
            raise InputError(
                f"layer {layer}: its attention is not given one input for all heads; "
                "call model.set_use_split_qkv_input(False) and model.set_use_attn_in(False)"
            )
        seen[layer] = x.detach()

    handles = [
        model.blocks[layer].attn.register_forward_pre_hook(partial(see, layer), with_kwargs=True) for layer in layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _affine(
    inputs: Float[Tensor, "pos d_model"],
    weight: Float[Tensor, "head d_model d_head"],
    bias: Float[Tensor, "head d_head"] | None,
) -> Float[Tensor, "head pos d_head"]:
    x = inputs.to(weight.dtype) @ weight
    return x if bias is None else x + bias[:, None]


def _finish(
    model: Model, probed: Probed, part: str, x: Float[Tensor, "head pos d_head"]
) -> Float[Tensor, "head pos d_head"]:
    """qk-norm and clipping, as the hooks' readers know them; a bridge's norm is a module of its attention."""
    x = x.transpose(0, 1)[None]
    if backend_of(model) == "bridge" and probed.geometry.qk_norm:
        norm = getattr(model.blocks[probed.geometry.layer].attn, f"{part}_norm")
        norm = getattr(norm, "original_component", norm)  # the bridge's own would fire its hooks
        per_head = norm.weight.numel() == x.shape[-1]
        x = norm(x.transpose(1, 2) if per_head else x.flatten(2)).detach()
    return probed.sites.read(part, x)[0]
