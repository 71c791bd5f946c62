"""Finished parts of an analysis: taken up by the next, and only by one that would measure the same."""

import json
import shutil
from itertools import product

import numpy as np
import pytest
import torch
import xarray as xr

import tl_posgen
from tl_posgen.core.files import write_files
from tl_posgen.core.report import Report
from tl_posgen.core.store import Parts, configuration_of, content, key_of, part_path
from tl_posgen.errors import InputError, OutputError
from tl_posgen.models.session import session_of
from tl_posgen.models.tokens import bundled_text
from tl_posgen.slash import Slash

pytestmark = pytest.mark.longer

CUT = {"length": 12, "n_prompts": 4, "nulls": 2, "progress": False}
MEASURES = ("mean_key", "slash", "slash_transfer", "loss", "split_examples")
SHARED = 4  # of the files: of the model, two random inits and shuffled weights
FILES = SHARED + 2 * 3  # slash_transfer and split_examples run the model themselves, and no shuffled weights


def measured(model, **more):
    return tl_posgen.analyze(model, bundled_text(), measures=MEASURES, **{**CUT, **more})


@pytest.fixture(scope="module")
def whole(small_model):
    return measured(small_model)


def assert_same(one, other):
    assert list(one) == list(other)
    for name in one:
        assert one[name].provenance == other[name].provenance
        assert one[name].findings() == other[name].findings()
        xr.testing.assert_equal(one[name].dataset, other[name].dataset)


