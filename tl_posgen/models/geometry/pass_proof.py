"""A layer's capture of one pass, made of what its hooks carried, and its proof, at that length and with whatever hooks
are at work: the scores that the pass used are those of its queries and keys."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posgen.arithmetic import rounding_unit, summable
from tl_posgen.errors import UnsupportedModelError
from tl_posgen.models.backends.sites import FORMED, plain_scores
from tl_posgen.models.geometry.probe import Probed
from tl_posgen.models.geometry.proof import allowed_error, rounding_of_scores, without_row_offsets
from tl_posgen.models.layers.capture import EditedCapture, LayerCapture, StreamedCapture, scores_from
from tl_posgen.models.selection import head_name
from tl_posgen.rope.rotation import at_least_float32

ROWS = 64  # query rows compared: all of a short prompt, the first, the last and some between of a long one
_STREAMED_ROWS = 8
_SURELY_FINITE = 1e15


def cut(parts: Mapping[str, Tensor], span: slice) -> dict[str, Tensor]:
    """Return the parts of one prompt, each [head, pos, d] as `Sites.read` gives it, without its padding."""
    return {
        part: x
        if span.indices(n := x.shape[-2])[:2] == (0, n)
        else x[..., span, span if part in FORMED else slice(None)]
        for part, x in parts.items()
    }


def layer_capture(
    probed: Probed,
    parts: Mapping[str, Tensor],
    heads: Sequence[int],
    needs: Container[str],
    prompt: int,
    tokens: Int[Tensor, " pos"] | None,
) -> LayerCapture:
    """Make a LayerCapture of the parts of one prompt, see `cut`.

    Its tensors lie where sums can be formed in float64, see `tl_posgen.arithmetic`.
    """
    geometry, given = probed.geometry, dict[str, Any]()
    for part in ("q", "k", *(part for part in ("v", "pattern") if part in needs)):
        x = parts[part]
        rows = [head // (geometry.n_heads // len(x)) for head in heads]  # a key head has several query heads, or one
        # all heads as they are need no copy: of a pattern it would cost more than the softmax that made it
        given[part] = at_least_float32(summable(x if rows == list(range(len(x))) else x[rows]))
    given |= {part: at_least_float32(summable(parts[part])) for part in ("resid", "inputs") if part in needs}
    tokens = None if tokens is None else summable(tokens)
    capture = LayerCapture(geometry, heads, prompt, tokens, **given)
    if "attn_scores" in needs:
        plain = plain_scores(summable(parts["attn_scores"][list(heads)]), parts["q"].dtype)
        capture.attn_scores = without_row_offsets(plain, capture.q, capture.k, geometry)
    return capture


def checked_rows(n: int, n_rows: int = ROWS) -> Int[Tensor, " row"]:
    """Return the queries whose scores are compared: so many of them, evenly spread, the last among them."""
    return torch.linspace(0, n - 1, min(n, n_rows), device="cpu").round().long()


def verify_capture(
    capture: LayerCapture,
    attn_scores: Float[Tensor, "model_head query key"] | None,
    pattern: Float[Tensor, "model_head query key"] | None,
    dtype: torch.dtype,
    *,
    all_scores: bool = True,
    all_patterns: bool = True,
    mask_holds: Bool[Tensor, ""] | None = None,
) -> LayerCapture:
    """Return the capture, or an `EditedCapture` where the pass used other scores than its q and k give, by what is
    known of it: its scores, else its pattern, else nothing to compare with.

    Compared are 64 rows of every chosen head, or all, and which keys they see. ALiBi is compared up to a constant per
    row. `dtype` is the model's. Where `mask_holds` is false, which is looked at together with the scores, an
    `EditedCapture` comes too. The host waits once.

    Args:
        all_scores, all_patterns: whether hooks may have edited any row, so that all are compared.
    """
    heads, geometry = torch.as_tensor(list(capture.heads), device="cpu"), capture.geometry
    if attn_scores is None:
        if pattern is None:
            capture.proved = False
        elif not is_softmax(capture.scores(), summable(pattern[heads]), dtype, sinks=geometry.sinks):
            why = (
                f"layer {capture.layer}: the cached pattern is not the softmax of the scores that the cached q and k "
                "give (edited by a hook, or of another model?); add hook_attn_scores to the cache to measure those."
            )
            return EditedCapture(capture, None, why)
        return capture
    n, of_heads = capture.q.shape[1], heads.to(attn_scores.device)
    rows = checked_rows(n, n if all_scores else ROWS)
    used = plain_scores(attn_scores[of_heads[:, None], rows.to(of_heads.device)].to(capture.device), dtype)
    why, masked = _difference(capture, used, rows, dtype, mask_holds)
    if why:
        whole = None
        if not masked:
            whole = plain_scores(attn_scores[of_heads].to(capture.device), dtype)
            whole = without_row_offsets(whole, capture.rotated_q, capture.rotated_k, geometry)
        capture = EditedCapture(capture, whole, why)
    if pattern is not None:
        some = heads[:, None], checked_rows(n, n if all_patterns else ROWS)
        own = plain_scores(summable(attn_scores[some]), dtype)
        capture.edited_pattern = not is_softmax(own, summable(pattern[some]), pattern.dtype, sinks=geometry.sinks)
    return capture


def as_streamed(
    capture: LayerCapture,
    rotated_q: Float[Tensor, "head pos d_head"],
    rotated_k: Float[Tensor, "head pos d_head"],
    sinks: Float[Tensor, " head"] | None,
    dtype: torch.dtype,
) -> StreamedCapture:
    """Return the capture of a pass that formed no scores; UnsupportedModelError where q and k do not give its scores.

    A few rows are compared, as in `verify_capture`. That the pass summed the values by these scores is proved as it
    runs (`tl_posgen.models.streaming.stream`).
    """
    rows = checked_rows(capture.length, _STREAMED_ROWS)
    on_device = rows.to(capture.q.device)
    used = scores_from(rotated_q[:, on_device], rotated_k, capture.geometry, capture.heads, on_device)
    if why := _difference(capture, used, rows, dtype)[0]:
        raise UnsupportedModelError(f"{why} Where streaming=False is possible, the scores of the pass are measured.")
    return StreamedCapture(capture, sinks)


def _difference(
    capture: LayerCapture,
    used: Float[Tensor, "head row key"],
    rows: Int[Tensor, " row"],
    dtype: torch.dtype,
    mask_holds: Bool[Tensor, ""] | None = None,
) -> tuple[str, bool]:
    """Say how scores that a pass used in some rows differ from those of its q and k, and whether it is in the keys that
    are seen; "" where |recomputed - used| <= `allowed_error`, entry by entry. Sets `capture.finite`."""
    rows = rows.to(capture.q.device)
    positions, geometry = capture.query_positions[rows], capture.geometry
    q, k = capture.rotated_q[:, rows], capture.rotated_k
    recomputed = scores_from(q, k, geometry, capture.heads, positions)
    seen = used != -torch.inf
    masked = seen != (recomputed != -torch.inf)
    used = without_row_offsets(used, q, k, geometry, positions)
    error = (recomputed - used).abs().masked_fill(~seen, 0).nan_to_num(torch.inf)
    fine = ~masked.any() & (error <= allowed_error(q, k, geometry, dtype)).all()
    fine = fine if mask_holds is None else fine & mask_holds.to(fine.device)
    # scale max |q| max |k| d_head < 1e15: no score is NaN, and its square is far from float32's largest number
    largest = capture.q.abs().amax() * capture.k.abs().amax() * capture.q.shape[-1]
    finite = largest * max(1.0, geometry.scale) < _SURELY_FINITE
    fine, capture.finite = torch.stack([fine, finite]).tolist()
    if fine:
        return "", False
    hidden = bool(masked.any())
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
        + ("" if hidden else rounding_of_scores(float(error.max()), q, k, geometry, dtype))
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
