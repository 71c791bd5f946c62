"""Scores of one prompt as position, content and interaction, by the mean query and mean key of a reference text."""

from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.rope.rotation import Rope, rotate
from tl_posgen.rope.splits import split_scores

TERMS = ("position", "key_part", "query_key", "interaction")


@dataclass(frozen=True)
class SplitTerms:
    """Terms of scale <R_i q_i, R_j k_j>, without a mask; they add up to it. See `split_terms`."""

    position: Float[Tensor, "head query key"]
    key_part: Float[Tensor, "head query key"]
    query_key: Float[Tensor, "head query key"]
    interaction: Float[Tensor, "head query key"]

    @property
    def scores(self) -> Float[Tensor, "head query key"]:
        return self.position + self.key_part + self.query_key + self.interaction


def split_terms(
    q: Float[Tensor, "head query d_head"],
    k: Float[Tensor, "head key d_head"],
    mean_query: Float[Tensor, "head d_head"],
    mean_key: Float[Tensor, "head d_head"],
    mean_turn: Complex[Tensor, "head plane_and_rest"],
    rope: Rope,
    scale: float,
) -> SplitTerms:
    r"""W_ij = position + key_part + query_key + interaction, each scale Re sum_m over planes m, with e_j = k_j - kbar:

        position     q_i conj(kbar) u(i - j)         what the query and the distance give, whatever the key
        key_part     qbar conj(e_j) ubar             the key's own part, whatever the query and the distance
        query_key    (q_i - qbar) conj(e_j) ubar     this query with this key, at the mean over distances
        interaction  q_i conj(e_j) (u(i - j) - ubar)

    position and key_part + query_key are the parts of `tl_posgen.rope.splits.split_scores`. Sums in float64.

    Args:
        q, k: before RoPE; fewer queries than keys are the last ones.
        mean_query, mean_key, mean_turn: qbar, kbar and ubar = E_p[u(d)], from another text.

    Source: the least-squares split, whose form is that of Han & Ji 2025 (arXiv 2503.13305); a split of single prompts
    by means of another text, and of content into its two parts, is ours.

    Example:
        >>> rope, one = Rope(torch.tensor([0.5], dtype=torch.float64)), torch.ones(1, 1) + 0j
        >>> q, k = torch.randn(2, 1, 4, 2, generator=torch.Generator().manual_seed(0))
        >>> terms = split_terms(q, k, q[:, 0], k[:, 0], one, rope, 1.0)
        >>> positions = torch.arange(4)
        >>> torch.allclose(terms.scores, (rotate(q, positions, rope) @ rotate(k, positions, rope).mT).double())
        True
    """
    q, k, mean_query, mean_key = (double(x) for x in (q, k, mean_query, mean_key))
    own = split_scores(q, k, rope, scale, mean_turn, mean_key)
    key_part = split_scores(mean_query[:, None].expand_as(q), k, rope, scale, mean_turn, mean_key).content
    positions = torch.arange(k.shape[1], device=k.device)
    rotated_q = rotate(q, positions[-q.shape[1] :], rope)
    deviations = scale * rotated_q @ rotate(k - mean_key[:, None], positions, rope).mT
    return SplitTerms(own.position, key_part, own.content - key_part, deviations - own.content)
