"""Queries and keys of a captured layer as linear maps of its residual stream, every norm frozen."""

from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.errors import UnsupportedModelError
from tl_posgen.models.geometry.plain_proof import without_hooks
from tl_posgen.models.geometry.proof import tolerance
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.wrapped import WrappedModel
from tl_posgen.residual.numbers.frozen_map import FrozenMap, frozen_map
from tl_posgen.residual.numbers.frozen_norm import FrozenNorm, freeze
from tl_posgen.residual.residual_sources import near, norm_between

Side = Literal["query", "key"]
ROUNDING = "rounding"  # what half precision takes away, as a source


def frozen_layer(wrapped: WrappedModel, capture: LayerCapture, side: Side) -> FrozenMap:
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
    with torch.no_grad(), without_hooks(wrapped.model):
        norm = attention_norm(wrapped, capture.layer, resid.to(inputs.device), inputs)
        raw = inputs.to(weight.dtype) @ weight + (0 if bias is None else bias[:, None])
        behind = norm_behind(partial(projections.finished, part), raw, wrapped.dtype, capture.layer)
    if part == "k":
        weight, bias = projections.per_query_head(weight), None if bias is None else projections.per_query_head(bias)
        if behind is not None:
            per_head = (projections.per_query_head(x) for x in (behind.gamma, behind.beta, behind.factor))
            gamma, beta, factor = per_head
            behind = FrozenNorm(gamma, beta, behind.centred, factor, behind.error)
    return frozen_map(norm, weight, bias, behind, ("ln bias", f"b_{part.upper()}", f"{part}_norm bias"))


def attention_norm(
    wrapped: WrappedModel, layer: int, resid: Float[Tensor, "pos d_model"], inputs: Float[Tensor, "pos d_model"]
) -> FrozenNorm:
    """Return the norm before attention, frozen; the identity where there is none."""
    if near(resid, inputs, wrapped.dtype):
        ones = torch.ones_like(double(resid))
        return FrozenNorm(ones[0], 0 * ones[0], False, ones[:, 0], 0.0)
    norm = norm_between(wrapped, layer, resid, inputs)
    if norm is None:
        raise UnsupportedModelError(
            f"layer {layer}: no norm of the block makes its attention's input of the residual stream, so queries and "
            "keys cannot be traced to what earlier layers wrote"
        )
    return norm


def norm_behind(
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
