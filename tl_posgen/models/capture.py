"""What an analyzer is handed: one layer of one prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.maths.rope import rotate
from tl_posgen.models.geometry import LayerGeometry


@dataclass
class LayerCapture:
    """One layer's attention on one prompt, float32 at least, for the chosen heads only.

    Attributes:
        geometry: what the layer does with positions.
        heads: indices of the chosen query heads in the model; axis `head` below follows this order.
        prompt: running number of the prompt within this analysis.
        tokens: token ids of the prompt, or None where the forward pass was not given any (embeddings as input).
        q, k: queries and keys BEFORE RoPE and after qk-norm; k is repeated for grouped heads, one row a query head.
        v: values, repeated likewise; None unless needed.
        attn_scores: scaled pre-softmax scores as the model has them, -inf where invisible; with ALiBi in the gauge
            where distance 0 carries no bias (models differ by constants per row, which softmax cannot tell). None
            unless needed.
        pattern: post-softmax; None unless needed.
        resid: the residual stream entering the layer; None unless needed.
    """

    geometry: LayerGeometry
    heads: Sequence[int]
    prompt: int
    tokens: Int[Tensor, " pos"] | None
    q: Float[Tensor, "head pos d_head"]
    k: Float[Tensor, "head pos d_head"]
    v: Float[Tensor, "head pos d_value"] | None = None
    attn_scores: Float[Tensor, "head query key"] | None = None
    pattern: Float[Tensor, "head query key"] | None = None
    resid: Float[Tensor, "pos d_model"] | None = None

    @property
    def layer(self) -> int:
        return self.geometry.layer

    @cached_property
    def positions(self) -> Int[Tensor, " pos"]:
        return torch.arange(self.q.shape[1], device=self.q.device)

    @cached_property
    def rotated_q(self) -> Float[Tensor, "head pos d_head"]:
        return rotate(self.q, self.positions, self.geometry.rope)

    @cached_property
    def rotated_k(self) -> Float[Tensor, "head pos d_head"]:
        return rotate(self.k, self.positions, self.geometry.rope)

    def scores(self) -> Float[Tensor, "head query key"]:
        """The scores recomputed from q and k through the geometry; invisible entries are -inf."""
        return scores_from(self.rotated_q, self.rotated_k, self.geometry, self.heads)


def scores_from(
    rotated_q: Float[Tensor, "head pos d_head"],
    rotated_k: Float[Tensor, "head pos d_head"],
    geometry: LayerGeometry,
    heads: Sequence[int],
) -> Float[Tensor, "head query key"]:
    """score_ij = cap(scale <R_i q_i, R_j k_j> + slope (j - i)), -inf where key j is invisible to query i."""
    n = rotated_q.shape[1]
    scores = geometry.scale * rotated_q @ rotated_k.mT
    if geometry.alibi_slopes is not None:
        position = torch.arange(n, device=scores.device, dtype=scores.dtype)
        slopes = geometry.alibi_slopes.to(scores)[list(heads), None, None]
        scores = scores + slopes * (position - position[:, None])
    if geometry.soft_cap is not None:
        scores = geometry.soft_cap * torch.tanh(scores / geometry.soft_cap)
    return scores.masked_fill(~geometry.visible(n, scores.device), -torch.inf)
