"""The scripts that train: they run on any books, and an interrupted run ends where a whole one does."""

import runpy
import sys
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = {"mini_model": (), "encodings": ("--encoding", "split")}
HELD_OUT = ("lewis_carroll_alice_s_adventures_in_wonderland.txt", "kenneth_grahame_the_wind_in_the_willows.txt")


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    directory = tmp_path_factory.mktemp("books")
    for number, name in enumerate((*HELD_OUT, "another.txt")):
        body = " ".join(f"chapter {n} of book {number} says {n * n % 97}" for n in range(900))
        (directory / name).write_text(f"# Title: {name}\n-------\n{body}", encoding="utf-8")
    return directory


@pytest.fixture
def script(monkeypatch):
    """A script, in this process, with these options."""

    def run(path: str, *options: object) -> None:
        monkeypatch.setattr(sys, "argv", [path, *map(str, options)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        runpy.run_path(str(EXAMPLES / path), run_name="__main__")

    return run


@pytest.fixture
def train(books, script):
    """Four steps into a directory: the last checkpoint, where it came to that."""

    def run(example: str, work: Path, *more: object) -> dict:
        options = ["--books", books, "--work", work, "--steps", 4, "--batch", 1, "--vocab-size", 300, "--threads", 1]
        script(f"{example}/train.py", *options, *SCRIPTS[example], *more)
        final = list(work.glob("**/step00004/model.safetensors"))
        return load_file(final[0]) if final else {}

    return run


@pytest.mark.parametrize("example", SCRIPTS)
def test_a_run_that_stops_and_resumes_ends_with_the_same_weights(example, train, tmp_path):
    whole = train(example, tmp_path / "whole")
    assert train(example, tmp_path / "resumed", "--until", 2) == {}
    resumed = train(example, tmp_path / "resumed")
    assert whole.keys() == resumed.keys()
    assert all((whole[name] == resumed[name]).all() for name in whole)
    other = train(example, tmp_path / "other", "--seed", 1)
    assert any((whole[name] != other[name]).any() for name in whole)


def test_the_mini_model_keeps_checkpoints_on_its_way(train, tmp_path):
    whole = train("mini_model", tmp_path)
    first = load_file(tmp_path / "checkpoints" / "step00000" / "model.safetensors")
    assert any((whole[name] != first[name]).any() for name in whole)


def test_encodings_are_measured_as_far_as_they_are_trained(train, script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script("encodings/measure.py", "--work", tmp_path, "--out", tmp_path / "none")
    assert "no run is finished" in capsys.readouterr().err
    for encoding, seed in (("rope", 0), ("split", 1)):
        train("encodings", tmp_path, "--encoding", encoding, "--seed", seed)
    script("encodings/measure.py", "--work", tmp_path, "--out", tmp_path / "out", "--steps", 4, "--windows", 1)
    assert "missing: rope seed 1, rope seed 2, plain seed 0" in capsys.readouterr().err
    rows = pd.read_csv(tmp_path / "out" / "results.csv")
    assert rows["parameters"].nunique() == 1
    assert rows[["encoding", "seed", "step"]].values.tolist() == [
        [encoding, seed, step] for encoding, seed in (("rope", 0), ("split", 1)) for step in (0, 4)
    ]
    assert (rows["loss"].isna() == (rows["step"] == 0)).all()
    assert len(pd.read_csv(tmp_path / "out" / "heads.csv")) == 4 * 4 * 4
    ElementTree.parse(tmp_path / "out" / "encodings.svg")


def test_a_penalty_is_compared_as_far_as_it_is_trained(books, script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script("interaction_penalty/compare.py", "--work", tmp_path / "runs", "--out", tmp_path / "none")
    assert "no run is finished" in capsys.readouterr().err
    shape = ("--steps", 4, "--context", 32, "--batch", 1, "--strengths", 100)
    options = ("--books", books, "--work", tmp_path / "runs", "--vocab-size", 300, "--threads", 1, *shape)
    script("interaction_penalty/train.py", *options, "--seeds", 0, "--until", 2)
    script("interaction_penalty/train.py", *options, "--seeds", 0)
    script("interaction_penalty/compare.py", "--work", tmp_path / "runs", "--out", tmp_path, "--windows", 1, *shape)
    rows = pd.read_csv(tmp_path / "results.csv").set_index("run")
    assert rows.index.tolist() == ["rope", "rope, penalty 100", "split", "alibi"]
    assert rows["interaction"]["rope, penalty 100"] < rows["interaction"]["rope"] - 0.01
    assert rows["interaction"][["split", "alibi"]].max() < 1e-12
    assert (tmp_path / "summary.json").is_file()


def test_models_of_every_shape_are_small_and_run(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    shapes = runpy.run_path(str(EXAMPLES / "shapes" / "train.py"))
    for shape in shapes["SHAPES"]:
        model = shapes["new_model"](shape, shapes["VOCABULARY"].get(shape, 300), seed=0)
        assert sum(weights.numel() for weights in model.parameters()) < 1_200_000
        assert model(torch.arange(8)[None]).logits.isfinite().all()
