"""What float32 rounds of scores: no more than that is nothing."""

from jaxtyping import Bool, Float
from torch import Tensor

from tl_posgen.models.capture import EditedCapture, LayerCapture

ROUNDING = 1e-13  # share of sum |scale q_i|^2 |k_j|^2 below which a sum of squares is what float32 leaves of zero


def unrounded(
    x: Float[Tensor, "head query key"],
    capture: LayerCapture,
    scores: Float[Tensor, "head query key"],
    mask: Bool[Tensor, "query key"],
) -> Float[Tensor, "head query key"]:
    """x, a part of the scores, with zeros in the heads where sum x^2 <= 1e-13 sum |scale q_i|^2 |k_j|^2 over the pairs.

    A score is a sum that may cancel, so it rounds with the lengths of its query and key. Where these are not known, as
    hooks edit the scores, with the scores themselves; and with those where they are larger (ALiBi).
    """
    size = scores.double().masked_fill(~mask, 0).square().sum((1, 2))
    if not isinstance(capture, EditedCapture):
        q, k = (x[:, : len(mask)].double().square().sum(-1) for x in (capture.q, capture.k))
        size = size.maximum(capture.geometry.scale**2 * ((q @ mask.double()) * k).sum(-1))
    return x.masked_fill((x.double().square().sum((1, 2)) <= ROUNDING * size)[:, None, None], 0)
