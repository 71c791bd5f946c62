"""One bar an analysis: what every measure plans is what it counts, and what takes long says so."""

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
import xarray as xr
from quick_options import OPTIONS
from tqdm.auto import tqdm

import tl_posgen
from tl_posgen import Measure, progress
from tl_posgen.core import registry
from tl_posgen.models.loss import token_losses
from tl_posgen.models.tokens import bundled_text, to_prompts
from tl_posgen.progress import Passes

CUT = {"length": 18, "n_prompts": 3, "null_seeds": (0,)}
MORE = {  # several draws and inner tokens, as each is planned
    "perturbation": {"ratios": (0.2,), "reaches": ("uniform",), "n_cloze": 2},
    "coupling": {"k": 2, "tokens": (0, 3, -1), "chance_samples": 1},
    "token_coupling": {"k": 2, "tokens": (0, 3, -1), "chance_samples": 1},
}
QUICK = ("mean_key", "split_examples")
PROCEDURES = [name for name in registry.measurable() if registry.find(name).runs_model]


@pytest.fixture
def analyses(monkeypatch):
    """The passes of every analysis of this test."""
    kept = []

    class Kept(Passes):
        asked = 0  # as planned, whatever was counted then

        def __enter__(self):
            kept.append(self)
            return super().__enter__()

        def plan(self, each, once=0, purpose=""):
            self.asked += self.models * each + once
            super().plan(each, once, purpose)

    monkeypatch.setattr("tl_posgen.core.engine.Passes", Kept)
    return kept


@pytest.fixture(scope="session")
def small_bridge(small):
    return tl_posgen.load_model(small, backend="bridge")


def measures_named(*names):
    """Return measures with the options of this file, also those that they come after."""
    found = {name: registry.find(name) for name in names}
    found |= {one.name: one for kind in found.values() for one in kind.after}
    return [kind.with_options({**OPTIONS, **MORE}.get(name, {})) for name, kind in found.items()]


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCEDURES)
def test_every_measure_makes_the_passes_that_it_plans(analyses, small_model, name):
    tl_posgen.analyze(small_model, bundled_text(), measures=measures_named(name), **CUT)
    (passes,) = analyses
    assert 0 < passes.asked == passes.done


@pytest.mark.slow
@pytest.mark.parametrize(("family", "backend"), [("gpt2", "hooked"), ("bloom", "bridge"), ("gemma2", "bridge")])
def test_so_do_models_without_rope_and_with_windows(analyses, family_model, family, backend):
    tokens = torch.arange(2 * 12).reshape(2, 12)
    names = ("attention_examples", "split_examples", "dummy_distance", "slash_transfer", "token_coupling", "profiles")
    asked = {"measures": measures_named(*names), "skip_unsupported": True, "null_seeds": (0,)}
    tl_posgen.analyze(family_model(family, backend), tokens, **asked)
    (passes,) = analyses
    assert 0 < passes.asked == passes.done


@pytest.mark.slow
@pytest.mark.parametrize("name", ["coupling", "token_coupling"])
def test_contexts_of_a_bridge_are_counted_whole_and_in_pieces(analyses, small_bridge, monkeypatch, name):
    for at_once in (2**20, 18 * 5):
        monkeypatch.setattr("tl_posgen.coupling.jacobians._SCORES_AT_ONCE", at_once)
        tl_posgen.analyze(small_bridge, bundled_text(), measures=measures_named(name), **CUT)
    assert all(0 < one.asked == one.done for one in analyses)


@pytest.mark.slow
def test_chosen_heads_are_fewer_passes(analyses, small_bridge):
    few = {**CUT, "n_prompts": 2, "null_seeds": ()}
    asked = measures_named("profiles", "key_cut", "plane_perturbation")
    for heads in (None, [(1, 0), (1, 3)]):
        tl_posgen.analyze(small_bridge, bundled_text(), measures=asked, heads=heads, **few)
    every, some = analyses
    assert some.asked == some.done < every.asked == every.done


def test_one_bar_stays_for_all_measures_and_models(small_model, capsys):
    tl_posgen.analyze(small_model, bundled_text(), measures=QUICK, **CUT)
    shown = capsys.readouterr().err.split("\n")
    assert len(shown) == 2
    assert shown[1] == ""
    last = shown[0].split("\r")[-1]
    assert "random init (seed 0): 100%" in last
    assert " 12/12 " in last  # three prompts of three models, an example of two, and one pass to choose the example
    assert "about" not in last


def test_no_progress_shows_and_counts_nothing(analyses, small_model, capsys):
    seen = []
    look = [("blocks.0.hook_resid_pre", lambda value, hook: seen.append(progress._counting.get()))]
    tl_posgen.analyze(small_model, bundled_text(), measures=QUICK, fwd_hooks=look, progress=False, **CUT)
    assert seen.count(None) == len(seen) > 0
    assert analyses[0].done == 0
    assert capsys.readouterr().err == ""


