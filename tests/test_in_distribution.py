"""examples/in_distribution: edits against the package's own hooks; as much interaction, at other queries and keys."""

import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "in_distribution"))
import draw
import edits

from tl_posgen.hooks import lm_infinite
from tl_posgen.position.substitution.hooks import by_split, query_profile, substitute

INSIDE, N = 12, 30


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(3, 2000, (1, N), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def logits(mini, tokens):
    def under(hooks):
        with torch.inference_mode():
            return mini.run_with_hooks(tokens, fwd_hooks=hooks)

    return under


@pytest.fixture(scope="module")
def captured(mini, tokens):
    """The capture of layer 1, and what each edit makes of it."""
    found = []

    def scores_of(capture):
        found.append(capture)
        return capture.scores()

    mini.run_with_hooks(tokens, fwd_hooks=edits.replace_scores(mini, scores_of, layers=[1]))
    return found[0]


def test_intact_is_the_model_and_with_windows_lm_infinite(mini, logits):
    torch.testing.assert_close(logits(edits.edit_scores(mini, INSIDE, "intact")), logits([]))
    with_windows = logits(edits.edit_scores(mini, INSIDE, "intact", windows=True))
    torch.testing.assert_close(with_windows, logits(lm_infinite(mini, INSIDE, edits.N_GLOBAL)))
    assert not torch.allclose(with_windows, logits([]), atol=1e-2)


def test_the_cut_is_the_split_on_each_querys_profile(mini, logits):
    expected = logits(substitute(mini, by_split(query_profile)))
    torch.testing.assert_close(logits(edits.edit_scores(mini, N, "cut")), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("windows", [False, True])
def test_as_much_is_changed_at_every_distance_by_the_cut_and_by_the_noise(captured, windows):
    distance = torch.arange(N)[:, None] - torch.arange(N)
    attended = (distance >= 0) & ((distance < INSIDE) | (torch.arange(N) < 3) if windows else True)
    residual = edits.interaction(captured, INSIDE, attended, frozen=windows)
    moved = edits.shuffled(residual, attended, INSIDE, torch.Generator().manual_seed(0))
    assert not (residual.masked_fill(attended, 0)).any()
    assert not (moved.masked_fill(attended, 0)).any()
    assert residual.sum(-1).abs().max() < 1e-3
    for start in range(0, N, INSIDE):
        for d in range(N):
            one, other = (
                x[:, start : start + INSIDE][:, (distance == d)[start : start + INSIDE]] for x in (residual, moved)
            )
            torch.testing.assert_close(one.sort(-1).values, other.sort(-1).values)
    beyond = residual[:, INSIDE:].flatten(), moved[:, INSIDE:].flatten()
    assert abs(torch.corrcoef(torch.stack(beyond))[0, 1]) < 0.4


def test_freezing_either_part_and_then_the_other_is_freezing_all(captured):
    one, other = (edits.frozen_part(captured, INSIDE, edit) for edit in edits.FROZEN)
    true, frozen = (edits.exact(captured, INSIDE, frozen=so) for so in (False, True))
    torch.testing.assert_close((one + other).tril(), (true + frozen).tril(), atol=1e-3, rtol=1e-3)
    near = torch.ones(N, N).tril() - torch.ones(N, N).tril(-INSIDE - 1) > 0
    torch.testing.assert_close(one[:, near], true[:, near], atol=1e-4, rtol=1e-4)


def test_every_edit_of_every_model_is_in_the_table_and_random_inits_do_not_count():
    rows = pd.read_csv(draw.HERE / "results.csv")
    found = draw.summarise(rows)
    assert {(one["windows"], one["edit"]) for one in found["edits"]} == {
        *((False, edit) for edit in (*edits.EDITS, *edits.FROZEN)),
        *((True, edit) for edit in edits.EDITS),
    }
    assert found["models"][0] == "mini"
    assert not any(name.endswith(draw.NULL) for name in found["models"])
    for one in found["edits"]:
        assert one["models"] == len(found["models"])
        assert one["less"] + one["more"] <= one["models"]
        assert one["mini"]["rise"] == pytest.approx(one["mini"]["loss_beyond"] - one["mini"]["loss_inside"], abs=0.01)
    below_zero = rows.assign(more_high=-1.0)
    assert {one["less"] for one in draw.summarise(below_zero)["edits"]} == {len(found["models"])}
