"""The script that trains the mini model: runs on any books, and an interrupted run ends where a whole one does."""

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

SCRIPT = Path(__file__).parents[1] / "examples" / "mini_model" / "train.py"
HELD_OUT = ("lewis_carroll_alice_s_adventures_in_wonderland.txt", "kenneth_grahame_the_wind_in_the_willows.txt")


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    directory = tmp_path_factory.mktemp("books")
    for number, name in enumerate((*HELD_OUT, "another.txt")):
        body = " ".join(f"chapter {n} of book {number} says {n * n % 97}" for n in range(900))
        (directory / name).write_text(f"# Title: {name}\n-------\n{body}", encoding="utf-8")
    return directory


def train(books: Path, work: Path, *more: str) -> dict:
    options = ["--books", books, "--work", work, "--steps", 12, "--batch", 1, "--vocab-size", 300, "--threads", 1]
    subprocess.run([sys.executable, SCRIPT, *map(str, options), *more], check=True, capture_output=True)
    final = work / "checkpoints" / "step00012" / "model.safetensors"
    return load_file(final) if final.exists() else {}


def test_a_run_that_stops_and_resumes_ends_with_the_same_weights(books, tmp_path):
    whole = train(books, tmp_path / "whole")
    assert train(books, tmp_path / "resumed", "--until", "7") == {}
    resumed = train(books, tmp_path / "resumed")
    assert whole.keys() == resumed.keys()
    assert all((whole[name] == resumed[name]).all() for name in whole)
