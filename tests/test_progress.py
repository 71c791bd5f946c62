"""One bar an analysis: what every measure plans is what it counts."""

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
from tl_posgen.claims import judge_claims
from tl_posgen.core import registry
from tl_posgen.models.loss import token_losses
from tl_posgen.models.tokens import bundled_text, to_prompts
from tl_posgen.progress import Passes

CUT = {"length": 18, "n_prompts": 3, "null_seeds": (0,)}
MORE = {  # several draws and inner tokens, as each is planned
    "perturbation": {"ratios": (0, 0.2), "reaches": ("uniform",), "n_cloze": 2},
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
        asked = made = 0  # as planned, and as begun, whatever was counted then

        def __enter__(self):
            kept.append(self)
            return super().__enter__()

        def plan(self, stages):
            super().plan(stages)
            self.asked = self.total

        def begin(self, n):
            super().begin(n)
            self.made += n

    for module in ("core.engine", "claims.running"):
        monkeypatch.setattr(f"tl_posgen.{module}.Passes", Kept)
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
    assert 0 < passes.asked == passes.made


@pytest.mark.slow
@pytest.mark.parametrize(("family", "backend"), [("gpt2", "hooked"), ("bloom", "bridge"), ("gemma2", "bridge")])
def test_so_do_models_without_rope_and_with_windows(analyses, family_model, family, backend):
    tokens = torch.arange(2 * 12).reshape(2, 12)
    names = ("attention_examples", "split_examples", "dummy_distance", "slash_transfer", "token_coupling", "profiles")
    asked = {"measures": measures_named(*names), "skip_unsupported": True, "null_seeds": (0,)}
    tl_posgen.analyze(family_model(family, backend), tokens, **asked)
    (passes,) = analyses
    assert 0 < passes.made <= passes.asked < 1.5 * passes.made  # where nothing rotates there is no example


@pytest.mark.slow
@pytest.mark.parametrize("name", ["coupling", "token_coupling"])
def test_contexts_of_a_bridge_are_counted_whole_and_in_pieces(analyses, small_bridge, monkeypatch, name):
    for at_once in (2**20, 18 * 5):
        monkeypatch.setattr("tl_posgen.coupling.jacobians._SCORES_AT_ONCE", at_once)
        tl_posgen.analyze(small_bridge, bundled_text(), measures=measures_named(name), **CUT)
    assert all(0 < one.asked == one.made for one in analyses)


@pytest.mark.slow
def test_chosen_heads_are_fewer_passes(analyses, small_bridge):
    few = {**CUT, "n_prompts": 2, "null_seeds": ()}
    asked = measures_named("profiles", "substitution", "plane_perturbation")
    for heads in (None, [(1, 0), (1, 3)]):
        tl_posgen.analyze(small_bridge, bundled_text(), measures=asked, heads=heads, **few)
    every, some = analyses
    assert some.asked == some.made < every.asked == every.made


def test_one_bar_stays_for_all_measures_and_models(small_model, capsys):
    tl_posgen.analyze(small_model, bundled_text(), measures=QUICK, **CUT)
    shown = capsys.readouterr().err.split("\n")
    assert len(shown) == 2
    assert shown[1] == ""
    last = shown[0].split("\r")[-1]
    assert "random init (seed 0): 100%" in last
    assert " 12/12 " in last  # three prompts of three models, an example of two, and one pass to choose the example


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
    assert analyses[0].done < analyses[0].total


def measure_that_plans(n):
    """Two passes a model, and n planned."""

    @dataclass(frozen=True)
    class Plans(Measure):
        """loss = -ln p."""

        question = "?"

        def prompt_tokens(self, model, prompts, length, n_prompts, consecutive=False):
            return to_prompts(model, prompts, length=length, n_prompts=2)

        def passes(self, run):
            return n

        def of_model(self, run):
            for row in run.tokens:
                token_losses(run.model, row[None])
            return xr.Dataset()

    return Plans()


@pytest.mark.parametrize(("planned", "total"), [(1, 2), (2, 4), (9, 4)])
def test_the_bar_of_a_wrong_plan_is_full_at_the_end_and_never_grows(small_model, capsys, monkeypatch, planned, total):
    totals = []
    monkeypatch.setattr(tqdm, "refresh", lambda bar, *_, **__: totals.append(bar.total))
    tl_posgen.analyze(small_model, bundled_text(), measures=[measure_that_plans(planned)], **CUT)
    assert f" {total}/{total} " in capsys.readouterr().err.strip().split("\r")[-1]
    assert totals == sorted(totals, reverse=True)


@pytest.mark.slow
def test_claims_have_one_plan_of_all_their_analyses_less_what_is_kept(analyses, small_model, alice, tmp_path):
    """Two analyses, of Jacobians across layers and between tokens."""
    run = {"papers": ["coupling"], "length": 12, "n_prompts": 2, "keep": tmp_path}
    judge_claims(small_model, alice, **run)
    next((tmp_path / "parts").glob("token_coupling*")).unlink()
    judge_claims(small_model, alice, **run)
    whole, rest = analyses
    assert 0 < rest.total == rest.made < whole.made == whole.asked


def test_passes_outside_an_analysis_are_nobodys(small_model, capsys):
    token_losses(small_model, torch.arange(12)[None])
    assert capsys.readouterr().err == ""


def test_a_bar_that_the_environment_switches_off_is_no_error():
    """tqdm reads TQDM_DISABLE when it is imported, so in a process of its own."""
    lines = (
        "from tl_posgen.progress import Passes, Stage, count_pass",
        "with Passes(shown=True) as passes:",
        "    passes.plan(Stage('three_axis', label, 3) for label in ('mini', 'random init'))",
        "    for label in ('mini', 'random init'):",
        "        with passes.stage('three_axis', label):",
        "            for _ in range(2): count_pass(1)",
        "assert passes.bar.disable",
    )
    environment = {**os.environ, "TQDM_DISABLE": "1"}
    ran = subprocess.run([sys.executable, "-c", "\n".join(lines)], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
