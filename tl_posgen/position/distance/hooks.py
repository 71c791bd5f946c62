"""Dummy distance: hooks that let chosen heads score pairs at another distance than their own."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int, Real
from torch import Tensor

from tl_posgen.arithmetic import is_real_tensor
from tl_posgen.editing.printed_hooks import HookList, printing_call
from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.editing.score_functions import FrozenBeyond, RowByRow, finished
from tl_posgen.errors import InputError
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.model import Model
from tl_posgen.models.session import Session, session_of
from tl_posgen.rope.scores_at import scores_at

Distance = int | float | Real[Tensor, "query key"] | Callable[[Int[Tensor, "query key"]], Real[Tensor, "query key"]]


@printing_call
def at_dummy_distance(
    model: Model | Session,
    distance: Distance | None = None,
    *,
    beyond: int | float | None = None,
    layers: Sequence[int] | None = None,
    heads: Any = None,
) -> HookList:
    """score_ij <- cap(scale <R_d q_i, R_0 k_j>) - slope d: every pair of the chosen heads at distance d, not i - j.

    Args:
        distance: one number d0 for all pairs, a matrix [query, key], or a function of the matrix i - j. All but the
            matrix also work with a KV cache; the function then gets the rows of the last queries.
        beyond: change only pairs further apart than this. Without `distance` they are scored at distance `beyond`
            ("frozen beyond", the rule of LM-Infinite).
        layers, heads: chosen layers and heads; all if left out. Heads as in `replace_scores`.

    Returns:
        Hooks, see `replace_scores`. At the true distances (`distance=lambda d: d`) they change nothing.

    Raises:
        InputError: a negative or infinite distance, a distance for which the model has no fixed frequencies (dynamic
            NTK, longrope), or neither distance nor beyond.
        UnsupportedModelError: scores that cannot be edited, or do not depend on distance (learned absolute positions).

    Source: our reconstruction, from summaries, of the controlled-distance experiment of Han & Ji 2025
    (arXiv 2503.13305); LM-Infinite: Han et al. 2023 (arXiv 2308.16137).

    Example:
        >>> import torch
        >>> from tl_posgen import load_model
        >>> model, tokens = load_model("mini"), torch.arange(12)[None]
        >>> frozen = model.run_with_hooks(tokens, fwd_hooks=at_dummy_distance(model, beyond=11))
        >>> torch.allclose(frozen, model(tokens), atol=1e-4)
        True
    """
    if distance is None and beyond is None:
        raise InputError("at_dummy_distance: give distance=, beyond=, or both")
    session = session_of(model)
    if beyond is not None:
        session.require_distance("beyond", beyond)
    if isinstance(distance, Tensor):
        if not is_real_tensor(distance, 2) or not distance.numel():
            raise InputError(f"distance of shape {list(distance.shape)}: give real numbers [query, key]")
        for end in distance.tril().aminmax():  # entries above the diagonal are not read
            session.require_distance("distance", end.item())
    elif distance is not None and not callable(distance):
        session.require_distance("distance", distance)
    of_pairs: Any
    if distance is not None:
        of_pairs = partial(scores_at_distance, distance=distance, beyond=beyond)
    else:
        assert beyond is not None, "one of them is given"
        of_pairs = FrozenBeyond(lambda _, limit=beyond: limit)
    by = of_pairs if isinstance(distance, Tensor) else RowByRow(of_pairs)
    return replace_scores(session, by, layers, heads, needs_positions=True)


def scores_at_distance(
    capture: LayerCapture, distance: Distance, beyond: int | float | None
) -> Float[Tensor, "head query key"]:
    """Return the layer's scores with pairs (those further apart than `beyond`) at `distance`."""
    geometry = capture.geometry
    true = capture.query_positions[:, None] - capture.positions
    wanted = distance(true.clamp(min=0)) if callable(distance) else distance
    if isinstance(wanted, Tensor):
        wanted = wanted.to(true.device)
    elif not isinstance(wanted, int | float):
        raise InputError(f"distance gave {wanted!r}: let it give a number, 0 or more, or a tensor [query, key]")
    products = scores_at(capture.q, capture.k, geometry.rope, geometry.scale, wanted)
    scores = finished(products, capture, wanted)
    return scores if beyond is None else torch.where(true > beyond, scores, capture.scores())


def training_length(session: Session) -> int:
    """Return the model's training length: cfg.n_ctx, or the length from which its frequencies are not fixed."""
    return min(int(session.model.cfg.n_ctx), session.limit.tokens or int(session.model.cfg.n_ctx))
