"""The command line: what it prints, what it writes, and one clear line for what a user can mend."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tl_posgen.cli import main
from tl_posgen.cli.options import parse_indices
from tl_posgen.errors import InputError
from tl_posgen.models.source import MINI
from tl_posgen.report.terminal import short


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["tl-posgen", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def copy_of_mini(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((MINI / name).read_bytes())
    return directory


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The Queen of Hearts, she made some tarts, all on a summer day. " * 20, encoding="utf-8")
    return path


def test_the_main_job_prints_a_table_and_writes_three_files(monkeypatch, capsys, tmp_path, text):
    out = tmp_path / "report"
    options = ["--text", str(text), "--length", "64", "--prompts", "2", "--layers", "0-1", "--out", str(out)]
    code, printed, _ = run(monkeypatch, capsys, "analyze", *options)
    assert code == 0
    assert "random" in printed
    assert "Report:" in printed
    assert sorted(path.name for path in out.iterdir()) == ["index.html", "results.nc", "summary.json"]
    assert {head["layer"] for head in json.loads((out / "summary.json").read_text())["heads"]} == {0, 1}


def test_no_null_is_said_to_be_missing(monkeypatch, capsys, tmp_path, text):
    options = ["--text", str(text), "--length", "32", "--prompts", "1", "--no-null", "--out", str(tmp_path)]
    code, printed, _ = run(monkeypatch, capsys, "analyze", *options)
    assert code == 0
    assert "no null measured" in printed
    assert json.loads((tmp_path / "summary.json").read_text())["null"] is None


def test_check_prints_every_layer(monkeypatch, capsys):
    code, printed, _ = run(monkeypatch, capsys, "check", "--model", "mini")
    assert code == 0
    assert "rotary" in printed


CHECKPOINTS = Path(__file__).parents[1] / "examples" / "mini_model" / "checkpoints"
EXPERIMENTS = {
    "substitute": [],
    "distance": [],
    "perturb": ["--ratios", "0,0.5"],
    "planes": [],
    "slash": ["--distances", "0-2"],
    "coupling": ["--k", "5,10"],
    "downstream": ["--n-items", "2", "--ratios", "0,0.5"],
}


def written(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir())


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_prints_its_table_and_writes_its_report(monkeypatch, capsys, tmp_path, text, name):
    options = ["--text", str(text), "--length", "48", "--prompts", "2", "--out", str(tmp_path), *EXPERIMENTS[name]]
    code, printed, error = run(monkeypatch, capsys, name, *options)
    assert code == 0, error
    assert "random init" in printed
    assert "Report:" in printed
    assert written(tmp_path) == ["index.html", "results.nc", "summary.json"]


def test_length_runs_beyond_the_training_length_without_being_told_how(monkeypatch, capsys, tmp_path, text):
    options = ["--text", str(text), "--inside", "32", "--times", "3", "--prompts", "2", "--no-null"]
    code, printed, error = run(monkeypatch, capsys, "length", *options, "--out", str(tmp_path))
    assert code == 0, error
    assert "lm_infinite" in printed or "LM-Infinite" in printed


def test_emergence_takes_checkpoints_in_order(monkeypatch, capsys, tmp_path, text):
    steps = [str(CHECKPOINTS / name) for name in ("step00000", "step08000")]
    options = ["--tokenizer", "mini", "--coupling", "--text", str(text), "--length", "32", "--prompts", "2"]
    code, printed, error = run(monkeypatch, capsys, "emerge", *steps, *options, "--out", str(tmp_path))
    assert code == 0, error
    assert printed.index("step00000") < printed.index("step08000")


def test_the_toy_trains(monkeypatch, capsys, tmp_path):
    code, _, error = run(monkeypatch, capsys, "toy", "--steps", "4", "--seeds", "1", "--out", str(tmp_path))
    assert code == 0, error
    assert "index.html" in written(tmp_path)


def test_coupling_scores_reads_a_table_of_models(monkeypatch, capsys, tmp_path, text):
    rows = [f"{CHECKPOINTS / name},{score}" for name, score in (("step00000", 1), ("step08000", 2))]
    table = tmp_path / "models.csv"
    table.write_text("\n".join(["model,score", *rows]))
    options = ["--tokenizer", "mini", "--text", str(text), "--length", "32", "--prompts", "2"]
    code, printed, error = run(monkeypatch, capsys, "coupling-scores", str(table), *options, "--out", str(tmp_path))
    assert code == 0, error
    assert "2 models" in printed


def test_claims_go_on_from_finished_parts(monkeypatch, capsys, tmp_path, text):
    options = ["--papers", "coupling", "--text", str(text), "--length", "32", "--prompts", "2", "--out", str(tmp_path)]
    code, printed, error = run(monkeypatch, capsys, "claims", *options)
    assert code == 0, error
    assert "not held" in printed or "partly" in printed or "held" in printed
    (parts,) = tmp_path.glob("parts-*")
    before = {path.name: path.stat().st_mtime_ns for path in parts.iterdir()}
    assert set(before) == {"heads.nc", "coupling.nc"}
    assert run(monkeypatch, capsys, "claims", *options)[0] == 0
    assert {path.name: path.stat().st_mtime_ns for path in parts.iterdir()} == before


REFUSED = {
    "a ratio above one": (["perturb", "--ratios", "0,2"], "2"),
    "a ratio that is no number": (["perturb", "--ratios", "many"], "--ratios"),
    "a negative distance": (["distance", "--distances", "0,-1"], "-1"),
    "a limit that is no number": (["distance", "--limits", "far"], "--limits"),
    "kappa above one": (["slash", "--kappa", "2"], "kappa"),
    "a distance that no prompt reaches": (["slash", "--distances", "60"], "60"),
    "more singular vectors than the model is wide": (["coupling", "--k", "999"], "999"),
    "a layer that does not exist": (["substitute", "--from-layer", "9"], "9"),
    "a checkpoint that does not exist": (["emerge", "nowhere"], "nowhere"),
    "a paper that nobody wrote": (["claims", "--papers", "tea"], "tea"),
    "items that do not exist": (["downstream", "--items", "nowhere.jsonl"], "nowhere.jsonl"),
    "a table that does not exist": (["coupling-scores", "nowhere.csv"], "nowhere.csv"),
    "a backend that does not exist": (["analyze", "--backend", "foo"], "foo"),
    "a measure that does not exist": (["analyze", "--measures", "tea"], "tea"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_words_get_one_line_that_names_them(monkeypatch, capsys, tmp_path, text, case):
    words, named = REFUSED[case]
    options = ["--text", str(text), "--length", "48", "--prompts", "2", "--out", str(tmp_path / "never")]
    code, _, error = run(monkeypatch, capsys, *words, *options)
    line = error.strip().splitlines()[-1]
    assert code == 2
    assert line.startswith("error: ")
    assert named in line
    assert not list((tmp_path / "never").glob("*.html"))


def test_a_text_too_short_for_four_times_the_length_is_refused(monkeypatch, capsys, tmp_path, text):
    code, _, error = run(monkeypatch, capsys, "length", "--text", str(text), "--out", str(tmp_path))
    assert code == 2
    assert "461 tokens" in error


def refused(monkeypatch, capsys, tmp_path, *arguments: str) -> str:
    """Run a command that must fail: exit code 2, one line, no traceback, nothing written."""
    out = tmp_path / "never"
    code, _, error = run(monkeypatch, capsys, "analyze", *arguments, "--out", str(out))
    assert code == 2
    assert error.startswith("error: ")
    assert error.strip().count("\n") == 0
    assert not out.exists() or not list(out.iterdir())
    return error


@pytest.mark.parametrize("words", ["", "   \n", "a"])
def test_an_empty_or_one_token_text_is_refused(monkeypatch, capsys, tmp_path, words):
    path = tmp_path / "short.txt"
    path.write_text(words)
    refused(monkeypatch, capsys, tmp_path, "--text", str(path))


def test_a_text_shorter_than_the_length_is_refused_with_its_size(monkeypatch, capsys, tmp_path, text):
    error = refused(monkeypatch, capsys, tmp_path, "--text", str(text), "--length", "400", "--prompts", "40")
    assert "461 tokens" in error


@pytest.mark.parametrize("content", [b"\xff\xfe\x00\x01\x80", b"text\x00with\x00nulls" * 50])
def test_a_file_that_is_not_text_is_refused(monkeypatch, capsys, tmp_path, content):
    path = tmp_path / "picture.png"
    path.write_bytes(content)
    assert "picture.png" in refused(monkeypatch, capsys, tmp_path, "--text", str(path))


def test_a_missing_text_is_refused(monkeypatch, capsys, tmp_path):
    assert "nowhere.txt" in refused(monkeypatch, capsys, tmp_path, "--text", str(tmp_path / "nowhere.txt"))


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_directory_without_weights_tokenizer_or_config_is_refused(monkeypatch, capsys, tmp_path, text, missing):
    directory = copy_of_mini(tmp_path)
    (directory / missing).unlink()
    refused(monkeypatch, capsys, tmp_path, "--model", str(directory), "--text", str(text))


def test_nan_weights_are_refused_by_name(monkeypatch, capsys, tmp_path, text):
    directory = copy_of_mini(tmp_path)
    weights = load_file(directory / "model.safetensors")
    name = next(name for name in weights if "q_proj" in name)
    weights[name][0, 0] = torch.nan
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    error = refused(monkeypatch, capsys, tmp_path, "--model", str(directory), "--text", str(text))
    assert "q_proj" in error


def test_a_hub_name_without_network_is_refused(monkeypatch, capsys, tmp_path, text):
    error = refused(monkeypatch, capsys, tmp_path, "--model", "nobody/no-such-model", "--text", str(text))
    assert "nobody/no-such-model" in error


def test_an_output_path_that_is_a_file_is_refused_before_any_work(monkeypatch, capsys, tmp_path, text):
    blocked = tmp_path / "file"
    blocked.write_text("kept")
    code, _, error = run(monkeypatch, capsys, "analyze", "--text", str(text), "--out", str(blocked / "report"))
    assert code == 2
    assert str(blocked) in error
    assert blocked.read_text() == "kept"


@pytest.mark.parametrize("layers", ["9", "a", "0-1-2", "-1"])
def test_layers_that_do_not_exist_are_refused(monkeypatch, capsys, tmp_path, text, layers):
    refused(monkeypatch, capsys, tmp_path, "--text", str(text), "--length", "32", f"--layers={layers}")


def test_indices_are_read_as_written():
    assert parse_indices("0,2-4", "--layers") == [0, 2, 3, 4]
    assert parse_indices(None, "--layers") is None
    with pytest.raises(InputError, match="--heads"):
        parse_indices("x", "--heads")


def test_numbers_are_shortened_without_losing_a_digit():
    shown = [short(x) for x in (0.917, -0.5, 10.25, 0.0, 1.0, 100.0004)]
    assert shown == [".917", "-.500", "10.250", ".000", "1.000", "100.000"]


def test_help_needs_neither_torch_nor_transformer_lens():
    code = "import sys; sys.argv = ['tl-posgen', '--help']\n"
    code += "from tl_posgen.cli import main\n"
    code += "try: main()\nexcept SystemExit: pass\n"
    code += (
        "heavy = {'torch', 'transformer_lens', 'transformers', 'xarray'} & set(sys.modules)\nassert not heavy, heavy"
    )
    environment = os.environ | {"COLUMNS": "100"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "analyze" in done.stdout
