"""A sweep of two models of unlike size: files, failures, lost workers, what a second run does, one dataset, the page,
the command."""

import io
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass

import numpy as np
import pytest
import xarray as xr
from tqdm.auto import tqdm

import tl_posgen
from tl_posgen.core.engine import analyze
from tl_posgen.errors import InputError, OutputError
from tl_posgen.studies.overview import open_study, report_study
from tl_posgen.studies.sweep import JOBS, _outcomes, states, sweep

CUT = {"length": 12, "n_prompts": 1, "progress": False}


@pytest.fixture
def study(family_directory, tmp_path):
    """mini beside a tiny Llama that lacks a tokenizer of its own, which makes its jobs fail until it is given one."""
    other = tmp_path / "unlike" / "tiny"
    other.mkdir(parents=True)
    for path in (*family_directory("llama").glob("*.safetensors"), family_directory("llama") / "config.json"):
        (other / path.name).write_bytes(path.read_bytes())
    models = ["mini", {"name": str(other)}]
    return {"name": "two", "models": models, "length": 12, "n_prompts": 1, "measures": ["three_axis", "loss"]}


@pytest.mark.slow
def test_a_study_of_one_measure_fails_where_the_model_does_not_allow_it(family_directory, tmp_path):
    """What the measure comes after is no result in its place; of two measures the other one is."""
    study = {"name": "one", "models": [str(family_directory("gpt2"))], "length": 12, "n_prompts": 1, "nulls": 0}
    (failed,) = sweep(study | {"measures": ["band_ablation"]}, out=tmp_path / "one", progress=False).values()
    assert failed.startswith("failed: UnsupportedModelError:")
    done = sweep(study | {"measures": ["band_ablation", "three_axis"]}, out=tmp_path / "two", progress=False)
    assert [*done.values()] == ["finished"]


@pytest.mark.slow
def test_a_failing_model_is_one_line_and_is_tried_again_by_the_next_run(study, family_directory, tmp_path, capsys):
    out = tmp_path / "runs"
    first = sweep(study, out=out, progress=False)
    before = {path.name: path.stat().st_mtime_ns for path in (out / JOBS).glob("*.nc")}
    assert list(before) == ["mini-bundled.nc"]
    assert first == states(study, out) == {"mini/bundled": "finished", "tiny/bundled": first["tiny/bundled"]}
    assert first["tiny/bundled"].startswith("failed: ModelError: ")
    [line] = [line for line in capsys.readouterr().err.splitlines() if "failed" in line]
    assert line == f"tiny/bundled {first['tiny/bundled']}"
    study["models"][1]["tokenizer"] = str(family_directory("llama"))
    assert sweep(study, out=out, progress=False) == {"mini/bundled": "finished", "tiny/bundled": "finished"}
    assert {name: (out / JOBS / name).stat().st_mtime_ns for name in before} == before
    assert sorted(path.name for path in out.rglob("*")) == [JOBS, "mini-bundled.nc", "tiny-bundled.nc"]

    data = open_study(out)
    assert data["three_axis_r"].dims == ("init", "group", "model", "revision", "text", "tokens", "layer", "head")
    assert data["init"].values.tolist() == ["trained", "0", "shuffled 0"]
    options = {"measures": ["three_axis", "loss"], **CUT}
    single = tl_posgen.analyze("mini", tl_posgen.models.bundled_text(), **options)
    of_mini = data["three_axis_r"].sel(model="mini", revision="main", text="bundled", drop=True)
    np.testing.assert_array_equal(of_mini, single["three_axis"].dataset["r"].transpose(*of_mini.dims))
    loss = data["loss_loss"].sel(init="trained", model="mini")
    np.testing.assert_array_equal(loss.values.ravel(), single["loss"].trained["loss"])
    usual = data["three_axis_r"].sel(init="trained", group="all", tokens="all")
    assert int(np.isfinite(usual).any(("layer", "head")).sum()) == 2
    assert bool(np.isnan(usual.sel(model="tiny")).any())  # fewer layers or heads

    report = report_study(out)
    kinds = report["study"].kinds
    assert kinds == ["models", "size"]
    for kind in kinds:
        assert len(report["study"].plot(kind).data) >= 2
    assert re.search(r"over 2 models \(random init \S+, shuffled \S+\)", report.findings()[0])
    assert report.provenance["nulls"]["shuffled"] == [0]
    assert {trace.name.rpartition(", ")[2] for trace in report["study"].plot("size").data} == {
        *("mean", "random init", "shuffled")
    }
    assert report.provenance["finished jobs"] == len(report["study"].frame()) == 2
    report.write(out / "report")
    xr.testing.assert_identical(tl_posgen.load(out / "report")["study"].dataset, report["study"].dataset)


