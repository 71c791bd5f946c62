"""A capture with other queries or keys: its scores follow from these, and the one that it came from stays as it is."""

from dataclasses import replace

import pytest
import torch
from captures import run

from tl_posgen.models.layers.capture import LayerCapture, scores_from

TOKENS = torch.arange(5, 29)[None]


@pytest.fixture(params=["whole", "streamed", "at other positions"])
def capture(mini_bridge, request):
    if request.param == "streamed":
        from tl_posgen.models.streaming.stream import streaming

        with streaming(mini_bridge):
            return run(mini_bridge, TOKENS)[1]
    made = run(mini_bridge, TOKENS)[1]
    return made if request.param == "whole" else made.at(torch.arange(24) + 40 * (torch.arange(24) > 9))


def scores_of(capture: LayerCapture, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Scores of q and k at the capture's positions."""
    from tl_posgen.rope.rotation import rotate

    turned = [rotate(x, capture.positions, capture.geometry.rope) for x in (q, k)]
    return scores_from(*turned, capture.geometry, capture.heads, capture.positions, capture.positions)


@pytest.mark.parametrize("seen_before", [True, False])
def test_scores_are_those_of_the_new_queries_and_keys(capture, seen_before):
    before = scores_of(capture, capture.q, capture.k)
    if seen_before:  # what was computed of the old ones is not that of the new ones
        torch.testing.assert_close(capture.scores(), before)
    k, q = capture.k.mean(1, keepdim=True).expand_as(capture.k), capture.q.flip(1)
    changed = capture.with_qk(q=q, k=k)
    torch.testing.assert_close(changed.scores(), scores_of(capture, q, k))
    torch.testing.assert_close(capture.with_qk(k=k).scores(), scores_of(capture, capture.q, k))
    torch.testing.assert_close(capture.scores(), before)
    assert type(changed) is not LayerCapture or (changed.pattern is None and changed.attn_scores is None)


def test_a_streamed_pattern_is_made_of_the_new_keys(mini_bridge):
    from tl_posgen.models.streaming.stream import streaming

    with streaming(mini_bridge):
        capture = run(mini_bridge, TOKENS)[1]
    old, changed = capture.pattern, capture.with_qk(k=capture.k * 0)
    uniform = torch.ones(24, 24).tril() / torch.arange(1, 25)[:, None]
    torch.testing.assert_close(changed.pattern, uniform.expand_as(old))


@pytest.mark.parametrize("seen_before", [True, False])
def test_a_copy_by_dataclasses_has_scores_and_positions_of_its_own(mini_bridge, seen_before):
    capture = run(mini_bridge, TOKENS)[1].at(torch.arange(24) * 3)
    before = scores_of(capture, capture.q, capture.k)
    if seen_before:
        capture.scores()
    k = capture.k.flip(1)
    torch.testing.assert_close(replace(capture, k=k).scores(), scores_of(capture, capture.q, k))
    torch.testing.assert_close(capture.scores(), before)
