"""Rounding of scores in float32: parts of scores that are too small to be told from zero."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.models.layers.capture import EditedCapture, LayerCapture
from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs

ROUNDING = 1e-13  # share of sum |scale q_i|^2 |k_j|^2 below which a sum of squares is float32 rounding


def is_rounding(
    squares: Float[Tensor, " head"], capture: LayerCapture, pairs: CausalPairs, score_squares: Float[Tensor, " head"]
) -> Bool[Tensor, " head"]:
    """sum x^2 <= 1e-13 sum |scale q_i|^2 |k_j|^2 over the pairs: `squares` of a part x of the scores are rounding.

    A score is a sum that may cancel, so its rounding error scales with the lengths of its query and key. It scales with
    the score itself (`score_squares`) where hooks edit the scores, or where the score is larger (ALiBi).
    """
    size = score_squares
    if not isinstance(capture, EditedCapture):
        q, k = (double(x[:, : pairs.n_tokens]).square().sum(-1) for x in (capture.q, capture.k))
        none = torch.zeros_like(k[:, pairs.first_key :])
        of_keys = torch.stack([none, none, k[:, pairs.first_key :]])
        seen = pairs.normal(of_keys, pairs.counts(k.device))[1].flip(-1)  # by query, over the keys that it sees
        size = size.maximum(capture.geometry.scale**2 * (q[:, pairs.first_query :] * seen).sum(-1))
    return squares <= ROUNDING * size