@pytest.mark.slow
def test_two_models_alike_without_random_inits_are_said_to_be_so(tmp_path):
    models = ["mini", {"name": "mini", "label": "again"}]
    cut = {"length": 12, "n_prompts": 4, "nulls": 0}
    sweep({"name": "alike", "models": models, "measures": ["three_axis"], **cut}, out=tmp_path, progress=False)
    report = report_study(tmp_path)
    assert " in all 2 models." in report.findings()[0]
    assert "random init" not in report["study"].plot("models").layout.title.text


def test_what_cannot_be_swept_is_refused_before_work_starts(study, tmp_path):
    wrong = [
        ({"study": study | {"models": ["./nowhere"]}}, "nowhere"),
        ({"study": study | {"texts": ["nowhere.txt"]}}, "nowhere.txt: no such file"),
        ({"study": study, "workers": 0}, "workers 0: give 1 or more"),
    ]
    for options, said in wrong:
        with pytest.raises(InputError, match=said) as refusal:
            sweep(**options, out=tmp_path / "runs", progress=False)
        assert "\n" not in str(refusal.value)
        assert not (tmp_path / "runs").exists()
    with pytest.raises(InputError, match="no finished job there"):
        open_study(tmp_path)


def test_a_damaged_result_is_named_with_the_remedy(tmp_path):
    study = {"name": "one", "models": ["mini"], "length": 8, "n_prompts": 1, "nulls": 0, "measures": ["loss"]}
    sweep(study, out=tmp_path, progress=False)
    [path] = (tmp_path / JOBS).iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    for run in (lambda: sweep(study, out=tmp_path, progress=False), lambda: open_study(tmp_path)):
        with pytest.raises(InputError, match=rf"{path.name}: .*; delete the file, and it is measured again"):
            run()


