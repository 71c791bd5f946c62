"""Files are whole or not there: full disks, places that cannot be written, signals."""

import resource
import subprocess
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from forked import child, exit_code

from tl_posgen.core.files import require_writable, write_files, write_whole
from tl_posgen.core.report import Report
from tl_posgen.core.result import Result
from tl_posgen.core.saved import unknown_measure
from tl_posgen.errors import OutputError

OLD = {"a": b"old a", "b": b"old b", "c": b"old c"}
NEW = {"a": b"new a", "b": b"new b", "c": b"new c"}


def content(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_files_have_the_usual_permissions(tmp_path):
    (tmp_path / "usual").touch()
    path = write_whole(tmp_path / "a", b"")
    assert path.stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("there", [None, OLD, {"b": b"old b"}])
def test_files_are_written_together(tmp_path, there):
    if there:
        write_files(tmp_path / "x" / "y", there)
    write_files(tmp_path / "x" / "y", NEW)
    assert content(tmp_path / "x" / "y") == NEW


@pytest.mark.parametrize("there", [b"old", None])
@pytest.mark.parametrize("when", ["before", "after"])
def test_one_file_is_the_old_or_the_new_one_when_stopped(tmp_path, monkeypatch, there, when):
    if there:
        (tmp_path / "a").write_bytes(there)
    rename = Path.replace

    def stopped(path, target):
        if when == "after":
            rename(path, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "a", b"new")
    expected = b"new" if when == "after" else there
    assert content(tmp_path) == ({} if expected is None else {"a": expected})


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_the_file_behind_it_is_written(tmp_path, there):
    (tmp_path / "elsewhere").mkdir()
    for name in ("alone", "together"):
        if there:
            (tmp_path / "elsewhere" / name).write_bytes(b"old")
        (tmp_path / name).symlink_to(tmp_path / "elsewhere" / name)
    write_whole(tmp_path / "alone", b"new")
    write_files(tmp_path, {"together": b"new", "plain": b"new"})
    for name in ("alone", "together"):
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / "elsewhere" / name).read_bytes() == b"new"
    assert sorted(one.name for one in (tmp_path / "elsewhere").iterdir()) == ["alone", "together"]


@pytest.mark.parametrize("name", NEW)
def test_a_directory_in_the_place_of_a_file_is_named_and_everything_stays(tmp_path, name):
    write_files(tmp_path / "x", OLD)
    (tmp_path / "x" / name).unlink()
    (tmp_path / "x" / name / "inside").mkdir(parents=True)
    with pytest.raises(OutputError, match=rf"{name} is there and is not a file"):
        write_files(tmp_path / "x", NEW)
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == sorted(NEW)
    assert (tmp_path / "x" / name / "inside").is_dir()


@pytest.mark.parametrize("path", ["nowhere/a", "file/a", "", ".", "n" * 300, "zero\0byte", "/dev/null"])
def test_a_place_that_cannot_be_written_is_named_in_one_line(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(b"kept")
    with pytest.raises(OutputError, match="cannot write there") as error:
        write_whole(path, b"new")
    assert str(error.value).count("\n") == 0
    assert content(tmp_path) == {"file": b"kept"}


@pytest.mark.parametrize("directory", ["file/x", "n" * 300, "x/" + "n" * 300, "zero\0byte"])
def test_a_directory_that_cannot_be_made_is_refused_and_leaves_none(tmp_path, monkeypatch, directory):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(b"kept")
    with pytest.raises(OutputError, match="cannot write there"):
        require_writable(directory)
    assert content(tmp_path) == {"file": b"kept"}
    with pytest.raises(OutputError, match="cannot write there"):
        write_files(directory, NEW)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "file"]


def test_asking_whether_a_directory_can_be_written_leaves_nothing(tmp_path):
    (tmp_path / "there").mkdir()
    require_writable(tmp_path / "there" / "x" / "y")
    require_writable(tmp_path / "there")
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]


def test_a_file_that_grows_too_large_leaves_nothing(tmp_path):
    """A limit on the size of files, which any user has, in a process of its own."""
    write_files(tmp_path / "x", OLD)

    def write():
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        for directory in (tmp_path / "x", tmp_path / "y" / "z"):
            with pytest.raises(OutputError, match="File too large"):
                write_files(directory, {"a": b"new", "b": bytes(20_000)})

    assert exit_code(child(write)) == 0
    assert content(tmp_path / "x") == OLD
    assert not list((tmp_path / "y").rglob("*.*"))


@pytest.fixture
def disk(tmp_path):
    """size in kB -> an empty disk of that size."""
    mounted = []

    def mount(size):
        place = tmp_path / f"disk{len(mounted)}"
        place.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", place], capture_output=True)
        if done.returncode:
            pytest.skip("a disk of its own cannot be mounted here")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", place], check=True)


def test_a_full_disk_is_one_error_and_what_was_there_stays(disk):
    place = disk(64)
    write_files(place / "x", OLD)
    with pytest.raises(OutputError, match="No space left on device"):
        write_files(place / "x", {"a": b"new", "b": bytes(100_000)})
    assert content(place / "x") == OLD
    with pytest.raises(OutputError, match="No space left on device"):
        write_files(place / "y" / "z", {"a": bytes(100_000)})
    assert {path for path in place.rglob("*") if path.is_file()} == {place / "x" / name for name in OLD}


@pytest.mark.parametrize("how", ["save", "write"])
@pytest.mark.parametrize("size", [4, 64])
def test_results_on_a_full_disk_are_one_error_and_no_crash(disk, how, size):
    """HDF5 that writes to the disk itself ends such a process with a segmentation fault."""
    place = disk(size)
    coords = {"init": ["trained", "0"], "layer": range(40), "head": range(200)}
    data = xr.Dataset({"r": (("init", "layer", "head"), np.random.default_rng(0).random((2, 40, 200)))}, coords)
    result = Result(unknown_measure("someones_measure"), data, {"model": "m", "nulls": 1})

    def fill():
        with pytest.raises(OutputError, match="No space left on device"):
            result.save(place / "r.nc") if how == "save" else Report({result.name: result}, {}).write(place)

    assert exit_code(child(fill)) == 0
    assert list(place.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("analyze", "--measures", "three_axis"), ("claims", "--papers", "coupling")], ids=lambda words: words[0]
)
def test_a_command_on_a_full_disk_ends_in_one_error(disk, command, small, words):
    place = disk(8)
    cut = ["--length", "32", "--prompts", "1", "--nulls", "0", "--out", place / "report"]
    code, _, error = command(*words, "--model", small, *cut)
    assert code == 2
    assert "No space left on device" in error.splitlines()[-1]
    assert "Traceback" not in error
    assert list(place.iterdir()) == []
