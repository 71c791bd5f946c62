"""A sweep of two models of unlike size: files, failures, what a second run does, one dataset, the page, the command."""

import json
import os
import sys
import time

import numpy as np
import pytest
import xarray as xr

import tl_posgen
from tl_posgen.cli import main
from tl_posgen.errors import InputError, ModelError
from tl_posgen.studies.collect import open_study, report_study
from tl_posgen.studies.processes import local
from tl_posgen.studies.run import states, sweep

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
def test_a_failure_is_kept_with_its_error_and_tried_again_on_request(study, family_directory, tmp_path):
    out = tmp_path / "runs"
    first = sweep(study, out=out, progress=False)
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.nc")}
    untried = sweep(study, out=out, progress=False)
    assert first.finished == ("mini/bundled",)
    assert list(first.failed) == ["tiny/bundled"]
    assert first.failed["tiny/bundled"].startswith("ModelError: ")
    assert untried.failed == first.failed
    assert states(study, out) == {"mini/bundled": "finished", "tiny/bundled": "failed"}
    [kept] = out.glob("tiny*.json")
    error = json.loads(kept.read_text())
    assert error["job"] == "tiny/bundled"
    assert "Traceback" in error["traceback"]
    study["models"][1]["tokenizer"] = str(family_directory("llama"))
    again = sweep(study, out=out, retry=True, progress=False)
    assert again.finished == ("mini/bundled", "tiny/bundled")
    assert again.is_whole
    assert {name: (out / name).stat().st_mtime_ns for name in before} == before

    data = open_study(out)
    assert data["three_axis_r"].dims == ("init", "group", "model", "revision", "text", "tokens", "layer", "head")
    assert data["init"].values.tolist() == ["trained", "0"]
    options = {"measures": ["three_axis", "loss"], "shuffled_seeds": (), **CUT}
    single = tl_posgen.analyze("mini", tl_posgen.models.bundled_text(), **options)
    of_mini = data["three_axis_r"].sel(model="mini", revision="main", text="bundled", drop=True)
    np.testing.assert_array_equal(of_mini, single["three_axis"].dataset["r"].transpose(*of_mini.dims))
    loss = data["loss_loss"].sel(init="trained", model="mini")
    np.testing.assert_array_equal(loss.values.ravel(), single["loss"].own["loss"])
    usual = data["three_axis_r"].sel(init="trained", group="all", tokens="all")
    assert int(np.isfinite(usual).any(("layer", "head")).sum()) == 2
    assert bool(np.isnan(usual.sel(model="tiny")).any())  # fewer layers or heads

    report = report_study(out)
    kinds = report["study"].kinds
    assert kinds == ["models", "size"]
    for kind in kinds:
        assert len(report["study"].plot(kind).data) >= 2
    assert "over 2 models (random init" in report.findings()[0]
    assert report.provenance["finished jobs"] == len(report["study"].frame()) == 2
    report.write(out / "report")
    xr.testing.assert_identical(tl_posgen.load(out / "report")["study"].dataset, report["study"].dataset)


@pytest.mark.slow
def test_two_models_alike_without_random_inits_are_said_to_be_so(tmp_path):
    models = ["mini", {"name": "mini", "label": "again"}]
    cut = {"length": 12, "n_prompts": 1, "null_seeds": []}
    sweep({"name": "alike", "models": models, "measures": ["three_axis"], **cut}, out=tmp_path, progress=False)
    report = report_study(tmp_path)
    assert " in all 2 models." in report.findings()[0]
    assert "random init" not in report["study"].plot("models").layout.title.text


def test_what_cannot_be_swept_is_refused_before_work_starts(study, tmp_path):
    wrong = [
        ({"study": study | {"models": ["./nowhere"]}}, "nowhere"),
        ({"study": study | {"texts": ["nowhere.txt"]}}, "nowhere.txt: no such file"),
        ({"study": study, "executor": "slurm"}, "executor 'slurm'"),
        ({"study": study, "workers": 0}, "workers 0"),
        ({"study": study, "shard": "3/2"}, "such as 1/4"),
    ]
    for options, said in wrong:
        with pytest.raises((InputError, ModelError), match=said) as refusal:
            sweep(**options, out=tmp_path / "runs", progress=False)
        assert "\n" not in str(refusal.value)
        assert not (tmp_path / "runs").exists()
    with pytest.raises(InputError, match="no finished job there"):
        open_study(tmp_path)


def test_a_damaged_result_is_named_with_the_remedy(tmp_path):
    study = {"name": "one", "models": ["mini"], "length": 8, "n_prompts": 1, "null_seeds": [], "measures": ["loss"]}
    for name, age in (("killed", 7200), ("of_another_shard", 60)):
        (tmp_path / f".partial-{name}").mkdir()
        os.utime(tmp_path / f".partial-{name}", times=(time.time() - age,) * 2)
    sweep(study, out=tmp_path, progress=False)
    assert [path.name for path in tmp_path.glob(".partial-*")] == [".partial-of_another_shard"]
    [path] = tmp_path.glob("*.nc")
    path.write_bytes(path.read_bytes()[:-100])
    for run in (lambda: sweep(study, out=tmp_path, progress=False), lambda: open_study(tmp_path)):
        with pytest.raises(InputError, match=rf"{path.name}: .*; delete the file, and it is measured again"):
            run()


def test_an_interrupted_sweep_says_what_is_kept(tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text("Down, down, down. Would the fall never come to an end?")
    study = {"name": "two", "models": ["mini"], "length": 8, "n_prompts": 1, "null_seeds": [], "measures": ["loss"]}
    study["texts"] = ["bundled", str(tmp_path / "text.txt")]

    def interrupted(groups, work):
        yield from local([groups[0][:1]], work)
        raise KeyboardInterrupt

    monkeypatch.setattr("tl_posgen.studies.run.local", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweep(study, out=tmp_path / "runs")
    said = f"1 of 2 jobs are finished and kept in {tmp_path / 'runs'}; the same command goes on from there"
    assert said in "".join(capsys.readouterr())
    monkeypatch.undo()
    assert sweep(study, out=tmp_path / "runs", progress=False).is_whole


def test_the_command_lists_runs_and_refuses(tmp_path, monkeypatch, capsys):
    (tmp_path / "study.toml").write_text(
        'name = "one"\nmodels = ["mini"]\nlength = 8\nn_prompts = 1\nmeasures = ["loss"]\nnull_seeds = []'
    )

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["tl-posgen", "sweep", *map(str, words), "--out", str(tmp_path / "runs")])
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0), capsys.readouterr()

    code, said = run(tmp_path / "study.toml", "--list")
    assert (code, said.out.split()) == (0, ["to", "do", "mini/bundled"])
    assert not (tmp_path / "runs").exists()
    code, said = run(tmp_path / "study.toml")
    assert code == 0, said.err
    assert "1 finished in" in said.out
    assert (tmp_path / "runs" / "report" / "index.html").exists()
    code, said = run(tmp_path / "none.toml")
    assert code == 2
    assert said.err.startswith("error: ")
    assert len(said.err.splitlines()) == 1
