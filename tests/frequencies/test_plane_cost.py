"""Losses under edits of planes against edits by other means, and recall of copies under them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from interventions import logits

import tl_posgen
from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.editing.score_functions import finished
from tl_posgen.extension.frequency_rules import with_frequencies
from tl_posgen.frequencies import PlaneCost, PlaneUse, Recall
from tl_posgen.frequencies.gap import Gap
from tl_posgen.frequencies.joined_figure import join_costs_and_gap
from tl_posgen.frequencies.plane_cost import edit_planes, one_plane, part_of_planes
from tl_posgen.frequencies.recall import CONTROL, SLOWEST, move_coordinate
from tl_posgen.hooks import hold_planes
from tl_posgen.models.loss import token_losses
from tl_posgen.rope.rotation import Rope, complex_planes


def without_plane(model, plane):
    """Scores as sums over all planes but one."""

    def scores_of(capture):
        rope = capture.geometry.rope
        q, k = (complex_planes(x, rope) for x in (capture.rotated_q, capture.rotated_k))
        rest = [m for m in range(q.shape[-1]) if m != plane]
        return finished(capture.geometry.scale * (q[..., rest] @ k[..., rest].mH).real, capture)

    return replace_scores(model, scores_of)


@pytest.mark.parametrize("name", ["llama", "neox"])
def test_a_dropped_plane_is_out_of_the_sum_and_a_frozen_one_does_not_turn(family_model, name):
    model = family_model(name)
    for plane in (0, 1):
        torch.testing.assert_close(
            logits(model, edit_planes(model, "drop", one_plane(plane))), logits(model, without_plane(model, plane))
        )
        for edit, factor in (("freeze", 0.0), ("slow", 0.5)):

            def changed(rope, plane=plane, factor=factor):
                theta = rope.inv_freq.clone()
                theta[plane] *= factor
                return replace(rope, inv_freq=theta)

            expected = logits(model, with_frequencies(model, changed))
            torch.testing.assert_close(logits(model, edit_planes(model, edit, one_plane(plane))), expected)
        held = logits(model, edit_planes(model, "hold", one_plane(plane)))
        torch.testing.assert_close(held, logits(model, hold_planes(model, [plane], at="quarter turn")))


def test_parts_of_planes_hold_each_once():
    rope = Rope(torch.arange(10.0))
    for n in (3, 4):
        parts = torch.stack([part_of_planes(part, n)(rope) for part in range(n)])
        assert parts.sum(0).tolist() == [1] * 10
        assert parts.int().argmax(0).tolist() == sorted(parts.int().argmax(0).tolist())


def test_costs_are_the_rises_of_plain_runs_in_the_chosen_heads(llama):
    tokens, heads = torch.randint(2, 60, (4, 24), generator=torch.Generator().manual_seed(1)), [(0, 1), (1, 3)]
    result = PlaneCost(["freeze"], ["planes"])(llama, tokens, heads=heads, nulls=0, progress=False)
    base = token_losses(llama, tokens).mean(-1)
    (edit, rise), *more = result.measure.costs(result.numbers).items()
    assert (edit, more, rise["plane"].values.tolist()) == ("freeze", [], list(range(4)))
    for plane in range(4):
        hooks = edit_planes(llama, "freeze", one_plane(plane), heads=heads)
        expected = token_losses(llama, tokens, hooks).mean(-1) - base
        np.testing.assert_allclose(rise.sel(init="trained", plane=plane), expected, atol=1e-6)
    assert result.kinds == ["planes"]
    (curve,) = (one for one in result.plot("planes").data if one.name == "frozen")
    assert list(curve.x) == list(range(4))


def test_the_figure_of_use_shows_costs_and_the_gap_where_they_were_measured(llama):
    tokens = torch.randint(2, 60, (4, 24), generator=torch.Generator().manual_seed(1))
    measures = [PlaneUse(), PlaneCost(["drop", "freeze"], ["planes"]), Gap(gaps=[0, 48], skip=2, needle=4)]
    report = tl_posgen.analyze(llama, tokens, measures=measures, nulls=1, progress=False)
    joined = join_costs_and_gap(report)
    plain, beside = (one["plane_use"].plot("use") for one in (report, joined))
    names = {trace.name for trace in beside.data} - {trace.name for trace in plain.data}
    across = {f"{task}, {rule}" for task in ("text", "copy") for rule in ("unchanged", "planes held")}
    assert names == {"dropped", "frozen"} | across
    (curve,) = (one for one in beside.data if one.name == "copy, planes held")
    expected = report["gap"].trained["loss"].sel(task="copy", condition="hold_planes").mean("prompt")
    np.testing.assert_allclose(curve.y, expected)
    rise = report["plane_cost"].measure.costs(report["plane_cost"].numbers)["drop"]
    (bars,) = (one for one in beside.data if one.name == "dropped")
    np.testing.assert_allclose(bars.y, rise.sel(init="trained").mean("prompt"))
    assert join_costs_and_gap({"plane_use": report["plane_use"]})["plane_use"] is report["plane_use"]


def test_coordinates_are_moved_in_rotated_queries_and_keys(llama):
    from tl_posgen.frequencies.numbers.coordinates import largest_coordinate, with_coordinate_at

    def scores_of(capture):
        q, k = (with_coordinate_at(x, largest_coordinate(x), "zero") for x in (capture.rotated_q, capture.rotated_k))
        return finished(capture.geometry.scale * q @ k.mT, capture)

    moved = logits(llama, move_coordinate(llama, "zero"))
    torch.testing.assert_close(moved, logits(llama, replace_scores(llama, scores_of)))
    assert not torch.allclose(moved, logits(llama, move_coordinate(llama, "zero", largest=False, seed=1)), atol=1e-3)


@pytest.mark.slow
def test_recall_falls_without_the_planes_of_heads_that_look_up(stories, tinystories):
    result = Recall(half=24, hits=0.05)(stories, tinystories[:20_000], length=64, n_prompts=4, progress=False)
    own, data = result.numbers, result.trained
    edited, control = (data[name].stack(place=("layer", "head")) for name in ("edited", "control"))
    assert not ((edited > 0) & (control > 0)).any()
    assert own("recall").value >= own("recall").inits[0]
    if edited.any():
        assert {SLOWEST, CONTROL} <= set(data["condition"].values.tolist())
        assert float(data["hit_rate"].where(data["edited"] > 0).min()) >= 0.05
        assert int(edited.sum()) == int(control.sum()) or int(control.sum()) < int(edited.sum())


def test_prompts_of_too_few_tokens_are_refused(mini):
    with pytest.raises(tl_posgen.PosgenError, match="prompts of 2 different tokens"):
        Recall()(mini, torch.tensor([[3, 5, 6, 5, 6]]), nulls=0, progress=False)