def hooks_of(model):
    return [len(x) for one in model.modules() for x in (one._forward_hooks, one._forward_pre_hooks)]


@pytest.mark.parametrize("raised", [KeyboardInterrupt, RuntimeError])
def test_what_stops_an_analysis_closes_the_bar(analyses, small_model, raised):
    before = hooks_of(small_model)

    def stop(value, hook):
        if analyses[-1].done:
            assert list(tqdm._instances)
            raise raised

    with pytest.raises(raised):
        tl_posgen.analyze(
            small_model, bundled_text(), measures=QUICK, fwd_hooks=[("blocks.0.hook_resid_pre", stop)], **CUT
        )
    assert not list(tqdm._instances)
    assert progress._counting.get() is None
    assert hooks_of(small_model) == before
    assert analyses[0].done < analyses[0].planned


def measure_that_plans(n):
    """Two passes a model, and n planned."""

    @dataclass(frozen=True)
    class Plans(Measure):
        """loss = -ln p."""

        question = "?"

        def prompt_tokens(self, model, prompts, length, n_prompts, consecutive=False):
            return to_prompts(model, prompts, length=length, n_prompts=2)

        def of_model(self, run):
            if n is not None:
                run.plan(n)
            token_losses(run.model, run.tokens, batch=1)
            return xr.Dataset()

    return Plans()


@pytest.mark.parametrize("planned", [None, 1, 9])
def test_a_wrong_plan_ends_at_what_was_counted(small_model, capsys, planned):
    tl_posgen.analyze(small_model, bundled_text(), measures=[measure_that_plans(planned)], **CUT)
    last = capsys.readouterr().err.strip().split("\r")[-1]
    assert "100%" in last
    assert " 4/4 " in last


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(progress, "perf_counter", clock := Clock())
    return clock


def run_for(clock, n, seconds):
    for _ in range(n):
        progress.count(1)
        clock.now += seconds


def test_what_takes_long_is_said_once_after_its_first_pass(clock, capsys):
    with Passes(shown=True, models=2) as passes:
        with passes.stage("substitution", "mini", ["perturbation", "key_cut"], ["widths", "search_steps"]):
            passes.plan(10, once=5, purpose="condition (5) x prompt (2)")
            run_for(clock, 2, 4.0)
            said = capsys.readouterr().err
            run_for(clock, 13, 9.0)
        clock.now += 1000  # a random init is made meanwhile
        with passes.stage("substitution", "random init (seed 0)"):
            run_for(clock, 10, 9.0)
    expected = (
        "substitution, mini: 25 forward passes, random inits included, about 1.7 min (1 of them took 4.0 s): "
        "condition (5) x prompt (2); fewer with widths, search_steps; "
        "perturbation, key_cut not yet counted\n"
    )
    assert expected in said
    assert "about" not in capsys.readouterr().err


def test_short_passes_are_watched_for_two_seconds(clock, capsys):
    with Passes(shown=True, models=1) as passes, passes.stage("loss", "mini"):
        passes.plan(3000)
        run_for(clock, 3000, 0.01)
    (said,) = [line for line in capsys.readouterr().err.replace("\r", "\n").split("\n") if "about" in line]
    assert said == "loss, mini: 3,000 forward passes, about 30 s (200 of them took 2.0 s)"


def test_what_turns_out_long_is_said_then(clock, capsys):
    with Passes(shown=True, models=1) as passes:
        with passes.stage("loss", "mini"):
            passes.plan(10)
            run_for(clock, 10, 1.0)
        assert "about" not in capsys.readouterr().err
        with passes.stage("coupling", "mini"):
            passes.plan(10)
            run_for(clock, 10, 6.0)
    assert "coupling, mini: 10 forward passes, about 1.0 min (1 of them took 6.0 s)" in capsys.readouterr().err


def test_passes_outside_an_analysis_are_nobodys(small_model, capsys):
    token_losses(small_model, torch.arange(12)[None])
    assert capsys.readouterr().err == ""


def test_a_bar_that_the_environment_switches_off_is_no_error():
    """tqdm reads TQDM_DISABLE when it is imported, so in a process of its own."""
    lines = (
        "from tl_posgen.progress import Passes, count",
        "with Passes(shown=True, models=2) as passes:",
        "    for label, planned in (('mini', 3), ('random init (seed 0)', 0)):",
        "        with passes.stage('three_axis', label):",
        "            passes.plan(planned, once=planned)",
        "            for _ in range(2): count(1)",
        "assert passes.bar.disable",
    )
    environment = {**os.environ, "TQDM_DISABLE": "1"}
    ran = subprocess.run([sys.executable, "-c", "\n".join(lines)], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
