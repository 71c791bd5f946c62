"""The command line with --out: runs that must succeed, and runs that must be refused."""

import json

import pytest

FILES = ["index.html", "results.nc", "summary.json"]


@pytest.fixture
def run(command, tmp_path):
    """The command with --out: its exit code, and what it printed on stdout and stderr."""

    def called(*words, out=tmp_path / "report"):
        return command(*words, *(["--out", out] if out else []))

    return called


@pytest.fixture
def done(run, tmp_path):
    """A command that must succeed: what it printed, and its summary.json."""

    def called(*words):
        code, printed, error = run(*words)
        assert code == 0, error
        assert sorted(path.name for path in (tmp_path / "report").glob("*.*")) == FILES
        return printed, json.loads((tmp_path / "report/summary.json").read_text())

    return called


@pytest.fixture
def refused(run, tmp_path):
    """A command that must fail: exit code 2, one line, no traceback, nothing written."""

    def called(*words):
        code, _, error = run(*words)
        assert code == 2
        assert error.strip().splitlines()[-1].startswith("error: ")
        assert not list(tmp_path.glob("report/*.html"))
        return error

    return called


@pytest.fixture
def refused_at_once(refused, tmp_path):
    """`analyze` with words that must fail with a single line, and no directory left behind that holds anything."""

    def called(*words):
        error = refused("analyze", *words)
        assert error.strip().count("\n") == 0
        assert not list(tmp_path.glob("report/*"))
        return error

    return called


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The Queen of Hearts, she made some tarts, all on a summer day. " * 20, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def cut(text):
    """(length, prompts) -> words: prompts of that text."""
    return lambda length, prompts: ("--text", text, "--length", length, "--prompts", prompts)
