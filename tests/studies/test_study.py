"""Studies: what is refused before work starts, how jobs are called, and the examples."""

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import as_dtype
from written import write_measure

from tl_posgen.core.files import write_files
from tl_posgen.core.report import Report
from tl_posgen.errors import InputError
from tl_posgen.models.conversion.files import drop_from_cache
from tl_posgen.studies.overview import open_study
from tl_posgen.studies.study import Study, Text, digest_of
from tl_posgen.studies.sweep import JOBS, finished_jobs, sweep

STUDIES = sorted((Path(__file__).parents[2] / "examples" / "studies").glob("*.toml"))
LEAST = {"name": "small", "models": ["mini"]}


@pytest.fixture
def no_network(monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was asked"))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_example_lists_its_jobs_without_the_network(path, no_network):
    study = Study.read(path)
    jobs = study.jobs()
    assert study.name == path.stem
    assert len({job.file for job in jobs}) == len(jobs) == len(study.models) * len(study.texts)
    assert len(jobs) >= 4


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"models": ["mini", "mini"]}, "two jobs are called mini/bundled; give a model a label"),
        ({"texts": [{"path": "bundled", "name": one} for one in ("a b", "a-b")]}, "two jobs are called mini/a-b"),
        ({"measures": [{"name": "slash", "self": 1}]}, "slash has no option 'self'"),
        ({"models": []}, "models = []; give a list"),
        ({"models": "mini"}, "models = 'mini'; give a list"),
        ({"models": [{"revisions": ["a"]}]}, "models needs the option 'name'"),
        ({"models": [""]}, "models: name = '': give a name"),
        ({"models": [{"name": "mini", "size": 1}]}, "models has no option 'size'; it has name, revisions"),
        ({"models": [{"name": "mini", "revisions": "a"}]}, "models: revisions = 'a': give a list, each a word"),
        ({"models": [{"name": "mini", "dtype": "int8"}]}, "dtype='int8': give a floating-point one: auto"),
        ({"models": [{"name": "mini", "dtype": "half"}]}, "dtype='half': give a floating-point one: auto"),
        ({"models": [{"name": "mini", "dtype": "float8_e4m3fn"}]}, "dtype='float8_e4m3fn': give"),
        ({"models": [{"name": "mini", "revisions": ["step0", "step1"]}]}, "revision 'step0': mini is here"),
        ({"models": ["mini", {"name": "mini", "revisions": ["main"]}]}, "revision 'main': mini is here and has none"),
        ({"models": ["a/b", {"name": "a/b", "revisions": ["main"]}]}, "two jobs are called a/b@main/bundled"),
        ({"models": ["./a\0b"]}, "a zero byte"),
        ({"models": [{"name": "mini", "backend": "jax"}]}, "backend 'jax': choose auto, hooked or bridge"),
        ({"measures": ["three_axes"]}, "no measure 'three_axes'; did you mean 'three_axis'? known: "),
        ({"measures": ["slash", "slash"]}, "slash is given twice"),
        ({"measures": [{"name": "slash", "kapa": 1}]}, "slash has no option 'kapa'; it has "),
        ({"measures": [{"name": "slash", "kappa": 2.0}]}, "kappa"),
        ({"measures": [{"name": "three_axis", "weights": []}]}, "three_axis: weights = []: give a list"),
        ({"models": [{"name": "mini", "device": "xpu9"}]}, "device = 'xpu9': torch knows no device of that name"),
        ({"measures": ["claims"]}, "claims takes no single model and prompts"),
        ({"texts": [{"path": "a", "dataset": "b"}]}, "give either a path or a dataset"),
        ({"texts": [{"path": "bundled", "characters": 0}]}, "characters = 0: give a whole number, 1 or more"),
        ({"length": "long"}, "length = 'long': give a whole number"),
        ({"length": 1}, "length = 1: give a whole number, 2 or more"),
        ({"nulls": {"shuffled": [0, 0]}}, "each seed may stand only once"),
        ({"nulls": [0]}, "nulls=[0]: give how many random inits"),
        ({"seed": -1}, "seed = -1"),
        ({"name": "a/b"}, "name = 'a/b'; give letters"),
        ({"name": None}, "name = None: give a word"),
        ({"lenght": 8}, "study has no option 'lenght'; it has "),
    ],
)
def test_what_cannot_be_used_is_one_line(change, said):
    with pytest.raises(InputError) as refusal:
        Study.read(LEAST | change)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_file_that_is_no_study_is_named(tmp_path):
    with pytest.raises(InputError, match=r"none\.toml: cannot be read \(No such file"):
        Study.read(tmp_path / "none.toml")
    with pytest.raises(InputError, match=r"zero\0byte: cannot be read"):
        Study.read("zero\0byte")
    path = tmp_path / "a.toml"
    for content, said in (
        ("name = ", "not TOML"),
        (f"name = {20_000 * '['}", "not TOML"),
        ('name = "a"', "study: models = None; give a list"),
    ):
        path.write_text(content)
        with pytest.raises(InputError, match=rf"a\.toml: {said}"):
            Study.read(path)


