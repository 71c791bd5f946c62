"""The command line: what it prints, what it writes, and one clear line for what a user can mend."""

import json
import os
import subprocess
import sys

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
