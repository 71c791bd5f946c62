"""Proof of a layer's geometry: the model's own scores, recomputed from its queries and keys."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import rounding_unit
from tl_posgen.errors import UnsupportedModelError
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.models.same_logits import rounding_remedy
from tl_posgen.rope.rotation import Rope

UNITS = 4.0  # of rounding: in drawn models of 90 tokens at most 1.4 were seen in bfloat16, 3.5 in float32


def prove(
    drafts: Sequence[LayerGeometry],
    q: Float[Tensor, "head pos d_head"],
    k: Float[Tensor, "key_head pos d_head"],
    attn_scores: Float[Tensor, "head query key"],
) -> LayerGeometry:
    """Return the draft that reproduces the model's scores, with `error` = max |recomputed - model's| over visible ones.

    The error must be below `tolerance` times the largest visible |score|, or what rounding may do to one, and the
    draft's mask must be the model's. ALiBi is compared up to a constant per row (see `without_row_offsets`). The
    model's scores are -inf where masked, q and k in its dtype.

    Raises:
        UnsupportedModelError: no draft fits; the message says how far the best one is off, and what is likely wrong.
    """
    layer, visible = drafts[0].layer, attn_scores != -torch.inf
    largest = float(attn_scores[visible].abs().max())
    per_head = k.repeat_interleave(len(q) // len(k), dim=0)

    def captured(draft: LayerGeometry) -> LayerCapture:
        return LayerCapture(draft, range(len(q)), 0, None, q, per_head)

    def errors(draft: LayerGeometry) -> Float[Tensor, "head query key"]:
        """|recomputed - model's score|, in the same gauge, 0 where either of them is masked."""
        capture = captured(draft)
        recomputed = capture.scores()
        actual = without_row_offsets(attn_scores, capture.rotated_q, capture.rotated_k, draft)
        return (recomputed - actual).abs().masked_fill((recomputed == -torch.inf) | (actual == -torch.inf), 0)

    rotated_q, rotated_k = captured(drafts[0]).rotated_q, captured(drafts[0]).rotated_k
    allowed = max(tolerance(q.dtype) * largest, float(allowed_error(rotated_q, rotated_k, drafts[0], q.dtype).max()))
    error, best = min(((float(errors(draft).max()), draft) for draft in drafts), key=lambda pair: pair[0])
    if not error <= allowed:  # also when it is not a number
        cause = "a positional bias that this package does not know"
        if not attn_scores[visible].isfinite().all():
            cause = "NaN or inf in the weights"
        elif float(errors(best).diagonal(dim1=-2, dim2=-1).max()) > allowed:  # where RoPE changes nothing
            cause = "scale, soft cap, a normalisation of q and k, or hooks that change the scores"
        elif best.encoding == "rotary" and float(errors(replace(best, rope=Rope())).max()) <= allowed:
            cause = "the hooks carry queries and keys after RoPE, or the layer does not rotate at all"
        elif best.encoding == "rotary":
            cause = "RoPE frequencies or pairing (rotary tables changed after loading?)"
        raise UnsupportedModelError(
            f"layer {layer}: its scores cannot be recomputed from its queries and keys: off by {error:.2g} where "
            f"scores reach {largest:.2g} ({allowed:.1g} is allowed). Likely cause: {cause}."
            + rounding_of_scores(error, rotated_q, rotated_k, best, q.dtype)
        )
    if not torch.equal(visible, best.visible(q.shape[1], q.device).expand_as(visible)):
        window = f" with a window of {best.window}" if best.window else ""
        raise UnsupportedModelError(
            f"layer {layer}: it masks other keys than a causal mask{window} would; hooks or padding at work during the "
            "probe are one cause, an unknown sparse pattern another"
        )
    return replace(best, error=error)


def tolerance(dtype: torch.dtype) -> float:
    """max(1e-4, 8 units of rounding): the allowed error as a share of the largest score; 1e-6 is usual in float32."""
    return max(1e-4, 8 * torch.finfo(dtype).eps)


def allowed_error(
    rotated_q: Float[Tensor, "head query d_head"],
    rotated_k: Float[Tensor, "head key d_head"],
    geometry: LayerGeometry,
    dtype: torch.dtype,
) -> Float[Tensor, "head query key"]:
    """(UNITS eps + n eps32) scale |q_i| |k_j|: what rounding may do to a score over n tokens, eps as `rounding_unit`.

    n eps32 radians are what models lose that take the angle of the last position in float32, as all do. ALiBi adds
    UNITS eps of its bias at the largest distance.
    """
    n, single = rotated_k.shape[1], torch.finfo(torch.float32).eps
    eps = rounding_unit(dtype, rotated_q.device)
    norms = rotated_q.norm(dim=-1)[..., None] * rotated_k.norm(dim=-1)[:, None]
    allowed = (UNITS * eps + n * single) * geometry.scale * norms + torch.finfo(torch.float32).tiny
    if geometry.alibi_slopes is not None:
        allowed = allowed + UNITS * eps * n * geometry.alibi_slopes.max().to(allowed)
    return allowed


def rounding_of_scores(
    error: float,
    rotated_q: Float[Tensor, "head query d_head"],
    rotated_k: Float[Tensor, "head key d_head"],
    geometry: LayerGeometry,
    dtype: torch.dtype,
) -> str:
    """Return `rounding_remedy`, or what removes TF32's rounding where scores are off by no more than that, which is
    float16's."""
    if rotated_q.device.type != "cuda" or dtype != torch.float32:
        return rounding_remedy(dtype)
    if error > float(allowed_error(rotated_q, rotated_k, geometry, torch.float16).max()):
        return ""
    return (
        " Or rounding to TF32, which CUDA may multiply float32 matrices in: call "
        'torch.set_float32_matmul_precision("highest") before the pass.'
    )


def without_row_offsets(
    attn_scores: Float[Tensor, "head query key"],
    rotated_q: Float[Tensor, "head query d_head"],
    rotated_k: Float[Tensor, "head key d_head"],
    geometry: LayerGeometry,
    rows: Int[Tensor, " query"] | None = None,
) -> Float[Tensor, "head query key"]:
    """Shift each row of ALiBi scores so that distance 0 carries no bias, which softmax cannot tell; others stay.

    Implementations add slope * (j - i), slope * j (Bloom) or slope * (j - n) (MPT): the same attention, and different
    numbers. A row whose own key is masked is left as it is. `rows` are the positions of these queries: all, if left
    out.
    """
    if geometry.alibi_slopes is None:
        return attn_scores
    own = torch.arange(rotated_k.shape[1], device=rotated_k.device) if rows is None else rows
    unbiased = geometry.scale * (rotated_q * rotated_k[:, own]).sum(-1)
    offset = attn_scores.gather(-1, own[None, :, None].expand(len(attn_scores), -1, 1))[..., 0] - unbiased
    return attn_scores - offset.where(offset != -torch.inf, 0.0)[..., None]


def is_pattern(attn_scores: Float[Tensor, "*batch head query key"]) -> bool:
    """Tell softmax's output from scores: bridges leave some architectures' attention to Hugging Face."""
    return bool((attn_scores >= 0).all() and (attn_scores.float().sum(-1) - 1).abs().max() < 0.02)