def test_an_interrupted_sweep_says_what_is_kept(tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text("Down, down, down. Would the fall never come to an end?")
    study = {"name": "two", "models": ["mini"], "length": 8, "n_prompts": 1, "nulls": 0, "measures": ["loss"]}
    study["texts"] = ["bundled", str(tmp_path / "text.txt")]

    calls = []

    def interrupted(model, words, *, keep, **how):
        """At the second text, when its measure is done and kept."""
        report = analyze(model, words, keep=keep, **how)
        calls.append(len(keep.files))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return report

    monkeypatch.setattr("tl_posgen.studies.sweep.analyze", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweep(study, out=tmp_path / "runs")
    said = f"1 of 2 jobs are finished and kept in {tmp_path / 'runs'}; the same again goes on from there"
    assert said in "".join(capsys.readouterr())
    assert calls == [1, 1]
    [part] = (tmp_path / "runs" / "parts" / "mini-text").iterdir()
    assert states(study, tmp_path / "runs") == {"mini/bundled": "finished", "mini/text": "begun"}
    with monkeypatch.context() as patched:  # a part that is there is not measured
        patched.setattr("tl_posgen.core.steps.one_pass", lambda *_, **__: pytest.fail("measured again"))
        assert [*sweep(study, out=tmp_path / "runs", progress=False).values()] == ["finished"] * 2
    assert not part.exists()
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [JOBS]


@dataclass(frozen=True)
class Quick:
    """A job without a model: `kind` is what becomes of it."""

    name: str
    kind: str = ""


def run(groups, out, **how):
    """The failures of jobs that write their name into a directory; Ctrl-C of the tests' own stays theirs."""

    def work(jobs):
        for job in jobs:
            if job.kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if job.kind == "full":
                raise OutputError("no space")
            with (out / job.name).open("a") as file:
                file.write(f"{os.getpid()}\n")
        return jobs[0].name, {job.name: "why" for job in jobs if job.kind == "failing"}

    with tqdm(total=len(groups), file=io.StringIO()) as bar:
        failed = dict(_outcomes(groups, work, how, bar))
        return failed, bar.n


@pytest.mark.slow
def test_a_lost_worker_costs_its_model_and_no_other(tmp_path):
    jobs = [Quick("a"), Quick("b", "killed"), Quick("c"), Quick("d", "failing"), Quick("e")]
    failed, done = run([[job] for job in jobs], tmp_path, n_jobs=2, return_as="generator_unordered")
    assert sorted(failed) == ["b", "d"]
    assert failed["b"].startswith("its worker was lost (A worker process managed by the executor was unexpectedly")
    assert failed["d"] == "why"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c", "d", "e"]
    assert done >= 4
    with pytest.raises(OutputError, match="no space"):
        run([[Quick("f", "full")], [Quick("g")]], tmp_path, n_jobs=2, return_as="generator_unordered")


def test_jobs_of_this_process_run_one_after_the_other(tmp_path):
    assert run([[Quick("a", "failing"), Quick("b")], [Quick("c")]], tmp_path, n_jobs=1) == ({"a": "why"}, 2)
    assert {path.read_text() for path in tmp_path.iterdir()} == {f"{os.getpid()}\n"}


ON_RAY = """
import sys, tl_posgen
study = {"name": "two", "models": ["mini", {"name": "mini", "label": "again"}], "measures": ["loss"],
         "length": 8, "n_prompts": 1, "nulls": 0}
print(*tl_posgen.sweep(study, out=sys.argv[1], ray="local", progress=False).values())
"""


@pytest.mark.slow
def test_ray_takes_jobs_and_what_is_not_there_is_one_line(tmp_path, monkeypatch):
    """Ray itself starts, hence seconds; in a process of its own, as its warnings are not ours."""
    pytest.importorskip("ray", reason="Ray is not installed; the extra ray brings it")
    temporary = tempfile.mkdtemp(dir="/tmp")  # the names of Ray's sockets have to be short
    beside = os.environ | {"RAY_TMPDIR": temporary, "RAY_ADDRESS": ""}
    done = subprocess.run([sys.executable, "-c", ON_RAY, str(tmp_path)], capture_output=True, text=True, env=beside)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "finished finished"
    assert sorted(path.name for path in (tmp_path / JOBS).iterdir()) == ["again-bundled.nc", "mini-bundled.nc"]


def test_ray_that_is_not_installed_is_one_line(study, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"in a clone of tl_posgen: pip install '.\[ray\]'"):
        sweep(study, out=tmp_path, ray="auto", progress=False)


def test_the_command_lists_runs_and_refuses(tmp_path, command):
    (tmp_path / "study.toml").write_text(
        'name = "one"\nmodels = ["mini"]\nlength = 8\nn_prompts = 1\nmeasures = ["loss"]\nnulls = 0'
    )

    def run(*words):
        return command("sweep", *words, "--out", tmp_path / "runs")

    code, printed, _ = run(tmp_path / "study.toml", "--list")
    assert (code, printed.split()) == (0, ["mini/bundled", "to", "do"])
    assert not (tmp_path / "runs").exists()
    code, printed, error = run(tmp_path / "study.toml")
    assert code == 0, error
    assert "1 finished, 0 failed in" in printed
    assert (tmp_path / "runs" / "report" / "index.html").exists()
    (tmp_path / "changed.toml").write_text((tmp_path / "study.toml").read_text().replace("= 8", "= 9"))
    for words in (["none.toml"], ["changed.toml"], ["changed.toml", "--list"]):
        code, _, error = run(tmp_path / words[0], *words[1:])
        assert code == 2
        assert error.startswith("error: ")
        assert len(error.splitlines()) == 1


@pytest.mark.slow
def test_a_study_of_interventions_keeps_the_condition_and_compares_what_it_does(tmp_path):
    """Of two models alike: all conditions are there, and what is followed is not the unchanged model's number."""
    study = {"name": "two", "models": ["mini", {"name": "mini", "label": "again"}], "length": 32, "n_prompts": 2}
    study |= {"measures": ["substitution", "three_axis"], "nulls": 0}
    sweep(study, out=tmp_path, progress=False)
    data, alone = open_study(tmp_path), tl_posgen.load(next((tmp_path / JOBS).glob("mini-*.nc")))["substitution"]
    shares, of_mini = alone.measure.recovered(alone.numbers), data["substitution_recovered"].sel(model="mini")
    kept = of_mini.isel(init=0, revision=0, text=0).sel(group="all").dropna("condition").to_series()
    assert kept.to_dict() == {name: shares[name].value for name in shares if name in kept.index}
    assert set(shares) - {*kept.index} == {"unchanged", "uniform_attention"}
    assert data["substitution_loss"].sizes["condition"] > 20
    assert data["tokenization"].values.ravel().tolist() == [0, 0]
    report = report_study(tmp_path)
    assert "Substitution, share of the loss recovered over 2 models, " in " ".join(report.findings())
    assert report["study"].kinds == ["conditions", "models"]
    panels = [text.text for text in report["study"].plot("models").layout.annotations]
    assert panels == ["r", "r within rows"]
