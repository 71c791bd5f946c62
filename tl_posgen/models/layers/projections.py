"""Projections to queries and keys: W_Q, W_K with their biases, and the proof that they are all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import summable
from tl_posgen.errors import UnsupportedModelError
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.rope.rotation import at_least_float32


@dataclass(frozen=True)
class Projections:
    """Q = finish(H W_Q + b_Q), K = finish(H W_K + b_K): from a layer's normed input to what enters RoPE.

    Attributes:
        layer: index of the layer in the model.
        w_q, w_k: one matrix a query head, and one a key head; float32 at least.
        b_q, b_k: their biases, or None.
        n_heads: query heads; head h reads key head h // (n_heads / key heads).
        finish: what follows the affine map, qk-norm and clipping, of part "q" or "k" [head, pos, d_head] of all heads.
    """

    layer: int
    w_q: Float[Tensor, "head d_model d_head"]
    w_k: Float[Tensor, "key_head d_model d_head"]
    b_q: Float[Tensor, "head d_head"] | None
    b_k: Float[Tensor, "key_head d_head"] | None
    n_heads: int
    finish: Callable[[str, Tensor], Tensor] = field(repr=False)

    def queries(self, inputs: Float[Tensor, "pos d_model"], *, biases: bool = True) -> Float[Tensor, "head pos d_head"]:
        """Return the queries that inputs H give, as they enter RoPE: after qk-norm and clipping; without their bias if
        told so."""
        return self._made("q", inputs, self.w_q, self.b_q if biases else None)

    def keys(self, inputs: Float[Tensor, "pos d_model"], *, biases: bool = True) -> Float[Tensor, "head pos d_head"]:
        """Return the keys that inputs H give, repeated for grouped heads: one row a query head, as in a capture."""
        return self.per_query_head(self._made("k", inputs, self.w_k, self.b_k if biases else None))

    def _made(self, part: str, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x = inputs.to(weight.dtype) @ weight
        return self.finish(part, x if bias is None else x + bias[:, None])

    @property
    def biased(self) -> list[str]:
        """Return the sides, of "q" and "k", whose bias is not zero: a HookedTransformer has zeros for none."""
        return [side for side, bias in (("q", self.b_q), ("k", self.b_k)) if bias is not None and bias.any()]

    @property
    def biases(self) -> tuple[Float[Tensor, "head d_head"], Float[Tensor, "head d_head"]]:
        """Return b_q and b_k, zeros for none; one row a query head, as in a capture."""
        q, k = (w[:, 0] * 0 if b is None else b for w, b in ((self.w_q, self.b_q), (self.w_k, self.b_k)))
        return q, self.per_query_head(k)

    @property
    def is_affine(self) -> bool:
        """Tell whether nothing follows the affine map, so that a bias is a summand of what enters RoPE: large numbers,
        which a norm or clipping would change, stay as they are."""
        for part, weight in (("q", self.w_q), ("k", self.w_k)):
            n_heads, _, d_head = weight.shape
            large = 1e4 * torch.linspace(-1, 1, n_heads * 2 * d_head, dtype=weight.dtype, device=weight.device)
            x = large.view(n_heads, 2, d_head)
            if not torch.equal(self.finish(part, x).to(x), x):
                return False
        return True

    def per_query_head(self, x: Float[Tensor, "key_head *rest"]) -> Float[Tensor, "head *rest"]:
        """Repeat what belongs to a key head for each of its query heads."""
        return x.repeat_interleave(self.n_heads // len(x), dim=0)


def projections_of(attention: Any, geometry: LayerGeometry, finish: Callable[[str, Tensor], Tensor]) -> Projections:
    """Return weights and biases of one layer as the model has them; `prove_projections` shows that they are all."""
    parts: dict[str, Any] = {}
    for side, (weight, n) in projection_weights(attention, geometry).items():
        bias = getattr(attention, f"b_{side.upper()}", None)
        # TransformerLens may give shared keys once for every query head
        parts[f"w_{side}"] = at_least_float32(summable(weight.detach()))[:: len(weight) // n]
        parts[f"b_{side}"] = None if bias is None else at_least_float32(summable(bias.detach()))[:: len(bias) // n]
    return Projections(geometry.layer, n_heads=geometry.n_heads, finish=finish, **parts)


def projection_weights(attention: Any, geometry: LayerGeometry) -> dict[str, tuple[Tensor, int]]:
    """Return W_Q and W_K as the module has them, by "q" and "k", with the heads that the geometry counts."""
    weights = {}
    for side, n in {"q": geometry.n_heads, "k": geometry.n_key_value_heads}.items():
        try:
            weight = getattr(attention, f"W_{side.upper()}", None)
        except ValueError as error:
            raise UnsupportedModelError(
                f"layer {geometry.layer}: TransformerLens splits W_{side.upper()} into the heads of the config, and "
                f"this layer has {geometry.n_heads}, so queries and keys cannot be traced to the attention's input"
            ) from error
        if not isinstance(weight, Tensor) or weight.ndim != 3 or len(weight) % n:
            raise UnsupportedModelError(
                f"layer {geometry.layer}: its W_{side.upper()} is not one matrix a head, so queries and keys cannot be "
                "traced to the attention's input (latent attention, or quantised weights?)"
            )
        weights[side] = weight, n
    return weights


def prove_projections(
    projections: Projections,
    inputs: Float[Tensor, "pos d_model"],
    q: Float[Tensor, "head pos d_head"],
    k: Float[Tensor, "head pos d_head"],
    heads: Sequence[int],
    allowed: float,
) -> None:
    """max |recomputed - captured| <= allowed max |captured| for queries and keys of `heads`, or
    UnsupportedModelError."""
    for name, project, actual in (("q", projections.queries, q), ("k", projections.keys, k)):
        off, largest = float((project(inputs)[list(heads)] - actual).abs().max()), float(actual.abs().max())
        if not off <= allowed * largest:  # also when it is not a number
            raise UnsupportedModelError(
                f"layer {projections.layer}: its {name} differs by {off:.1e}, its largest entry being {largest:.1e}, "
                "from what its weight and bias make of the attention's input, so they are not the whole projection "
                "(adapters, quantised weights, a gate, or hooks that change it?)"
            )
