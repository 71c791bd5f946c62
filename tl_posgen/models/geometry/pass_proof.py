"""A layer's capture of one pass, made of what its hooks carried, and its proof, at that length and with whatever hooks
are at work: the scores that the pass used are those of its queries and keys."""

from collections.abc import Container, Mapping, Sequence
from functools import partial
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


def layer_capture(
    probed: Probed,
    parts: Mapping[str, Tensor],
    heads: Sequence[int],
    needs: Container[str],
    prompt: int,
    tokens: Int[Tensor, " pos"] | None,
    span: slice = slice(None),
) -> LayerCapture:
    """Make a LayerCapture of one prompt's parts, each [head, pos, d] as `Sites.read` gives it, cut to its text.

    Its tensors lie where sums can be formed in float64, see `tl_posgen.arithmetic`.
    """
    geometry, parts = probed.geometry, {part: _cut(part, value, span) for part, value in parts.items()}
    of_heads = partial(_chosen_heads, heads, geometry.n_heads)
    capture = LayerCapture(
        geometry,
        heads,
        prompt,
        None if tokens is None else summable(tokens[span]),
        of_heads(parts["q"]),
        of_heads(parts["k"]),
        v=of_heads(parts["v"]) if "v" in needs else None,
        pattern=of_heads(parts["pattern"]) if "pattern" in needs else None,
        resid=at_least_float32(summable(parts["resid"])) if "resid" in needs else None,
        inputs=at_least_float32(summable(parts["inputs"])) if "inputs" in needs else None,
    )
    if "attn_scores" in needs:
        plain = plain_scores(summable(parts["attn_scores"][list(heads)]), parts["q"].dtype)
        capture.attn_scores = without_row_offsets(plain, capture.q, capture.k, geometry)
    return capture


def proved_capture(
    probed: Probed,
    parts: Mapping[str, Tensor],
    heads: Sequence[int],
    needs: Container[str],
    prompt: int,
    tokens: Int[Tensor, " pos"] | None,
    span: slice,
    **compared: Any,
) -> LayerCapture:
    """Make a `layer_capture`, held against the scores and the pattern among its parts as `compared` says to
    `verify_capture`."""
    capture = layer_capture(probed, parts, heads, needs, prompt, tokens, span)
    used, pattern = (_cut(part, parts[part], span) if part in parts else None for part in FORMED)
    return verify_capture(capture, used, pattern, parts["q"].dtype, **compared)