def stop_at(monkeypatch, n):
    """Ctrl-C when the n-th part has been measured and is about to be written."""
    done = []

    def stopping(directory, files):
        done.extend(files)
        if len(done) == n:
            raise KeyboardInterrupt
        write_files(directory, files)

    monkeypatch.setattr("tl_posgen.core.store.write_files", stopping)
    return done


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, SHARED + 1, FILES])  # none kept, some shared, all shared, all but one
def test_a_stopped_analysis_goes_on_with_the_same_numbers(small_model, whole, tmp_path, monkeypatch, capsys, n):
    with monkeypatch.context() as patched:
        stop_at(patched, n)
        with pytest.raises(KeyboardInterrupt):
            measured(small_model, keep=tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(before) == n - 1
    said = capsys.readouterr().err
    assert (f"kept in {tmp_path}; the same again goes on from there" in said) == (n > 1)
    measured_now = stop_at(monkeypatch, 0)
    assert_same(measured(small_model, keep=tmp_path), whole)
    assert len(measured_now) == FILES - len(before)
    assert all(path.stat().st_mtime_ns == then for path, then in before.items())


def test_parts_are_deleted_by_who_made_them_alone(small_model, tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "other.nc").touch()
    parts = Parts(tmp_path / "parts")
    tl_posgen.analyze(small_model, bundled_text(), measures="mean_key", keep=parts, **CUT)
    assert len(parts.files) == len(set(parts.files)) == SHARED
    parts.discard()
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["other.nc"]
    (tmp_path / "parts" / "other.nc").unlink()
    parts.discard()
    assert not (tmp_path / "parts").exists()


CHANGES = {
    "text": lambda run: {**run, "prompts": bundled_text()[500:]},
    "length": lambda run: {**run, "length": 13},
    "n_prompts": lambda run: {**run, "n_prompts": 3},
    "seed": lambda run: {**run, "seed": 1},
    "layers": lambda run: {**run, "layers": [0]},
    "every layer by name": lambda run: {**run, "layers": range(2)},
    "every head by name": lambda run: {**run, "heads": list(product(range(2), range(4)))},
    "options": lambda run: {**run, "measures": [Slash(kappa=0.2)]},
    "streaming": lambda run: {**run, "streaming": True},
    "weights": lambda run: {**run, "model": tl_posgen.random_like(run["model"], seed=1)},
    "null": lambda run: {**run, "nulls": {"random init": (7,), "shuffled": (0,)}},
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_parts_of_anything_else_are_never_taken_up(small_model, tmp_path, change):
    run = {"model": small_model, "prompts": bundled_text(), "measures": ["slash"], **CUT, "nulls": 1}
    tl_posgen.analyze(**run, keep=tmp_path)
    there = set(tmp_path.iterdir())
    parts = Parts(tmp_path)
    tl_posgen.analyze(**CHANGES[change](run), keep=parts)
    taken = there & set(parts.files)
    assert len(taken) == (2 if change == "null" else 0)  # the model and its shuffled weights are the same
    tl_posgen.analyze(**run, keep=(again := Parts(tmp_path)))
    assert set(again.files) == there


@pytest.mark.parametrize(("name", "value"), [("default_prepend_bos", False), ("n_ctx", 64), ("eps", 0.1)])
def test_nor_are_those_of_another_configuration(small, name, value):
    model = tl_posgen.load_model(small)
    before = configuration_of(session_of(model), "a text", "logits")
    assert before == configuration_of(session_of(model), "a text", "logits")
    assert getattr(model.cfg, name) != value
    setattr(model.cfg, name, value)
    assert configuration_of(session_of(model), "a text", "logits") != before


def test_nor_are_those_of_the_same_weights_with_another_rope(small, tmp_path):
    shutil.copytree(small, turned := tmp_path / "turned")
    config = json.loads((turned / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 2
    (turned / "config.json").write_text(json.dumps(config))
    one, other = (
        configuration_of(session_of(tl_posgen.load_model(where)), "a text", "logits") for where in (small, turned)
    )
    assert one["weights"] != other["weights"]  # tables of RoPE are buffers, which count too
    assert one["layers"] != other["layers"]


def test_what_another_run_cannot_know_is_refused(small_model, tmp_path):
    hook = ("blocks.0.hook_resid_pre", lambda value, hook: value)
    run = {"measures": "mean_key", "keep": tmp_path, **CUT}
    with pytest.raises(InputError, match="keep: another run cannot know what fwd_hooks do"):
        tl_posgen.analyze(small_model, bundled_text(), fwd_hooks=[hook], **run)
    refused = "keep: another run cannot know what the hooks on this model do; remove them"

    def of_transformer_lens(value, hook):
        return 0 * value

    of_transformer_lens.__module__ = "transformer_lens.patching"  # whose functions edit, too
    for added in (hook, (hook[0], of_transformer_lens)):
        with small_model.hooks(fwd_hooks=[added]), pytest.raises(InputError, match=refused):
            tl_posgen.analyze(small_model, bundled_text(), **run)
    with pytest.raises(InputError, match="the content of a range_iterator cannot be read"):
        content(iter(range(3)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damaged", [lambda whole: whole[:-9], lambda whole: b"", lambda whole: b"no results"])
def test_a_damaged_part_is_named_in_one_line_with_the_remedy(small_model, tmp_path, damaged):
    run = {"measures": "mean_key", "keep": tmp_path, **CUT, "nulls": 0}
    tl_posgen.analyze(small_model, bundled_text(), **run)
    [part] = tmp_path.iterdir()
    part.write_bytes(damaged(part.read_bytes()))
    with pytest.raises(InputError, match=rf"^.*{part.name}: this finished part is damaged .*; delete the file.*$"):
        tl_posgen.analyze(small_model, bundled_text(), **run)


def test_a_full_disk_does_not_stop_the_analysis(small_model, tmp_path, monkeypatch, capsys):
    def full(directory, files):
        raise OutputError("parts: cannot write there (No space left on device); choose another place")

    monkeypatch.setattr("tl_posgen.core.store.write_files", full)
    parts = Parts(tmp_path)
    assert tl_posgen.analyze(small_model, bundled_text(), measures="mean_key", keep=parts, **CUT)["mean_key"].nulls
    assert "mean_key small is not kept: parts: cannot write there" in capsys.readouterr().err
    assert parts.files == []


@pytest.mark.slow
def test_the_bar_ends_full_where_steps_were_finished_before(small_model, tmp_path, monkeypatch, capsys):
    run = {"measures": ["mean_key", "slash_transfer"], "keep": tmp_path, **CUT, "progress": True}
    with monkeypatch.context() as patched:
        stop_at(patched, 4)
        with pytest.raises(KeyboardInterrupt):
            tl_posgen.analyze(small_model, bundled_text(), **run)
    capsys.readouterr()
    tl_posgen.analyze(small_model, bundled_text(), **run)
    assert "100%" in capsys.readouterr().err.strip().split("\r")[-1]


def test_a_part_is_named_by_what_it_depends_on(tmp_path):
    assert part_path(tmp_path, "a/b c", {}).name == f"a-b-c-{key_of({})}.nc"
    assert list(Parts(tmp_path).report("empty", {}, lambda: Report({}, {}))) == []
    assert list(Parts(tmp_path).report("empty", {}, lambda: pytest.fail("measured again"))) == []
    assert list(Parts().report("empty", {}, lambda: Report({}, {}))) == []
    assert [path.name for path in tmp_path.iterdir()] == [part_path(tmp_path, "empty", {}).name]
    values = [1, 1.5, "1", None, [1], {"a": 1}, torch.ones(2), torch.ones(2, 1), torch.ones(2, dtype=torch.int64)]
    values += [np.array(["a", "b"]), xr.Dataset({"r": ("x", [1.0, 2.0])}), xr.Dataset({"r": ("x", [1.0, 3.0])})]
    assert len({key_of({"value": content(value)}) for value in values}) == len(values)
    assert content(np.array(["a", "b"])) == content(np.array(["a", "b"], dtype=object))
    assert content(torch.ones(2)) == content(torch.ones(2).numpy()) != content(torch.zeros(2))
