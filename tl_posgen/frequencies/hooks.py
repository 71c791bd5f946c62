"""Hooks that rotate queries and keys at other frequencies than the model's own."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE
from tl_posgen.core.options import Positive, fits
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.frequencies.numbers.changed_frequencies import one_a_plane
from tl_posgen.frequencies.rules import FrequencyRule
from tl_posgen.hooks.replace_scores import HookList, RowByRow, finished, replace_scores
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Heads, Layers, select_heads
from tl_posgen.rope.rotation import Rope, rotate

Frequencies: TypeAlias = FrequencyRule | Callable[[Rope], Rope] | Float[Tensor, " plane"] | Sequence[int | float]


def with_frequencies(model: Model, frequencies: Frequencies, *, layers: Layers = None, heads: Heads = None) -> HookList:
    """score_ij <- scale <R'_i q_i, R'_j k_j>, R' rotating plane m by theta'_m per token, with the rule's own scaling.

    Args:
        frequencies: a `FrequencyRule`; theta', one a plane, in radians per token; or
            a function from a layer's `Rope` to another. Layers without RoPE are not changed.
        layers, heads: chosen layers and heads; all if left out. Query heads that share a key may differ.

    Returns:
        Hooks, see `replace_scores`. With the model's own frequencies they change nothing.

    Raises:
        InputError: another number of frequencies than a chosen layer has planes; a function that gives no `Rope` of
            that many, or one whose scaling is not above 0.
        UnsupportedModelError: see `replace_scores`; also if no chosen layer has RoPE.

    Source: ours; the rules are those of the papers that `FrequencyRule` names.

    Example:
        >>> import torch
        >>> from tl_posgen import load_model
        >>> from tl_posgen.frequencies import FrequencyRule
        >>> model, tokens = load_model("mini"), torch.arange(12)[None]
        >>> plain = model(tokens)
        >>> same, other = (
        ...     model.run_with_hooks(tokens, fwd_hooks=with_frequencies(model, FrequencyRule("linear", factor)))
        ...     for factor in (1, 2)
        ... )
        >>> torch.allclose(same, plain, atol=1e-4), torch.allclose(other, plain, atol=1e-4)
        (True, False)
    """
    selected = select_heads(model, layers, heads)
    geometries = rotary_layers(model, list(selected))
    if isinstance(frequencies, FrequencyRule):
        frequencies = frequencies.of_model(int(model.cfg.n_ctx))
    ropes = {one.layer: changed_rope(one, frequencies) for one in geometries}

    def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        rope = ropes[capture.layer]
        q, k = rotate(capture.q, capture.query_positions, rope), rotate(capture.k, capture.positions, rope)
        return finished(capture.geometry.scale * q @ k.mT, capture)

    rotating = [(layer, head) for layer in ropes for head in selected[layer]]
    return replace_scores(model, RowByRow(scores_of), heads=rotating)


def rotary_layers(model: Model, layers: Layers = None) -> list[LayerGeometry]:
    """Return the geometry of the chosen layers that have RoPE; UnsupportedModelError where none has."""
    found = [one for one in geometry_of(model, layers) if one.rope.rotary_dim]
    if not found:
        raise UnsupportedModelError("no chosen layer has RoPE, so there are no frequencies to change")
    return found


def changed_rope(geometry: LayerGeometry, frequencies: Any) -> Rope:
    """Return a layer's RoPE with other frequencies; InputError, with the layer, for such as it cannot have."""
    own = geometry.rope
    try:
        if callable(frequencies):
            rope = frequencies(own)
            if not isinstance(rope, Rope):
                raise InputError(f"frequencies gave {rope!r}: let the function give a Rope")
            theta = as_numbers(rope.inv_freq)
        else:
            rope, theta = own, as_numbers(frequencies)
        if not fits(rope.scaling, Positive):
            raise InputError(f"frequencies gave a scaling of {rope.scaling!r}: give a number above 0")
        return replace(rope, inv_freq=one_a_plane(theta, own, "frequencies"), pairing=own.pairing)
    except InputError as error:
        raise InputError(f"layer {geometry.layer}: {error}") from error


def as_numbers(frequencies: Any) -> Tensor:
    """Return numbers of the user's as a tensor."""
    try:
        found = torch.as_tensor(frequencies)
        if found.dtype == torch.bool or found.is_complex():
            raise TypeError
        return found.to(DOUBLE)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"frequencies={frequencies!r}: give a FrequencyRule, one number a plane, or a function"
        ) from error
