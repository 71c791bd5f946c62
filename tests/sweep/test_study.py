"""Studies: what is refused before work starts, how jobs are called, and the examples."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from tl_posgen.errors import InputError, ModelError
from tl_posgen.models.hub import drop_from_cache, shape_of
from tl_posgen.models.source import MINI
from tl_posgen.sweep import Study
from tl_posgen.sweep.job import key_of, part_path
from tl_posgen.sweep.run import require_same_study, shard_of, write_index
from tl_posgen.sweep.texts import Text
from tl_posgen.sweep.weights import Weights, digest_of

STUDIES = sorted((Path(__file__).parents[2] / "examples" / "studies").glob("*.toml"))
LEAST = {"name": "small", "models": ["mini"]}


@pytest.fixture
def no_network(monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was asked"))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_example_lists_its_jobs_without_the_network(path, no_network):
    study = Study.of(path)
    jobs = study.jobs()
    assert study.name == path.stem
    assert len({job.file for job in jobs}) == len(jobs) == len(study.weights) * len(study.texts)
    assert len(jobs) >= 5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"models": ["mini", "mini"]}, "two jobs are called mini/bundled; give a model a label"),
        ({"models": []}, "models = []; give a list"),
        ({"models": "mini"}, "models = 'mini'; give a list"),
        ({"models": [{"revisions": ["a"]}]}, "lacks 'name'"),
        ({"models": [{"name": "mini", "size": 1}]}, "models: no entry 'size'; there are name, revisions"),
        ({"models": [{"name": "mini", "revisions": "a"}]}, "models: revisions = 'a': give a list, each a word"),
        ({"models": [{"name": "mini", "dtype": "int8"}]}, "dtype 'int8'; give one such as float32"),
        ({"models": [{"name": "mini", "backend": "jax"}]}, "backend 'jax'; choose auto, hooked, bridge"),
        ({"measures": ["three_axes"]}, "no measure 'three_axes'; known: "),
        ({"measures": ["slash", "slash"]}, "slash stands there twice"),
        ({"measures": [{"name": "slash", "kapa": 1}]}, "slash has no option 'kapa'; it has "),
        ({"measures": [{"name": "slash", "kappa": 2.0}]}, "kappa"),
        ({"measures": ["claims"]}, "claims takes no single model and prompts"),
        ({"texts": [{"path": "a", "dataset": "b"}]}, "give either a path or a dataset"),
        ({"texts": [{"path": "bundled", "characters": 0}]}, "characters = 0; give 1 or more"),
        ({"length": "long"}, "length = 'long': give a whole number"),
        ({"length": 1}, "length = 1, n_prompts = 4; give 2 and 1 at least"),
        ({"null_seeds": [0, 0]}, "each seed may stand only once"),
        ({"seed": -1}, "seed = -1"),
        ({"name": "a/b"}, "name = 'a/b'; give letters"),
        ({"lenght": 8}, "no entry 'lenght'; there are "),
    ],
)
def test_what_cannot_be_used_is_one_line(change, said):
    with pytest.raises(InputError) as refusal:
        Study.of(LEAST | change)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_file_that_is_no_study_is_named(tmp_path):
    with pytest.raises(InputError, match=r"none\.toml: cannot be read \(No such file"):
        Study.of(tmp_path / "none.toml")
    (tmp_path / "a.toml").write_text("name = ")
    with pytest.raises(InputError, match=r"a\.toml: not TOML"):
        Study.of(tmp_path / "a.toml")
    (tmp_path / "a.toml").write_text('name = "a"')
    with pytest.raises(InputError, match=r"a\.toml: study: models = None; give a list"):
        Study.of(tmp_path / "a.toml")


def test_a_job_is_named_by_everything_that_its_result_depends_on(tmp_path):
    study = Study.of(LEAST)
    jobs = [Study.of(LEAST | change).jobs()[0] for change in (
        {}, {"length": 8}, {"n_prompts": 1}, {"seed": 1}, {"null_seeds": []}, {"measures": ["slash"]},
        {"measures": [{"name": "slash", "kappa": 0.2}]}, {"models": [{"name": "mini", "backend": "bridge"}]},
        {"texts": [{"path": "bundled", "characters": 1000}]},
    )]  # fmt: skip
    assert len({job.file for job in jobs}) == len(jobs)
    assert study.jobs()[0].file == jobs[0].file
    told = Study.of(LEAST | {"measures": ["three_axis", "variance", {"name": "mean_key"}], "name": "other"})
    assert told.jobs()[0].file == jobs[0].file  # options left out are those that are used
    assert part_path(tmp_path, "a/b c", {}).name == f"a-b-c-{key_of({})}.nc"


def test_other_weights_under_the_same_path_are_another_job(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"some weights")
    before = digest_of(tmp_path)
    assert digest_of(tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    assert digest_of(tmp_path) != before


def test_the_digest_of_a_large_file_sees_every_region(tmp_path, monkeypatch):
    monkeypatch.setattr("tl_posgen.sweep.weights.WHOLE", 100)
    monkeypatch.setattr("tl_posgen.sweep.weights.BLOCK", 10)
    path, digests = tmp_path / "model.safetensors", set()
    for place in (None, 0, 5_000, 9_999):
        data = bytearray(10_000)
        if place is not None:
            data[max(place - 300, 0) : place + 300] = b"x" * len(data[max(place - 300, 0) : place + 300])
        path.write_bytes(data)
        digests.add(digest_of(tmp_path))
    assert len(digests) == 4


def test_texts_are_files_directories_and_datasets(tmp_path, no_network):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / ".hidden").write_text("never")
    assert Text(str(tmp_path)).words == "first\n\nsecond"
    assert Text(str(tmp_path / "a.txt"), characters=3).words == "fir"
    with pytest.raises(InputError, match="no such file"):
        _ = Text(str(tmp_path / "c.txt")).words


def test_a_text_that_datasets_reads(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"words": ["one", "two", "three"]})
    rows.to_json(tmp_path / "train.jsonl")
    text = Text(dataset=str(tmp_path), column="words", characters=10)
    assert text.words == "one\n\ntwo"
    with pytest.raises(InputError, match="has no column 'text'"):
        _ = Text(dataset=str(tmp_path)).words


def test_a_directory_keeps_one_study_of_one_version(tmp_path, monkeypatch):
    study = Study.of(LEAST)
    write_index(tmp_path, study, study.jobs())
    require_same_study(tmp_path, study)
    require_same_study(tmp_path, replace(study, weights=(*study.weights, Weights("mini", label="again"))))
    for other, said in ((replace(study, name="other"), "study small"), (replace(study, length=8), "length 512")):
        with pytest.raises(InputError, match=rf"holds a study with {said}, and this one has .*; give another --out"):
            require_same_study(tmp_path, other)
    monkeypatch.setattr("tl_posgen.sweep.study.versions", lambda: {"tl-posgen": "9"})
    with pytest.raises(InputError, match=r"holds a study with versions .*, and this one has"):
        require_same_study(tmp_path, study)


def test_shards_are_all_of_it_and_disjoint():
    items = list(range(11))
    parts = [items[shard_of(f"{i}/4")] for i in range(1, 5)]
    assert sorted(item for part in parts for item in part) == items
    for wrong in ("0/4", "5/4", "1", "1/0", "a/b"):
        with pytest.raises(InputError, match="such as 1/4"):
            shard_of(wrong)


def test_the_shape_of_a_directory_is_that_of_its_model(mini, tmp_path):
    shape = shape_of(MINI)
    assert shape.heads == mini.cfg.n_heads
    assert shape.bytes_needed(64, 1) < shape.bytes_needed(128, 1) < shape.bytes_needed(128, 2)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        shape_of(tmp_path)


def test_one_revision_is_dropped_from_the_cache_and_the_others_stay(tmp_path):
    repo = tmp_path / "models--someone--model"
    for number, ref in enumerate(("step1", "step2")):
        commit = str(number) * 40
        (repo / "snapshots" / commit).mkdir(parents=True)
        (repo / "blobs").mkdir(exist_ok=True)
        (repo / "blobs" / ref).write_bytes(bytes(100))
        (repo / "snapshots" / commit / "model.safetensors").symlink_to(repo / "blobs" / ref)
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / ref).write_text(commit)
    assert drop_from_cache("someone/model", "step1", tmp_path) == 100
    assert [path.name for path in (repo / "blobs").iterdir()] == ["step2"]
    assert drop_from_cache("someone/other", None, tmp_path) == 0
    assert drop_from_cache("someone/model", None, tmp_path / "nowhere") == 0
