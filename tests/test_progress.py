"""One bar an analysis: it counts steps, says what goes on, and takes the time left from finished steps of one name."""

import os
import re
import subprocess
import sys

import pytest
import torch
from tqdm.auto import tqdm

import tl_posgen
from tl_posgen import progress
from tl_posgen.claims import judge_claims
from tl_posgen.models.loss import token_losses
from tl_posgen.models.tokens import bundled_text
from tl_posgen.progress import MAKING, count_pass, step, steps_shown

CUT = {"length": 18, "n_prompts": 3, "nulls": 1}
QUICK = ("mean_key", "split_examples")


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test lets pass: `clock[0] += 60`."""
    now = [0.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    return now


def said():
    """Return what stands behind the bar, and before it."""
    bar = progress._shown.get().bar
    return bar.postfix, bar.desc


def test_one_bar_stays_for_all_measures_and_models(small_model, capsys):
    tl_posgen.analyze(small_model, bundled_text(), measures=QUICK, **CUT)
    shown = capsys.readouterr().err.split("\n")
    assert len(shown) == 2
    assert shown[1] == ""
    last = shown[0].split("\r")[-1]
    # three models, of which the shuffled one has the shared pass alone, and the making of two of them
    assert re.match(r"split_examples random init \(seed 0\) 100%.* 7/7 .* 12 passes", last)
    for words in ("making shuffled weights (seed 0)", "mean_key shuffled weights (seed 0)"):
        assert words in shown[0]
    assert {int(n) for n in re.findall(r"/(\d+) \[", shown[0])} == {7}


def test_time_left_is_that_of_finished_steps_of_the_same_name(clock, capsys):
    with steps_shown(["rules", "variance", MAKING, "rules", "variance"], shown=True):
        with step("rules", "model"):
            clock[0] += 100
            count_pass(1)
            assert said() == ("1 pass", "rules model")
        assert said()[0] == "1 pass, more than 01:40 left"  # of the next model alone
        with step("variance", "model"):
            clock[0] += 10
            count_pass(4)
        assert said()[0] == "5 passes, more than 01:50 left"
        with step("rules", "null"):
            with step(MAKING, "null"):
                assert said()[1] == "making null"
                clock[0] += 300
                assert progress._shown.get().said() == "5 passes, more than 01:50 left"
            assert said() == ("5 passes, 01:50 left", "rules null")  # the making is not the step's own time
            clock[0] += 40
            count_pass(1)
            assert said()[0] == "6 passes, 01:10 left"
            clock[0] += 80
            count_pass(1)
            assert said()[0] == "7 passes, more than 00:10 left"
        assert said()[0] == "7 passes, 00:10 left"
    assert " 4/4 " in capsys.readouterr().err.split("\r")[-1]  # the step that did not come is left out


def test_a_step_without_a_pass_says_nothing_of_the_next(clock):
    """One whose part was kept before."""
    with steps_shown(["rules", "rules", "rules"], shown=True):
        with step("rules", "model"):
            clock[0] += 1
        assert said()[0] == "0 passes"
        with step("rules", "null"):
            clock[0] += 60
            count_pass(2)
        assert said()[0] == "2 passes, 01:00 left"


def test_blocks_inside_join_the_bar_and_what_fails_leaves_it(capsys):
    with steps_shown(["a", "b", "b"], shown=True):
        for name in "ab":
            with steps_shown([name], shown=True), step(name, "model"):
                pass
        with pytest.raises(KeyError), steps_shown(["b"], shown=True), step("b", "model"):
            raise KeyError
        with steps_shown(["c"], shown=True), step("c", "other"):  # that nobody planned
            pass
        with steps_shown(["d"], shown=False), step("d", "quiet"):
            count_pass(1)
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert " 3/3 " in shown.split("\r")[-1]
    assert "quiet" not in shown


def test_no_progress_shows_and_counts_nothing(small_model, capsys):
    seen = []
    look = [("blocks.0.hook_resid_pre", lambda value, hook: seen.append(progress._shown.get()))]
    tl_posgen.analyze(small_model, bundled_text(), measures=QUICK, fwd_hooks=look, progress=False, **CUT)
    assert seen.count(None) == len(seen) > 0
    assert capsys.readouterr().err == ""


def hooks_of(model):
    return [len(x) for one in model.modules() for x in (one._forward_hooks, one._forward_pre_hooks)]


@pytest.mark.parametrize("raised", [KeyboardInterrupt, RuntimeError])
def test_what_stops_an_analysis_closes_the_bar(small_model, raised):
    before, passes = hooks_of(small_model), []

    def stop(value, hook):
        if (steps := progress._shown.get()) is not None:
            passes.append(steps.passes)
            if steps.passes > 3:
                assert list(tqdm._instances)
                raise raised

    with pytest.raises(raised):
        tl_posgen.analyze(
            small_model, bundled_text(), measures=QUICK, fwd_hooks=[("blocks.0.hook_resid_pre", stop)], **CUT
        )
    assert not list(tqdm._instances)
    assert progress._shown.get() is None
    assert hooks_of(small_model) == before
    assert passes == [1, 2, 3, 4]


@pytest.mark.slow
def test_claims_have_one_bar_of_all_their_analyses(small_model, alice, tmp_path, capsys):
    """Two analyses, of Jacobians across layers and between tokens."""
    run = {"papers": ["coupling"], "length": 12, "n_prompts": 2, "keep": tmp_path}
    judge_claims(small_model, alice, **run)
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    totals = [int(n) for n in re.findall(r"/(\d+) \[", shown)]
    assert totals == sorted(totals, reverse=True)  # never grows
    assert f" {totals[-1]}/{totals[-1]} " in shown.split("\r")[-1]


def test_passes_outside_an_analysis_are_nobodys(small_model, capsys):
    token_losses(small_model, torch.arange(12)[None])
    assert capsys.readouterr().err == ""


def test_a_bar_that_the_environment_switches_off_is_no_error():
    """tqdm reads TQDM_DISABLE when it is imported, so in a process of its own."""
    lines = (
        "from tl_posgen.progress import _shown, count_pass, step, steps_shown",
        "with steps_shown(['three_axis', 'three_axis', 'variance'], shown=True):",
        "    for label in ('mini', 'random init'):",
        "        with step('three_axis', label):",
        "            for _ in range(2): count_pass(1)",
        "    assert _shown.get().bar.disable",
    )
    environment = {**os.environ, "TQDM_DISABLE": "1"}
    ran = subprocess.run([sys.executable, "-c", "\n".join(lines)], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