def _chosen_heads(heads: Sequence[int], n_heads: int, x: Tensor) -> Tensor:
    """Return the rows of some of `n_heads` query heads, in float32 at least, where sums can be formed."""
    group = n_heads // len(x)  # 1 where keys are already one per query head
    rows = [head // group for head in heads]
    # all heads as they are need no copy: of a pattern it would cost more than the softmax that made it
    return at_least_float32(summable(x if rows == list(range(len(x))) else x[rows]))


def _cut(part: str, value: Tensor, span: slice) -> Tensor:
    """Return a part of one prompt without its padding."""
    if span == slice(None) or span == slice(0, value.shape[-2]):
        return value
    return value[..., span, span] if part in FORMED else value[..., span, :]


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
    """Return `as_used` by what is known of the pass: its scores, else its pattern, else nothing to compare with. Hooks
    may have edited some row where all are compared."""
    heads, n, sinks = torch.as_tensor(list(capture.heads), device="cpu"), capture.length, capture.geometry.sinks
    if attn_scores is not None:
        used = as_used(capture, attn_scores, dtype, every_row=all_scores, mask_holds=mask_holds)
        if pattern is not None:
            some = heads[:, None], checked_rows(n, n if all_patterns else ROWS)
            own = plain_scores(summable(attn_scores[some]), dtype)
            used.edited_pattern = not is_softmax(own, summable(pattern[some]), pattern.dtype, sinks=sinks)
        return used
    if pattern is None:
        capture.proved = False
        return capture
    if is_softmax(capture.scores(), summable(pattern[heads]), dtype, sinks=sinks):
        return capture
    why = (
        f"layer {capture.layer}: the cached pattern is not the softmax of the scores that the cached q and k give "
        "(edited by a hook, or of another model?); add hook_attn_scores to the cache to measure those."
    )
    return EditedCapture(capture, None, why)


def as_used(
    capture: LayerCapture,
    attn_scores: Float[Tensor, "model_head query key"],
    dtype: torch.dtype,
    *,
    every_row: bool = False,
    mask_holds: Bool[Tensor, ""] | None = None,
) -> LayerCapture:
    """Return the capture, or an `EditedCapture` where the pass used other scores than its q and k give.

    Compared are 64 rows of every chosen head, or all: |recomputed - used| <= `allowed_error`, entry by entry, and which
    keys they see. ALiBi is compared up to a constant per row. `dtype` is the model's. Where `mask_holds` is
    false, which is looked at together with the scores, an `EditedCapture` comes too. The host waits once.
    """
    n = capture.q.shape[1]
    rows = checked_rows(n, n if every_row else ROWS).to(capture.q.device)
    positions = capture.query_positions[rows]
    heads = torch.as_tensor(list(capture.heads), device=attn_scores.device)
    used = plain_scores(attn_scores[heads[:, None], rows.to(heads.device)].to(capture.device), dtype)
    q, k, geometry = capture.rotated_q[:, rows], capture.rotated_k, capture.geometry
    recomputed = scores_from(q, k, geometry, capture.heads, positions)
    seen = used != -torch.inf
    masked = seen != (recomputed != -torch.inf)
    used = without_row_offsets(used, q, k, geometry, positions)
    error = (recomputed - used).abs().masked_fill(~seen, 0).nan_to_num(torch.inf)
    fine = ~masked.any() & (error <= allowed_error(q, k, geometry, dtype)).all()
    fine = fine if mask_holds is None else fine & mask_holds.to(fine.device)
    fine, capture.finite = torch.stack([fine, _surely_finite(capture)]).tolist()
    if fine:
        return capture
    head, row, _ = map(int, torch.unravel_index((masked.float() if masked.any() else error).argmax(), error.shape))
    place = f"{head_name(capture.layer, capture.heads[head])}, query {int(positions[row])}"
    if masked.any():
        differs = "sees other keys than its mask gives"
    else:
        off, largest = float(error[head, row].max()), float(recomputed[head, row][seen[head, row]].abs().max())
        differs = f"has scores that its q and k do not give: off by {off:.2g}, the row's largest being {largest:.2g}"
    why = (
        f"{place} {differs}. Likely cause: a hook that edits scores, or queries or keys after their hooks; buffers or "
        "functions of attention that changed after the model was probed (tl_posgen.check(model) probes it again); or a "
        f"geometry that changes at some length below {capture.length} tokens."
    )
    why += rounding_of_scores(float(error.max()), q, k, geometry, dtype) if not masked.any() else ""
    if masked.any():
        return EditedCapture(capture, None, why)
    whole = plain_scores(attn_scores[heads].to(capture.device), dtype)
    whole = without_row_offsets(whole, capture.rotated_q, capture.rotated_k, geometry)
    return EditedCapture(capture, whole, why)


def as_streamed(
    capture: LayerCapture,
    rotated_q: Float[Tensor, "head pos d_head"],
    rotated_k: Float[Tensor, "head pos d_head"],
    sinks: Float[Tensor, " head"] | None,
    dtype: torch.dtype,
) -> StreamedCapture:
    """Return the capture of a pass that formed no scores; UnsupportedModelError where q and k do not give its scores.

    A few rows are compared, as in `as_used`. That the pass summed the values by these scores is proved as it runs
    (`tl_posgen.models.streaming.stream`).
    """
    n, geometry = capture.length, capture.geometry
    rows = checked_rows(n, _STREAMED_ROWS).to(capture.q.device)
    q, k = capture.rotated_q[:, rows], capture.rotated_k
    recomputed = scores_from(q, k, geometry, capture.heads, rows)
    used = scores_from(rotated_q[:, rows], rotated_k, geometry, capture.heads, rows)
    error = (recomputed - used).abs().masked_fill(used == -torch.inf, 0).nan_to_num(torch.inf)
    fine = (error <= allowed_error(q, k, geometry, dtype)).all()
    fine, capture.finite = torch.stack([fine, _surely_finite(capture)]).tolist()
    if fine:
        return StreamedCapture(capture, sinks)
    head, row, _ = map(int, torch.unravel_index(error.argmax(), error.shape))
    raise UnsupportedModelError(
        f"{head_name(capture.layer, capture.heads[head])}, query {int(rows[row])} has scores that its q and k do "
        f"not give: off by {float(error[head, row].max()):.2g}. Likely cause: a hook that edits queries or keys after "
        f"their hooks, or a rotation that changes at some length below {n} tokens; where streaming=False is possible, "
        "the scores of the pass are measured." + rounding_of_scores(float(error.max()), q, k, geometry, dtype)
    )


def _surely_finite(capture: LayerCapture) -> Bool[Tensor, ""]:
    """scale max |q| max |k| d_head < 1e15: no score is NaN, and its square is far from float32's largest number."""
    largest = capture.q.abs().amax() * capture.k.abs().amax() * capture.q.shape[-1]
    return largest * max(1.0, capture.geometry.scale) < _SURELY_FINITE


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
