"""Proof that scores are those of queries and keys: of a layer's geometry, in the probe's pass, and of every capture, at
its length and with whatever hooks are at work.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import rounding_unit, summable
from tl_posgen.errors import UnsupportedModelError
from tl_posgen.models.head_names import head_name
from tl_posgen.models.layers.capture import EditedCapture, LayerCapture, StreamedCapture, scores_from
from tl_posgen.models.layers.fused import LayerAttention
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.models.same_logits import rounding_remedy
from tl_posgen.rope.rotation import Rope, at_least_float32

UNITS = 4.0  # of rounding: in drawn models of 90 tokens at most 1.4 were seen in bfloat16, 3.5 in float32
ROWS = 64  # query rows compared: all of a short prompt, the first, the last and some between of a long one
_STREAMED_ROWS = 8
_SURELY_FINITE = 1e15


def is_masked(attn_scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Tell which scores are -inf, or the most negative number of their dtype, or of the model's (that of q), in which a
    mask may have been made although the scores are wider."""
    most_negative = max(torch.finfo(attn_scores.dtype).min, torch.finfo(dtype).min)
    return attn_scores <= most_negative / 2


def plain_scores(attn_scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scores in float32 at least, -inf where they are masked."""
    return at_least_float32(attn_scores).masked_fill(is_masked(attn_scores, dtype), -torch.inf)


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
        if best.distance_bias(0) is not None:  # the diagonal fits whatever is wrong, see `without_row_offsets`
            cause = f"scale, a soft cap or {cause}, a normalisation of q and k, or hooks that change the scores"
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
            + _rounding_of_scores(error, rotated_q, rotated_k, best, q.dtype)
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
    of_queries = (UNITS * eps + n * single) * geometry.scale * rotated_q.norm(dim=-1)
    allowed = of_queries[..., None] * rotated_k.norm(dim=-1)[:, None]
    allowed += torch.finfo(torch.float32).tiny
    bias = geometry.distance_bias(n)
    return allowed if bias is None else allowed + UNITS * eps * bias.abs().max().to(allowed)


def _rounding_of_scores(
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
    if geometry.distance_bias(0) is None:
        return attn_scores
    positions = torch.arange(rotated_k.shape[1], device=rotated_k.device) if rows is None else rows
    unbiased = geometry.capped(geometry.scale * (rotated_q * rotated_k[:, positions]).sum(-1))
    offset = attn_scores.gather(-1, positions[None, :, None].expand(len(attn_scores), -1, 1))[..., 0] - unbiased
    return attn_scores - offset.where(offset != -torch.inf, 0.0)[..., None]


def is_pattern(attn_scores: Float[Tensor, "*batch head query key"]) -> bool:
    """Tell softmax's output from scores: bridges leave some architectures' attention to Hugging Face."""
    return bool((attn_scores >= 0).all() and (attn_scores.float().sum(-1) - 1).abs().max() < 0.02)


# Of every pass


def layer_capture(
    geometry: LayerGeometry,
    parts: Mapping[str, Tensor],
    heads: Sequence[int],
    needs: Container[str],
    prompt: int,
    tokens: Int[Tensor, " pos"] | None,
    span: slice = slice(None),
    sinks: Float[Tensor, " model_head"] | None = None,
) -> LayerCapture:
    """Make a LayerCapture of the parts of one prompt, each [head, pos, d] as `Probed.read` gives it, without its
    padding; and of the logits that join each row's softmax, where the layer has some.

    Its tensors lie where sums can be formed in float64, see `tl_posgen.arithmetic`.
    """
    tensors: dict[str, Any] = {}
    for part in ("q", "k", *(part for part in ("v", "pattern") if part in needs)):
        x = parts[part]
        x = x[:, span, span] if part == "pattern" else x[:, span]
        rows = [head // (geometry.n_heads // len(x)) for head in heads]  # a key head has several query heads, or one
        # all heads as they are need no copy: of a pattern it would cost more than the softmax that made it
        tensors[part] = at_least_float32(summable(x if rows == list(range(len(x))) else x[rows]))
    tensors |= {part: at_least_float32(summable(parts[part][span])) for part in ("resid", "inputs") if part in needs}
    capture = LayerCapture(geometry, heads, prompt, None if tokens is None else summable(tokens[span]), **tensors)
    if "attn_scores" in needs:
        plain = plain_scores(summable(parts["attn_scores"][list(heads), span, span]), parts["q"].dtype)
        capture.attn_scores = without_row_offsets(plain, capture.q, capture.k, geometry)
    if geometry.sinks and sinks is not None:
        capture.sinks = summable(sinks[list(heads)])
    return capture


def checked_rows(n: int, n_rows: int = ROWS) -> Int[Tensor, " row"]:
    """Return the queries whose scores are compared: so many of them, evenly spread, the last among them."""
    return torch.linspace(0, n - 1, min(n, n_rows), device="cpu").round().long()


def verify_capture(
    capture: LayerCapture,
    attn_scores: Float[Tensor, "model_head query key"] | None,
    pattern: Float[Tensor, "model_head query key"] | None,
    dtype: torch.dtype,
    span: slice = slice(None),
    *,
    all_scores: bool = True,
    all_patterns: bool = True,
) -> LayerCapture:
    """Return the capture, or an `EditedCapture` where the pass used other scores than its q and k give, by what is
    known of it: its scores, else its pattern, else nothing to compare with.

    Compared are 64 rows of every chosen head, or all, and which keys they see. ALiBi is compared up to a constant per
    row. The host waits once.

    Args:
        attn_scores, pattern: of the whole prompt, padding included.
        dtype: the model's.
        span: the text, among all tokens of the prompt.
        all_scores, all_patterns: whether hooks may have edited any row, so that all are compared.
    """
    heads, geometry = torch.as_tensor(list(capture.heads), device="cpu"), capture.geometry
    if attn_scores is None:
        if pattern is None:
            capture.proved = False
        elif not is_softmax(capture.scores(), summable(pattern[heads, span, span]), dtype, sinks=geometry.sinks):
            why = (
                f"layer {capture.layer}: the cached pattern is not the softmax of the scores that the cached q and k "
                "give (edited by a hook, or of another model?); add hook_attn_scores to the cache to measure those."
            )
            return EditedCapture(capture, None, why)
        return capture
    n, before, of_heads = capture.q.shape[1], span.start or 0, heads.to(attn_scores.device)
    rows = checked_rows(n, n if all_scores else ROWS)
    used = plain_scores(attn_scores[of_heads[:, None], (before + rows).to(of_heads.device)].to(capture.device), dtype)
    why, masked = _difference(capture, used, rows, dtype, span)
    if why:
        pass_scores = None
        if not masked:
            all_rows = used if all_scores else plain_scores(attn_scores[of_heads, span].to(capture.device), dtype)
            pass_scores = all_rows[..., span]
            pass_scores = without_row_offsets(pass_scores, capture.rotated_q, capture.rotated_k, geometry)
        capture = EditedCapture(capture, pass_scores, why)
    if pattern is not None:
        places = heads[:, None], before + checked_rows(n, n if all_patterns else ROWS)
        row_scores, row_pattern = plain_scores(summable(attn_scores[places]), dtype), summable(pattern[places])
        sinks = geometry.sinks or not all_patterns  # where no hook edits a row, what it lacks went elsewhere
        capture.edited_pattern = not is_softmax(row_scores, row_pattern, pattern.dtype, sinks=sinks)
    return capture


def as_streamed(
    capture: LayerCapture, done: LayerAttention, prompt: int, span: slice, dtype: torch.dtype
) -> StreamedCapture:
    """Return the capture of one prompt's text, of a pass that formed no scores; UnsupportedModelError where q and k do
    not give its scores.

    A few rows are compared, as in `verify_capture`. That the pass summed the values by these scores is proved as it
    runs (`tl_posgen.models.streaming.stream`).
    """
    heads, group = list(capture.heads), done.q.shape[1] // done.k.shape[1]
    q, k = done.q[prompt, heads, span], done.k[prompt, [head // group for head in heads], span]
    q, k = (at_least_float32(summable(x.detach())) for x in (q, k))
    rows = checked_rows(capture.length, _STREAMED_ROWS)
    on_device = rows.to(capture.q.device)
    used = scores_from(q[:, on_device], k, capture.geometry, heads, on_device)
    if why := _difference(capture, used, rows, dtype)[0]:
        raise UnsupportedModelError(f"{why} Where streaming=False is possible, the scores of the pass are measured.")
    return StreamedCapture(capture, None if done.sinks is None else summable(done.sinks[heads].detach()))


def _difference(
    capture: LayerCapture,
    used: Float[Tensor, "head row key"],
    rows: Int[Tensor, " row"],
    dtype: torch.dtype,
    span: slice = slice(None),
) -> tuple[str, bool]:
    """Say how scores that a pass used in some rows differ from those of its q and k, and whether it is in the keys that
    are seen, those outside of the text among them; "" where |recomputed - used| <= `allowed_error`, entry by entry.
    Sets `capture.finite`."""
    rows = rows.to(capture.q.device)
    positions, geometry = capture.query_positions[rows], capture.geometry
    q, k = capture.rotated_q[:, rows], capture.rotated_k
    recomputed = scores_from(q, k, geometry, capture.heads, positions)
    padded, used = used, used[..., span]
    seen = used != -torch.inf
    masked = seen != (recomputed != -torch.inf)
    if used.shape[-1] < padded.shape[-1]:  # padding
        masked = masked | ((padded != -torch.inf).sum() > seen.sum())
    used = without_row_offsets(used, q, k, geometry, positions)
    error = (recomputed - used).detach().abs_().masked_fill_(~seen, 0).nan_to_num_(torch.inf)
    fine = ~masked.any() & (error <= allowed_error(q, k, geometry, dtype)).all()
    # scale max |q| max |k| d_head < 1e15: no score is NaN, and its square is far from float32's largest number
    largest = capture.q.norm(torch.inf) * capture.k.norm(torch.inf) * capture.q.shape[-1]
    finite = largest * max(1.0, geometry.scale) < _SURELY_FINITE
    fine, capture.finite = torch.stack([fine, finite]).tolist()
    if fine:
        return "", False
    recomputed, hidden = recomputed.detach(), bool(masked.any())
    head, row, _ = map(int, torch.unravel_index((masked.float() if hidden else error).argmax(), error.shape))
    differs = "sees other keys than its mask gives"
    if not hidden:
        off, most = float(error[head, row].max()), float(recomputed[head, row][seen[head, row]].abs().max())
        differs = f"has scores that its q and k do not give: off by {off:.2g}, the row's largest being {most:.2g}"
    return (
        f"{head_name(capture.layer, capture.heads[head])}, query {int(positions[row])} {differs}. Likely cause: a hook "
        "that edits scores, or queries or keys after their hooks; buffers or functions of attention that changed after "
        "the model was probed (tl_posgen.check(model) probes it again); or a geometry that changes at some length "
        f"below {capture.length} tokens."
        + ("" if hidden else _rounding_of_scores(float(error.max()), q, k, geometry, dtype))
    ), hidden


def is_softmax(
    scores: Float[Tensor, "head row key"],
    pattern: Float[Tensor, "head row key"],
    dtype: torch.dtype,
    *,
    sinks: bool = False,
) -> bool:
    """Tell whether a pattern is the softmax of these scores; with `sinks`, that times some 0 < share <= 1 of each row.

    |pattern - expected| <= allowed * max(expected, its row's largest / 1000), with allowed = 1/1000, or 8 units of
    rounding in the model's dtype. Rows that see nothing are left out.
    """
    expected, pattern = scores.softmax(-1), pattern.float()
    most, at = expected.max(-1, keepdim=True)
    allowed = max(1e-3, 8 * rounding_unit(dtype, scores.device))
    share = pattern.gather(-1, at) / most if sinks else torch.ones_like(most)
    near = (pattern - share * expected).abs() <= allowed * share * torch.maximum(expected, 1e-3 * most)
    possible = (share > 0) & (share <= 1 + allowed)
    unseen = (scores == -torch.inf).all(-1, keepdim=True)
    return bool(((near & possible) | unseen).all())
