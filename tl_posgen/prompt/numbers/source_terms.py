"""One query's scores as a sum over terms, keys, planes and sources."""

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.rope.planes import turning_factors
from tl_posgen.rope.rotation import Rope, complex_planes


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
    found = scale * torch.stack([term.real.expand(shape) for term in terms]).flatten(2, 3).mT
    rotary = len(rope.inv_freq)
    rest = found[:, :, rotary:].sum(2, keepdim=True)
    return torch.cat([found[:, :, :rotary], *([rest] if found.shape[2] > rotary else [])], 2)
