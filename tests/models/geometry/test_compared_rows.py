"""Rows of scores and patterns against those of q and k: what counts as the same, and how what differs is named."""

from dataclasses import replace

import pytest
import torch

from tl_posgen.errors import UnsupportedModelError
from tl_posgen.models.geometry.proof import allowed_error, as_streamed, checked_rows, is_softmax, verify_capture
from tl_posgen.models.layers.capture import EditedCapture, LayerCapture, StreamedCapture
from tl_posgen.models.layers.fused import LayerAttention, Mask
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.rope.rotation import Rope, inverse_frequencies


def test_the_rows_that_are_compared():
    assert checked_rows(5).tolist() == [0, 1, 2, 3, 4]
    rows = checked_rows(1000).tolist()
    assert (rows[0], rows[-1], len(set(rows))) == (0, 999, 64)


GEOMETRY = LayerGeometry(5, "rotary", 4, 4, 8, 0.3, Rope(inverse_frequencies(8)))


def drawn(geometry: LayerGeometry = GEOMETRY) -> tuple[LayerCapture, torch.Tensor]:
    """Two of a layer's four heads, and the scores of all four."""
    q, k = torch.randn(2, 4, 100, 8, generator=torch.Generator().manual_seed(0))
    scores = LayerCapture(geometry, range(4), 0, None, q, k).scores()
    return LayerCapture(geometry, [3, 1], 0, None, q[[3, 1]], k[[3, 1]]), scores


def as_used(
    capture: LayerCapture, scores: torch.Tensor, dtype: torch.dtype, *, every_row: bool = False
) -> LayerCapture:
    return verify_capture(capture, scores, None, dtype, all_scores=every_row)


def edited(scores: torch.Tensor, head: int, row: int, key: int, change: float) -> torch.Tensor:
    scores = scores.clone()
    scores[head, row, key] += change
    return scores


def test_scores_of_heads_that_were_not_chosen_may_be_anything():
    capture, scores = drawn()
    assert as_used(capture, scores, torch.float32, every_row=True) is capture
    assert as_used(capture, edited(scores, 0, 99, 3, 0.5), torch.float32, every_row=True) is capture


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("share", "same"), [(0.8, True), (1.2, False)])
def test_every_entry_may_be_off_by_what_rounding_may_do(dtype, share, same):
    capture, scores = drawn()
    allowed = allowed_error(capture.rotated_q, capture.rotated_k, GEOMETRY, dtype)
    found = as_used(capture, edited(scores, 1, 99, 3, share * float(allowed[1, 99, 3])), dtype)
    assert (found is capture) == same


def test_an_edit_is_named_and_the_scores_are_those_of_the_pass():
    capture, scores = drawn()
    changed = edited(edited(scores, 1, 99, 3, 0.5), 1, 99, 7, -0.25)
    found = as_used(capture, changed, torch.float32)
    assert isinstance(found, EditedCapture)
    assert torch.equal(found.scores(), changed[[3, 1]])
    largest = float(capture.scores()[1, 99].abs().max())
    with pytest.raises(UnsupportedModelError) as refusal:
        assert found.q is None
    assert str(refusal.value).startswith(
        "L5H1, query 99 has scores that its q and k do not give: off by 0.5, the row's largest being "
        f"{largest:.2g}. Likely cause"
    )
    assert "at some length below 100 tokens" in str(refusal.value)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_scores_that_are_no_numbers_are_not_those_of_q_and_k(value):
    capture, scores = drawn()
    found = as_used(capture, edited(scores, 3, 99, 6, value), torch.float32)
    assert isinstance(found, EditedCapture)
    with pytest.raises(UnsupportedModelError, match="L5H3, query 99 "):
        assert found.q is None


def test_an_edit_between_the_rows_that_are_compared_is_seen_in_every_row_only():
    capture, scores = drawn()
    between = max(set(range(100)) - set(checked_rows(100).tolist()))
    changed = edited(scores, 1, between, 3, 0.5)
    assert as_used(capture, changed, torch.float32) is capture
    with pytest.raises(UnsupportedModelError, match=f"L5H1, query {between} has scores"):
        assert as_used(capture, changed, torch.float32, every_row=True).q is None