@pytest.mark.parametrize(
    "table", ['nulls = {"random init" = [1], shuffled = [0]}', '[nulls]\n"random init" = [1]\nshuffled = [0]']
)
def test_null_models_are_a_number_or_a_table(tmp_path, table):
    (path := tmp_path / "study.toml").write_text(f'name = "kinds"\nmodels = ["mini"]\n{table}')
    assert Study.read(path).cut["nulls"] == {"random init": [1], "shuffled": [0]}
    assert [Study.read(LEAST | nulls).cut["nulls"] for nulls in ({}, {"nulls": 0}, {"nulls": 3})] == [1, 0, 3]


def test_a_job_depends_on_all_that_its_result_depends_on():
    jobs = [Study.read(LEAST | change).jobs()[0] for change in (
        {}, {"length": 8}, {"n_prompts": 1}, {"seed": 1}, {"nulls": 0}, {"nulls": {"random init": [0]}},
        {"first": ","},
        {"measures": ["slash"]},
        {"measures": [{"name": "slash", "kappa": 0.2}]}, {"models": [{"name": "mini", "backend": "bridge"}]},
        {"texts": [{"path": "bundled", "characters": 1000}]},
    )]  # fmt: skip
    assert len({json.dumps([job.study.settings, job.identity]) for job in jobs}) == len(jobs)
    other = Study.read(LEAST | {"measures": ["three_axis", "variance", {"name": "mean_key"}]}).jobs()[0]
    assert other.study.settings == jobs[0].study.settings  # options left out are those that are used


def test_other_weights_under_the_same_path_are_another_job(tmp_path):
    """The digest sees every byte and every kind of file."""
    weights = bytearray(2**23)
    digests = [digest_of(str(tmp_path))]
    for byte in b"xy":
        weights[2**20 + 1000] = byte
        (tmp_path / "model.safetensors").write_bytes(weights)
        digests.append(digest_of(str(tmp_path)))
        assert digest_of(str(tmp_path)) == digests[-1]
    (tmp_path / "merges.txt").write_text("a b")
    digests.append(digest_of(str(tmp_path)))
    assert len(set(digests)) == len(digests)


def test_texts_are_files_directories_and_datasets(tmp_path, no_network):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / ".hidden").write_text("never")
    assert Text(str(tmp_path)).words == "first\n\nsecond"
    assert Text(str(tmp_path / "a.txt"), characters=3).words == "fir"
    with pytest.raises(InputError, match="no such file"):
        _ = Text(str(tmp_path / "c.txt")).words


def test_a_path_is_meant_from_the_file_of_its_study(tmp_path, monkeypatch):
    """What only the current directory has is not taken in its place."""
    (place := tmp_path / "sub").mkdir()
    (place / "study.toml").write_text('\ufeffname = "s"\nmodels = ["mini"]\ntexts = ["my.txt"]\n', encoding="utf-8")
    (tmp_path / "my.txt").write_text("here")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"'my.txt' is here, and not beside the study, in .*sub; give its absolute"):
        Study.read(place / "study.toml")
    (place / "my.txt").write_text("beside the study")
    assert Study.read(place / "study.toml").texts[0].words == "beside the study"


def test_a_text_that_datasets_reads(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"words": ["one", "two", "three"]})
    rows.to_json(tmp_path / "train.jsonl")
    text = Text(dataset=str(tmp_path), column="words", characters=10)
    assert text.words == "one\n\ntwo"
    datasets.Dataset.from_dict({"words": ["one", "2", "three"]}).to_json(tmp_path / "train.jsonl")
    changed = Text(dataset=str(tmp_path), column="words", characters=10)
    assert (changed.words, changed.identity != text.identity) == ("one\n\n2\n\nth", True)
    with pytest.raises(InputError, match="no column 'text'"):
        _ = Text(dataset=str(tmp_path)).words


def leave(job, out):
    """Write what a finished job leaves, without its results."""
    of_job = {"job": list(job.place), "study": job.study.settings, "identity": job.identity}
    provenance = {**of_job, "parameters": 1}
    write_files(out / JOBS, {job.file: Report({}, provenance).as_bytes()})


