"""The interaction share of queries and keys, differentiable: a penalty in training, say."""

from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import MOST_DISTANCES
from tl_posgen.errors import InputError
from tl_posgen.position.decomposition.numbers.variance_shares import DistanceWeights, TripleMoments, variance_shares
from tl_posgen.rope.rotation import Rope


def interaction_share(
    q: Float[Tensor, "*batch pos d_head"],
    k: Float[Tensor, "*key_batch key d_head"],
    rope: Rope,
    *,
    n_distances: int | None = None,
    weights: DistanceWeights = "uniform",
    first_token: bool = False,
) -> Float[Tensor, "*batch"]:
    """(kd + qkd) / (1 - q), the `interaction` of `Variance`, of each batch of queries and keys before RoPE.

    Zero exactly where scores are f(q, d) + g(q, k). Gradients reach q and k: moments and the closed form are in
    float64, on the host where the device has none, and the share has the device of q and its dtype, float32 at least.
    It depends neither on the attention's scale nor on a soft cap.

    Args:
        q, k: after qk-norm; k repeated for grouped heads; of hook_q, [batch, pos, head, d_head], give
            `q.transpose(1, 2)`. For shares over several prompts put them one after the other along pos, without their
            first tokens, and give first_token=True and n_distances=tokens of one prompt.
        rope: the layer's, `LayerGeometry.rope`, or `Rope(inverse_frequencies(d_head))`.
        n_distances: distances 0 .. n_distances - 1; as many as positions if left out. In a layer with a window, no more
            than that.
        weights: of distances: "uniform", or "causal" (as often as they occur in a text that long).
        first_token: whether the first token counts.

    Returns:
        0 to 1; NaN, and so are the gradients, where softmax can see nothing vary.

    Raises:
        InputError: q and k of different shapes, fewer components than the rope rotates, fewer than two tokens that
            count, wrong options.

    Source: closed form: ours

    Example:
        >>> from tl_posgen.rope.rotation import inverse_frequencies
        >>> q = torch.randn(4, 50, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        >>> share = interaction_share(q, q.detach(), Rope(inverse_frequencies(8)))
        >>> share.sum().backward()
        >>> share.shape, bool((share < 1).all()), q.grad.shape
        (torch.Size([4]), True, torch.Size([4, 50, 8]))
    """
    if n_distances is not None and (type(n_distances) is not int or not 1 <= n_distances <= MOST_DISTANCES):
        raise InputError(f"n_distances {n_distances!r}: give a whole number, 1 to {MOST_DISTANCES}")
    if not all(isinstance(x, Tensor) and x.ndim > 1 and x.is_floating_point() for x in (q, k)):
        raise InputError("q and k: give tensors of real numbers [.., pos, d_head]")
    if weights not in get_args(DistanceWeights):
        raise InputError(f"weights {weights!r}: choose from {', '.join(get_args(DistanceWeights))}")
    if q.shape != k.shape:
        raise InputError(f"q {list(q.shape)} and k {list(k.shape)} differ in shape; repeat keys of grouped heads")
    if q.shape[-1] < rope.rotary_dim:
        raise InputError(
            f"vectors of {q.shape[-1]} components and a rope that rotates {rope.rotary_dim}: give the layer's"
        )
    if q.shape[-2] < (2 if first_token else 3):
        raise InputError(f"{q.shape[-2]} tokens: too few for anything to vary; give more")
    one, other = (x.reshape(-1, *x.shape[-2:]) for x in (q, k))
    moments = TripleMoments.from_qk(one, other, rope, first_token=first_token)
    shares = variance_shares(moments, rope, 1.0, q.shape[-2] if n_distances is None else n_distances, weights=weights)
    dtype = torch.promote_types(q.dtype, torch.float32)
    return shares.within_rows.interaction.reshape(q.shape[:-2]).to(q.device, dtype)