@pytest.mark.parametrize("change", [-torch.inf, torch.inf], ids=["hidden", "shown"])
def test_another_mask_is_named_before_other_scores(change):
    capture, scores = drawn()
    changed = edited(scores, 3, 0, 0, 0.5)
    if change < 0:
        changed[1, 99, 40] = change
    else:
        changed[1, 50, 51:] = 0.0
    found = as_used(capture, changed, torch.float32, every_row=True)
    assert isinstance(found, EditedCapture)
    with pytest.raises(UnsupportedModelError, match=r"L5H1, query (99|50) sees other keys than its mask gives\."):
        found.scores()


def test_alibi_is_compared_and_kept_up_to_a_constant_per_row():
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    capture, scores = drawn(replace(GEOMETRY, encoding="alibi", rope=Rope(), alibi_slopes=slopes))
    by_key = scores + slopes[:, None, None] * torch.arange(100)[:, None]
    assert as_used(capture, by_key, torch.float32, every_row=True) is capture
    found = as_used(capture, edited(by_key, 1, 99, 3, 0.5), torch.float32)
    torch.testing.assert_close(found.scores(), edited(scores, 1, 99, 3, 0.5)[[3, 1]])


STREAMED = [0, 14, 28, 42, 57, 71, 85, 99]  # the rows of a streamed pass that are compared


def turned(rotated_q: torch.Tensor, rotated_k: torch.Tensor, head: int, row: int, by: float) -> torch.Tensor:
    """Keys of which this row's own makes a score that is off by so much; earlier rows do not see it."""
    q, k = rotated_q[head, row], rotated_k.clone()
    k[head, row] += by / GEOMETRY.scale * q / (q @ q)
    return k


def streamed(capture: LayerCapture, q: torch.Tensor, k: torch.Tensor, sinks, dtype: torch.dtype) -> StreamedCapture:
    """The capture of a pass that rotated the queries and keys of two of its four heads to these."""
    whole = torch.zeros(2, 1, 4, 100, 8)
    whole[0, 0, capture.heads], whole[1, 0, capture.heads] = q, k
    done = LayerAttention(whole[0], whole[1], whole[1], whole[0], Mask.of_window(100), sinks)
    return as_streamed(capture, done, 0, slice(0, 100), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row", STREAMED)
def test_rows_of_a_streamed_pass_may_be_off_by_what_rounding_may_do(dtype, row):
    capture, _ = drawn()
    q, k, sinks = capture.rotated_q, capture.rotated_k, torch.tensor([9.0, 0.25, 9.0, 0.5])
    allowed = float(allowed_error(q[:, STREAMED], k, GEOMETRY, dtype)[1, STREAMED.index(row), row])
    found = streamed(capture, q, turned(q, k, 1, row, 0.8 * allowed), sinks, dtype)
    assert isinstance(found, StreamedCapture)
    assert found.sinks.tolist() == [0.5, 0.25]
    assert torch.equal(found.q, capture.q)
    with pytest.raises(UnsupportedModelError, match=f"L5H1, query {row} has scores that its q and k do not"):
        streamed(capture, q, turned(q, k, 1, row, 1.2 * allowed), sinks, dtype)


def test_what_a_streamed_pass_differs_by_is_named():
    capture, _ = drawn()
    q, k = capture.rotated_q, capture.rotated_k
    with pytest.raises(UnsupportedModelError) as refusal:
        streamed(capture, q, turned(q, turned(q, k, 0, 99, 0.5), 1, 57, -0.25), None, torch.float32)
    assert str(refusal.value).startswith("L5H3, query 99 has scores that its q and k do not give: off by 0.5, ")
    assert "at some length below 100 tokens" in str(refusal.value)
    with pytest.raises(UnsupportedModelError, match="L5H3, query 0 has scores"):
        streamed(capture, q.index_fill(1, torch.tensor(0), torch.nan), k, None, torch.float32)


def test_a_cache_is_held_against_its_scores_else_its_pattern_else_nothing():
    capture, scores = drawn()
    pattern = scores.softmax(-1)
    assert verify_capture(capture, scores, pattern.flip(-1), torch.float32) is capture
    assert verify_capture(capture, None, pattern, torch.float32) is capture
    assert capture.proved
    between = edited(scores, 1, max(set(range(100)) - set(checked_rows(100).tolist())), 3, 0.5)
    assert isinstance(verify_capture(capture, between, pattern, torch.float32), EditedCapture)
    found = verify_capture(capture, None, between.softmax(-1), torch.float32)
    with pytest.raises(UnsupportedModelError, match="layer 5: the cached pattern is not the softmax"):
        found.scores()
    assert verify_capture(capture, None, None, torch.float32) is capture
    assert not capture.proved


@pytest.mark.parametrize("sinks", [True, False])
def test_shares_of_a_row_are_no_edit_where_sinks_take_the_rest(sinks):
    capture, scores = drawn(replace(GEOMETRY, sinks=sinks))
    shares = 0.7 * scores[list(capture.heads)].softmax(-1)
    pattern = torch.zeros_like(scores).index_copy(0, torch.tensor(capture.heads), shares)
    dtype = torch.float32
    assert verify_capture(capture, scores, pattern, dtype).edited_pattern is not sinks
    assert isinstance(verify_capture(capture, None, pattern, dtype), EditedCapture) is not sinks
    assert is_softmax(capture.scores(), shares, dtype, sinks=sinks) is sinks


def test_what_a_row_lacks_is_no_edit_where_no_hook_is():
    """Sinks that took next to nothing of the probe's rows."""
    capture, scores = drawn(GEOMETRY)
    pattern = 0.97 * scores.softmax(-1)
    for is_hooked in (True, False):
        found = verify_capture(capture, scores, pattern, torch.float32, all_patterns=is_hooked)
        assert found.edited_pattern is is_hooked


def test_a_pattern_is_as_exact_as_its_dtype():
    scores = torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(0))
    pattern, off = scores.softmax(-1), torch.ones(3, 4, 9)
    for at_dtype, share in {torch.float32: 1e-3, torch.bfloat16: 2**-4}.items():
        for part, holds in ((0.95, True), (1.05, False)):
            off[2, 1, 5] = 1 + part * share
            assert is_softmax(scores, pattern * off, at_dtype) == holds
    scores[..., 0] -= 20  # what is next to nothing is not compared
    off[2, 1, 5], off[..., 0] = 1, 2
    assert is_softmax(scores, scores.softmax(-1) * off, torch.float32)
    assert not is_softmax(scores, pattern.flip(-1), torch.float32)


