"""Terms of scores, and of their sources: tensors in, tensors out; no model, no labels."""

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.rope.planes import turning_factors
from tl_posgen.rope.rotation import Rope, complex_planes
from tl_posgen.rope.scores_at import scores_at_positions
from tl_posgen.rope.splits import split_scores

TERMS = ("position", "key_part", "query_key", "interaction")


def split_terms(
    q: Float[Tensor, "head query d_head"],
    k: Float[Tensor, "head key d_head"],
    mean_query: Float[Tensor, "head d_head"],
    mean_key: Float[Tensor, "head d_head"],
    mean_turn: Complex[Tensor, "head plane_and_rest"],
    rope: Rope,
    scale: float,
) -> dict[str, Float[Tensor, "head query key"]]:
    r"""W_ij = position + key_part + query_key + interaction, each scale Re sum_m over planes m, with e_j = k_j - kbar:

        position     q_i conj(kbar) u(i - j)         what the query and the distance give, whatever the key
        key_part     qbar conj(e_j) ubar             the key's own part, whatever the query and the distance
        query_key    (q_i - qbar) conj(e_j) ubar     this query with this key, at the mean over distances
        interaction  q_i conj(e_j) (u(i - j) - ubar)

    position and key_part + query_key are the parts of `tl_posgen.rope.splits.split_scores`. Sums in float64.

    Args:
        q, k: before RoPE; fewer queries than keys are the last ones.
        mean_query, mean_key, mean_turn: qbar, kbar and ubar = E_p[u(d)], from another text.

    Returns:
        The terms by name, without a mask; they add up to scale <R_i q_i, R_j k_j>.

    Source: the least-squares split, whose form is that of Han & Ji 2025 (arXiv 2503.13305); a split of single prompts
    by means of another text, and of content into its two parts, is ours.

    Example:
        >>> rope, one = Rope(torch.tensor([0.5], dtype=torch.float64)), torch.ones(1, 1) + 0j
        >>> q, k = torch.randn(2, 1, 4, 2, generator=torch.Generator().manual_seed(0))
        >>> terms = split_terms(q, k, q[:, 0], k[:, 0], one, rope, 1.0)
        >>> torch.allclose(sum(terms.values()), scores_at_positions(q, k, rope, 1.0, *2 * [torch.arange(4)]).double())
        True
    """
    q, k, mean_query, mean_key = double(q), double(k), double(mean_query)[:, None], double(mean_key)
    positions = torch.arange(k.shape[1], device=k.device)
    scores = scores_at_positions(q, k, rope, scale, positions[-q.shape[1] :], positions)
    of_query, of_mean = (split_scores(x, k, rope, scale, mean_turn, mean_key) for x in (q, mean_query))
    key_part = of_mean.content.expand(-1, q.shape[1], -1)
    terms = of_query.position, key_part, of_query.content - key_part, scores - of_query.scores
    return dict(zip(TERMS, terms, strict=True))


def source_terms(
    q: Float[Tensor, "source_q d_head"],
    mean_query: Float[Tensor, "source_q d_head"],
    k: Float[Tensor, "source_k key d_head"],
    mean_key: Float[Tensor, "source_k d_head"],
    mean_turn: Complex[Tensor, " plane_and_rest"],
    distances: Int[Tensor, " key"],
    rope: Rope,
    scale: float,
) -> Float[Tensor, "term=4 key plane source"]:
    """Return position, key_part, query_key and interaction (`split_terms`) of every plane and source, in float64.

    Each is linear in the query and in the key, so sources of q (with means that add up to qbar) or of k (with means
    that add up to kbar) give terms that add up to those of the whole. Sources of both give their pairs, source of q
    first.

    Args:
        q, mean_query: one row a source; k, mean_key: likewise, for every key. All before RoPE.
        distances: i - j of every key.

    Returns:
        Planes are the rotary ones, then one for the whole unrotated remainder, where there is one.
    """
    zq, mq, zk, mk = (complex_planes(double(x), rope) for x in (q, mean_query, k, mean_key))
    turn = turning_factors(distances, rope, q.shape[-1])[:, None, None]  # [key, 1, 1, plane]
    zq, mq, mk = zq[:, None], mq[:, None], mk.conj()  # [source_q, 1, plane], [source_k, plane]
    deviations = zk.transpose(0, 1).conj()[:, None] - mk  # [key, 1, source_k, plane]
    terms = (
        zq * mk * turn,
        mq * deviations * mean_turn,
        (zq - mq) * deviations * mean_turn,
        zq * deviations * (turn - mean_turn),
    )
    shape = (len(distances), len(zq), len(mk), mk.shape[-1])
    by_plane = scale * torch.stack([term.real.expand(shape) for term in terms]).flatten(2, 3).mT
    rotary = len(rope.inv_freq)
    unrotated = by_plane[:, :, rotary:].sum(2, keepdim=True)
    return torch.cat([by_plane[:, :, :rotary], *([unrotated] if by_plane.shape[2] > rotary else [])], 2)