def test_a_directory_keeps_one_study_of_one_code(tmp_path):
    def jobs(factor, **age):
        return replace(Study.read(LEAST), measures=[write_measure(tmp_path, factor, **age).KeySize()]).jobs()

    leave(jobs(1)[0], out := tmp_path / "out")
    assert len(finished_jobs(out, jobs(1))) == 1
    with pytest.raises(InputError, match=r"holds a study with code \{'key_size': .*, and this one has"):
        finished_jobs(out, jobs(2))
    with pytest.raises(InputError, match=r"measures: the code of key_size is in no file, or its file was changed"):
        finished_jobs(out, jobs(1, age=-60))


def test_a_directory_keeps_one_study_of_one_version(tmp_path, monkeypatch):
    study = Study.read(LEAST)
    leave(study.jobs()[0], tmp_path)
    more = Study.read(LEAST | {"models": ["mini", {"name": "mini", "label": "again"}]})
    for known in (study, more):
        assert list(finished_jobs(tmp_path, known.jobs())) == [("mini", "main", "bundled")]
    for other, said in ((replace(study, name="other"), "study small"), (replace(study, length=8), "length 512")):
        with pytest.raises(InputError, match=rf"holds a study with {said}, and this one has .*; give another --out"):
            finished_jobs(tmp_path, other.jobs())
    monkeypatch.setattr("tl_posgen.studies.study.versions", lambda: {"tl-posgen": "9"})
    with pytest.raises(InputError, match=r"holds a study with versions .*, and this one has"):
        finished_jobs(tmp_path, study.jobs())


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


def test_models_that_were_swept_in_several_runs_are_all_there(tmp_path):
    for models in (["mini"], [{"name": "mini", "label": "again"}]):
        leave(Study.read(LEAST | {"models": models}).jobs()[0], tmp_path)
    (tmp_path / "notes.nc").write_text("somebody's own")
    assert sorted(finished_jobs(tmp_path)) == [("again", "main", "bundled"), ("mini", "main", "bundled")]


def test_files_that_contradict_each_other_are_refused(tmp_path):
    job = Study.read(LEAST).jobs()[0]
    before = replace(job, text=Text("bundled", characters=1000))  # as if the text had been edited since
    leave(before, tmp_path)
    with pytest.raises(InputError, match=r"mini/bundled with other weights, text, .*; delete the file"):
        finished_jobs(tmp_path, [job])
    write_files(tmp_path / JOBS, {"a-part-of-something-else.nc": Report({}, {}).as_bytes()})
    with pytest.raises(InputError, match="no job of a study; give another --out"):
        finished_jobs(tmp_path)


def test_revisions_stand_in_order_of_training(tmp_path):
    models = [{"name": "a/b", "revisions": ["step1000", "step80", "main", "step0"]}]
    for job in Study.read(LEAST | {"models": models}).jobs():
        leave(job, tmp_path)
    data = open_study(tmp_path)
    assert data["revision"].values.tolist() == ["step0", "step80", "step1000", "main"]
    assert bool(data["finished"].all())


def test_what_is_finished_asks_nothing_of_the_network(tmp_path, no_network):
    study = Study.read(LEAST | {"models": ["someone/model"]})
    leave(study.jobs()[0], tmp_path)
    assert sweep(study, out=tmp_path, progress=False) == {"someone/model/bundled": "finished"}


def test_a_measure_that_needs_more_digits_than_the_checkpoint_gets_them(family_directory, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    model, dtypes = str(as_dtype(family_directory("llama"), tmp_path / "model", torch.bfloat16)), []

    def analyzed(model, words, **how):
        return dtypes.append(model.dtype) or Report({}, {})

    monkeypatch.setattr("tl_posgen.studies.sweep.analyze", analyzed)
    texts = ["bundled", {"path": "bundled", "name": "again"}]
    for measure in ("coupling", "three_axis"):
        study = LEAST | {"models": [model], "measures": [measure], "texts": texts}
        sweep(study, out=tmp_path / measure, progress=False)
    assert dtypes == [torch.float32] * 2 + [torch.bfloat16] * 2


def test_the_page_shows_the_study_that_it_runs():
    root = Path(__file__).parents[2]
    page = (root / "docs" / "sweeps.md").read_text(encoding="utf-8")
    shown = page.partition("```toml\n")[2].partition("```")[0]
    assert "tl-posgen sweep examples/studies/small.toml" in page
    assert shown == (root / "examples" / "studies" / "small.toml").read_text(encoding="utf-8")