def test_every_row_is_compared_on_its_own_scale():
    """A sink may take another share of each; what is next to nothing in one row may be the most of another."""
    scores = torch.zeros(2, 2, 3000)
    scores[0, 0, 0] = 20  # one row sees one key, the others all
    pattern = scores.softmax(-1)
    shares = torch.tensor([[0.2, 0.9], [0.5, 1.0]])[..., None]
    assert is_softmax(scores, shares * pattern, torch.float32, sinks=True)
    assert not is_softmax(scores, shares * pattern, torch.float32)
    for head, row in [(0, 1), (1, 0)]:
        changed = pattern.clone()
        changed[head, row, 1234] *= 1.5
        assert not is_softmax(scores, changed, torch.float32, sinks=True)


def test_rows_that_see_nothing_are_left_out():
    scores = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    scores[1, 2] = -torch.inf
    pattern = scores.softmax(-1)
    for filled in (torch.nan, 0.0, 0.2):
        pattern[1, 2] = filled
        assert is_softmax(scores, pattern, torch.float32)
        assert is_softmax(scores, pattern, torch.float32, sinks=True)
    assert not is_softmax(scores, pattern.flip(-1), torch.float32)


def test_softmax_is_told_from_its_edits():
    scores = torch.randn(3, 4, 9).masked_fill(torch.rand(3, 4, 9) < 0.2, -torch.inf)
    pattern = scores.softmax(-1)
    assert is_softmax(scores, pattern, torch.float32)
    assert is_softmax(scores, 0.3 * pattern, torch.float32, sinks=True)  # it takes its share of each row
    for sinks in (False, True):
        assert not is_softmax(scores, (1.1 * scores).softmax(-1), torch.float32, sinks=sinks)
        for factor in (0.0, 1.1):  # the commonest edit there is, and one that no sink makes
            assert not is_softmax(scores, factor * pattern, torch.float32, sinks=sinks)
    assert not is_softmax(scores, 0.5 * pattern, torch.float32)
    scores[0, 0, :3] = torch.tensor([-30.0, -torch.inf, 1.0])
    for key in (0, 1):  # next to nothing there, and hidden
        added = scores.softmax(-1)
        added[0, 0, key] += 0.05
        for sinks in (False, True):
            assert not is_softmax(scores, added, torch.float32, sinks=sinks)
