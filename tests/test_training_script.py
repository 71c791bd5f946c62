"""The script that trains the mini model: runs on any books, and an interrupted run ends where a whole one does."""

import runpy
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "examples" / "mini_model" / "train.py"
HELD_OUT = ("lewis_carroll_alice_s_adventures_in_wonderland.txt", "kenneth_grahame_the_wind_in_the_willows.txt")


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    directory = tmp_path_factory.mktemp("books")
    for number, name in enumerate((*HELD_OUT, "another.txt")):
        body = " ".join(f"chapter {n} of book {number} says {n * n % 97}" for n in range(900))
        (directory / name).write_text(f"# Title: {name}\n-------\n{body}", encoding="utf-8")
    return directory


@pytest.fixture
def train(books, monkeypatch):
    """The script, in this process, into a directory: its last checkpoint, where it came to that."""

    def run(work: Path, *more: str) -> dict:
        options = ["--books", books, "--work", work, "--steps", 4, "--batch", 1, "--vocab-size", 300, "--threads", 1]
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, options), *more])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        final = work / "checkpoints" / "step00004" / "model.safetensors"
        return load_file(final) if final.exists() else {}

    return run


def test_a_run_that_stops_and_resumes_ends_with_the_same_weights(train, tmp_path):
    whole = train(tmp_path / "whole")
    assert train(tmp_path / "resumed", "--until", "2") == {}
    resumed = train(tmp_path / "resumed")
    assert whole.keys() == resumed.keys()
    assert all((whole[name] == resumed[name]).all() for name in whole)
    first = load_file(tmp_path / "whole" / "checkpoints" / "step00000" / "model.safetensors")
    assert any((whole[name] != first[name]).any() for name in whole)
