"""The cone of one layer's inputs, and ranks and slash scores of what W_Q and W_K make of it."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.rope.spectra import rank_one, singular_values, spectrum_of_values
from tl_posgen.slash.layer_means import statistics_from_qk
from tl_posgen.slash.numbers.ablations import ablate
from tl_posgen.slash.numbers.cone_fit import ConeFit, axis_projection

COSINES = np.linspace(-1, 1, 41)  # edges of the histogram
RANKS = {
    "rank95": ("rank at 95%", "how many s^2 make 95% of their sum"),
    "effective_rank": ("effective rank", "exp of the entropy of s^2 / sum s^2"),
    "effective_rank_plain": ("effective rank by s", "exp of the entropy of s / sum s"),
    "gain": ("gain of the axis", "|u'W| over its root mean square over directions"),
}
SHARES = {
    "r1": ("r1 of Q and K", "s_1^2 / sum s^2 of what enters RoPE, after qk-norm"),
    "r1_input": ("r1 of the input part", "r1 of H W, before any qk-norm"),
    "r1_sum": ("r1 with bias", "r1 of H W + b, before any qk-norm"),
    "bias_share": ("share of the bias", "|b|^2 / (|H W|^2 + |b|^2); a bias alone has r1 = 1"),
    "axis_share": ("share of the axis", "|H u u'W|^2 / |H W|^2"),
}


def from_token(layer: LayerCapture, first: int, cone: ConeFit) -> dict[str, Tensor]:
    """Return everything from the token `first` on: ranks [side, head], scores without measured ones [input, head,
    distance], and the cone of the inputs."""
    assert layer.inputs is not None
    assert layer.projections is not None
    inputs, heads, scores = layer.inputs[first:], list(layer.heads), []
    along = rank_one(inputs)
    for kept in (along, inputs - along):
        q, k = layer.projections.queries(kept)[heads], layer.projections.keys(kept)[heads]
        scores.append(statistics_from_qk(layer, *ablate(q, k, layer.geometry.rope, "none")).score)
    by_side = [ranks_of(layer, inputs, cone.axis, first, side) for side in "qk"]
    return {
        **{name: torch.stack([one[name] for one in by_side]) for name in (*SHARES, *RANKS)},
        "score": torch.stack(scores),
        "cosine": cone.cosine.mean(),
        "cosine_spread": cone.cosine.std(correction=0),
        "r1_h": cone.r1,
        "cosine_share": shares(cone),
    }


def ranks_of(
    layer: LayerCapture, inputs: Float[Tensor, "pos d_model"], axis: Float[Tensor, " d_model"], first: int, side: str
) -> dict[str, Float[Tensor, " head"]]:
    """Return how near rank one Q or K as it enters RoPE is, its parts, and what W_Q or W_K does with the axis."""
    assert layer.projections is not None
    of_head, heads = layer.projections.per_query_head, list(layer.heads)
    weight, bias = (getattr(layer.projections, f"{kind}_{side}") for kind in "wb")
    weight, bias = of_head(weight)[heads], None if bias is None else of_head(bias)[heads]
    values = singular_values(getattr(layer, side)[:, first:])
    squared, plain = spectrum_of_values(values), spectrum_of_values(values, squared=False)
    return {
        "r1": squared.r1,
        "rank95": squared.rank.double(),
        "effective_rank": squared.effective_rank,
        "effective_rank_plain": plain.effective_rank,
        **vars(axis_projection(inputs, axis, weight, bias)),
    }


def shares(one: ConeFit) -> Float[Tensor, " bin"]:
    """Return the share of inputs in each bin of the histogram; a cosine that rounds to just over 1 counts as 1."""
    counts, _ = np.histogram(one.cosine.clamp(-1, 1).cpu().numpy(), COSINES)
    return torch.from_numpy(counts / counts.sum())
