"""LM-Infinite: a global and a local window, and no distance larger than the model has seen."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.errors import InputError
from tl_posgen.interventions.dummy_distance import check_distance, seen_at
from tl_posgen.interventions.scores import HookList, replace_scores
from tl_posgen.models.backend import Model
from tl_posgen.models.capture import LayerCapture


def lm_infinite(
    model: Model,
    n_local: int,
    n_global: int = 10,
    *,
    limit: int | float | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> HookList:
    """Query i attends key j iff j < n_global or i - j < n_local, and distances above `limit` see `limit`.

    Beyond the limit the query is rotated to it and the key not at all. For prompts of up to n_local tokens (and
    limit >= n_local - 1) nothing changes.

    Args:
        n_local: usually the training length.
        n_global: first tokens that every query sees.
        limit: n_local if left out.

    Raises:
        InputError: n_local below 1, a negative n_global or limit.
        UnsupportedModelError: see `replace_scores`; also learned absolute positions.

    Source: Han et al. 2023, "LM-Infinite" (arXiv 2308.16137).

    Example:
        >>> import torch
        >>> from tl_posgen import load_model
        >>> model, tokens = load_model("mini"), torch.arange(12)[None]
        >>> same = model.run_with_hooks(tokens, fwd_hooks=lm_infinite(model, n_local=12))
        >>> torch.allclose(same, model(tokens), atol=1e-4)
        True
    """
    if n_local < 1 or n_global < 0:
        raise InputError(f"lm_infinite: n_local {n_local} must be at least 1 and n_global {n_global} at least 0")
    limit = n_local if limit is None else limit
    check_distance(model, "limit", limit)

    def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        attended = lambda_shape(capture, n_local, n_global)
        return seen_at(capture, None, limit).masked_fill(~attended, -torch.inf)

    return replace_scores(model, scores_of, layers, heads, needs_positions=True)


def lambda_shape(capture: LayerCapture, n_local: int, n_global: int) -> Tensor:
    """Which keys the two windows show to each query: [query, key], the shape of a Lambda."""
    position = capture.positions
    return (position < n_global) | (position[:, None] - position < n_local)
