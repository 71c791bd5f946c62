"""Planes of RoPE that turn up to a distance and no further, as hooks."""

from collections.abc import Sequence
from math import inf, pi
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double
from tl_posgen.core.options import Count, NonNegative, require
from tl_posgen.editing.printed_hooks import HookList, printing_call
from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.editing.score_functions import FrozenBeyond, RowByRow
from tl_posgen.errors import InputError, is_non_negative
from tl_posgen.models.layer_table import rotating_layers
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Heads, Layers, select_heads
from tl_posgen.models.session import Session, session_of
from tl_posgen.rope.frequency_bands import PlaneChoice, booleans_as_mask, planes_of

Limit: TypeAlias = int | float | Sequence[int | float] | Literal["quarter turn", "half turn"]
TURNS = {"quarter turn": pi / 2, "half turn": pi}


@printing_call
def hold_planes(
    model: Model | Session,
    planes: PlaneChoice | Literal["all", "partial"] = "partial",
    *,
    at: Limit,
    context: int | None = None,
    layers: Layers = None,
    heads: Heads = None,
) -> HookList:
    r"""score_ij <- cap(scale Re sum_m z^q_im conj(z^k_jm) e^{i theta_m min(i - j, at)}) in these planes.

    They turn up to the distance `at`, all other planes turn on. Prompts of up to `at` + 1 tokens do not change, and all
    planes held at one distance are the limit of `lm_infinite`, without its windows. A model can generate under these
    hooks, with a KV cache; a streamed pass under them forms each score once.

    Args:
        planes: indices, 0 the fastest of a layer; "all"; or "partial", those that make less than one turn within the
            context, theta_m L < 2 pi, with L = `context`, or a layer's window; or a boolean per plane, or a function
            from a layer's `Rope` to one of these, which may choose none: then there are no hooks.
        at: the distance in tokens, one for all planes or one for each of the indices; or "quarter turn" or "half turn":
            each plane at pi / (2 theta_m), or at pi / theta_m.
        context: L, the training context; cfg.n_ctx if left out.
        layers, heads: chosen layers and heads; all if left out. Layers without such a plane that turns are not changed.

    Raises:
        InputError: a plane that a chosen layer does not have, one given twice, or none; a negative distance, or other
            than one a plane; a distance for which the model's frequencies are not fixed.
        UnsupportedModelError: see `replace_scores`; also if no chosen layer has RoPE.

    Source: ours; all planes at one distance: Han et al. 2023 (arXiv 2308.16137) and Su 2023, "ReRoPE"; a distance a
    plane: after Lu et al. 2025 (arXiv 2504.18857).

    Example:
        >>> import torch
        >>> from tl_posgen import load_model
        >>> model, tokens = load_model("mini"), torch.arange(12)[None]
        >>> plain = model(tokens)
        >>> same, other = (model.run_with_hooks(tokens, fwd_hooks=hold_planes(model, [2, 3], at=at)) for at in (11, 4))
        >>> torch.allclose(same, plain, atol=1e-4), torch.allclose(other, plain, atol=1e-4)
        (True, False)
    """
    planes = booleans_as_mask(planes)
    if not callable(planes) and not isinstance(planes, Tensor):
        require("planes", planes, Sequence[int] | Literal["all", "partial"])
        if not isinstance(planes, str):
            planes = [*map(int, planes)]
    require("context", context, Count | None)
    require("at", at, NonNegative | Sequence[NonNegative] | Literal["quarter turn", "half turn"])
    session = session_of(model)
    distances: Any = [] if isinstance(at, str) else [at] if is_non_negative(at) else at
    for distance in distances:
        session.require_distance("at", distance)
    selected = select_heads(session, layers, heads)
    if isinstance(planes, list) and (twice := [plane for plane in planes if planes.count(plane) > 1]):
        raise InputError(f"planes: {twice[0]!r} is given twice; give each plane once, with one distance")
    rotating = rotating_layers(session, list(selected), "planes to hold")
    context = int(session.model.cfg.n_ctx) if context is None else context
    limits = {geometry.layer: _limits(geometry, planes, at, context) for geometry in rotating}
    limits = {layer: of_layer for layer, of_layer in limits.items() if (of_layer < inf).any()}
    if not limits and callable(planes):
        return []
    if not limits:
        raise InputError(f"planes={planes!r}: no chosen layer has such a plane that turns; give indices")
    frozen = FrozenBeyond(lambda geometry: limits[geometry.layer])
    return replace_scores(
        session, RowByRow(frozen), heads=[(layer, head) for layer in limits for head in selected[layer]]
    )


def partial_planes(geometry: LayerGeometry, n_ctx: int) -> list[int]:
    """Return the planes of a layer that make less than one turn within its context, theta_m L < 2 pi, with L = n_ctx or
    its window."""
    return (double(geometry.rope.inv_freq) * (geometry.window or n_ctx) < 2 * pi).nonzero()[:, 0].tolist()


def _limits(geometry: LayerGeometry, planes: Any, at: Any, n_ctx: int) -> Float[Tensor, " plane"]:
    """Return the distance beyond which each plane of a layer does not turn, inf for those that turn on."""
    theta = double(geometry.rope.inv_freq)
    if isinstance(planes, str):
        chosen = partial_planes(geometry, n_ctx) if planes == "partial" else list(range(len(theta)))
    else:
        try:
            chosen = planes_of(geometry.rope, planes).to(theta.device)
        except InputError as error:
            raise InputError(f"layer {geometry.layer}: {error}") from error
    limits = torch.full_like(theta, inf)
    if isinstance(at, str):
        limits[chosen] = TURNS[at] / theta[chosen]
    elif is_non_negative(at):
        limits[chosen] = float(at)
    elif not isinstance(planes, list) or len(at) != len(planes):
        raise InputError(f"at: {len(at)} distances; give one number, or one for each of the planes' indices")
    else:
        limits[planes] = torch.tensor([float(distance) for distance in at], dtype=DOUBLE).to(limits)
    return limits
