"""Three-axis fits of a captured layer: from moments of q and k, from the scores, or weighted by attention."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.numbers.pair_moments import PairMoments, pair_moments, pair_moments_from_rows
from tl_posgen.position.decomposition.numbers.pair_weights_fit import fit_pair_weights, refuse_long
from tl_posgen.position.decomposition.numbers.three_axis_fit import Gauge, ThreeAxisFit, fit_three_axis

Weights = Sequence[int | float] | Literal["attention"]
ALIKE = "all pairs weighted alike"


def fit_capture(
    layer: LayerCapture,
    *,
    ridge: float = 0.0,
    gauge: Gauge | str = "flat_keys",
    diagonal: bool = True,
    weights: Weights | None = None,
) -> tuple[ThreeAxisFit, ThreeAxisFit | None]:
    """Return the fits of a layer with and without the first token; `layer.once(fit_capture)` keeps the usual ones."""
    if isinstance(weights, str):
        return fit_by_attention(layer, diagonal, ridge=ridge, gauge=gauge)
    usual = diagonal and weights is None
    moments = layer.once(moments_of) if usual else moments_of(layer, diagonal=diagonal, weights=weights)
    return fits_of(moments, ridge=ridge, gauge=gauge)


def fits_of(moments: PairMoments, **how: Any) -> tuple[ThreeAxisFit, ThreeAxisFit | None]:
    """Return the fits of these scores with and without the first token; None where nothing would be left."""
    without = moments.without_first_token
    return fit_three_axis(moments, **how), None if without is None else fit_three_axis(without, **how)


def fit_by_attention(layer: LayerCapture, diagonal: bool, **how: Any) -> tuple[ThreeAxisFit, ThreeAxisFit | None]:
    """Return the fits with every pair weighted by its attention, softmax_j W_ij, what a sink takes left out.

    `iid_r` is the r of the same scores shuffled over the head's pairs, under the attention that they then make: weights
    that follow the scores let a fit of anything look good.
    """
    refuse_long(layer.length)
    scores = double(layer.scores())

    def fit(scores: Float[Tensor, "head query key"], first_token: bool = True) -> ThreeAxisFit:
        pairs = CausalPairs(layer.length, layer.geometry.window, first_token, diagonal)
        return fit_pair_weights(scores, scores.softmax(-1), pairs, **how)

    full = replace(fit(scores), iid_r=fit(shuffled(scores)).r)
    return full, fit(scores, False) if layer.length > (1 if diagonal else 2) else None


def shuffled(scores: Float[Tensor, "head query key"]) -> Float[Tensor, "head query key"]:
    """Return the scores with the visible ones of every head in an order drawn with seed 0."""
    visible = scores[0] != -torch.inf
    values = scores[:, visible].cpu()
    order = torch.rand(values.shape, generator=torch.Generator().manual_seed(0)).argsort(-1)
    mixed = torch.full_like(scores, -torch.inf)
    mixed[:, visible] = values.gather(1, order).to(scores)
    return mixed


def moments_of(
    layer: LayerCapture, *, diagonal: bool = True, weights: Sequence[int | float] | None = None
) -> PairMoments:
    """Return the pair moments of a layer: from q and k where the score is bilinear in them, else from the scores."""
    geometry, weights = layer.geometry, (1.0,) if weights is None else weights
    how: dict[str, Any] = {"window": geometry.window, "diagonal": diagonal, "distance_weights": weights}
    if layer.bilinear:
        return pair_moments(layer.rotated_q, layer.rotated_k, geometry.scale, finite=layer.finite, **how)
    return pair_moments_from_rows(layer.score_rows, layer.length, **how)


def weighting(weights: Weights | None) -> str:
    """Return the weights of pairs in words, such as "pairs weighted by distance: 2, 1, then .05"."""
    if weights is None:
        return ALIKE
    if isinstance(weights, str):
        return f"pairs weighted by {weights}"
    *near, far = (f"{weight:.3g}".removeprefix("0") for weight in weights)
    shown = near if len(near) <= 8 else [*near[:7], "..."]
    return f"pairs weighted by distance: {', '.join(shown)}, then {far}"
