"""What the command line leaves on disk: whatever breaks or stops it, no half of a file and no measurement lost."""

import io
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tl_posgen import load
from tl_posgen.cli.commands import COMMANDS, WRITTEN, app_for
from tl_posgen.core import registry
from tl_posgen.core.report import Report
from tl_posgen.core.store import Parts, read_datasets
from tl_posgen.errors import OutputError

pytestmark = pytest.mark.longer

FILES = ["index.html", "results.nc", "summary.json"]
SHORT = ("--length", "32", "--prompts", "1", "--measures", "mean_key", "--nulls", "0")


def test_a_page_that_cannot_be_made_loses_no_measurement(command, monkeypatch, tmp_path):
    def findings(measure, own):
        raise KeyError("share")

    monkeypatch.setattr(registry.find("mean_key"), "findings", findings)
    code, _, error = command("analyze", *SHORT, "--out", tmp_path / "report")
    assert code == 2
    last = error.strip().splitlines()[-1]
    assert last.startswith("error: no page could be made (KeyError: 'share')")
    assert str(tmp_path / "report" / "results.nc") in last
    assert "Traceback" not in error
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["results.nc"]
    monkeypatch.undo()
    assert load(tmp_path / "report")["mean_key"].findings()


def test_results_that_cannot_be_written_are_shown(command, monkeypatch, tmp_path):
    def full(*_):
        raise OutputError("report: cannot write there (No space left on device); choose another place")

    for module in ("files", "store"):
        monkeypatch.setattr(f"tl_posgen.core.{module}.write_files", full)
    code, printed, error = command("analyze", *SHORT, "--out", tmp_path / "report")
    assert code == 2
    assert "mini" in printed
    assert error.strip().splitlines()[-1].startswith("error: report: cannot write there")
    assert not (tmp_path / "report").exists()


def test_a_terminal_that_lacks_characters_shows_others(command, monkeypatch, tmp_path):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert command("analyze", *SHORT, "--out", tmp_path / "report")[0] == 0
    terminal.flush()
    assert b"? Each query with the head" in terminal.buffer.getvalue()


@pytest.mark.slow
def test_a_reader_that_has_read_enough_is_no_error():
    command = [sys.executable, "-m", "tl_posgen", "check"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


@pytest.mark.parametrize("words", [("--model", "nowhere/at/all"), ("--length", "99999"), ("--layers", "9")])
def test_a_refused_run_leaves_no_directory(command, tmp_path, words):
    assert command("analyze", *words, "--out", tmp_path / "x" / "report")[0] == 2
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def stopped(tmp_path, small):
    """A command that is sent a signal once its progress says this: exit code and last line."""

    def called(number, shown, command, *words):
        command = [sys.executable, "-m", "tl_posgen", command, "--model", str(small), *words]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        options = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "env": environment}
        process = subprocess.Popen([*command, "--out", str(tmp_path / "report")], **options)
        assert process.stderr is not None
        seen = b""
        while not re.search(shown, seen.decode(errors="ignore")):
            more = os.read(process.stderr.fileno(), 4096)
            assert more, seen.decode()
            seen += more
        process.send_signal(number)
        _, rest = process.communicate(timeout=60)
        assert b"Traceback" not in seen + rest
        return process.returncode, rest.decode().strip().splitlines()[-1]

    return called


CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.mark.slow
def test_a_stopped_analysis_leaves_nothing(stopped, tmp_path):
    """A fresh interpreter, hence seconds; the next test sends the other signal."""
    words = ("--length", "256", "--prompts", "60", "--nulls", "0")
    ended = stopped(signal.SIGTERM, r"[1-9]\d* passes", "analyze", *words)
    assert ended == (143, "stopped by SIGTERM")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_stopped_command_goes_on(stopped, command, small, tmp_path, monkeypatch):
    """The model and its shuffled weights are measured then, and its random inits are under way."""
    words = ("--length", "64", "--prompts", "20", "--nulls", "5", "--measures", "variance")
    ended = stopped(signal.SIGTERM, r"random init \(seed 1\)", "analyze", *words)
    assert ended == (143, "stopped by SIGTERM")
    (parts,) = (tmp_path / "report").iterdir()
    before = sorted(path.name for path in parts.iterdir())
    assert len(before) >= 2
    taken = []
    discard = Parts.discard
    monkeypatch.setattr(Parts, "discard", lambda self: taken.extend(self.files) or discard(self))
    code, _, error = command("analyze", "--model", small, *words, "--out", tmp_path / "report")
    assert code == 0
    assert {*before} < {path.name for path in taken}
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == FILES
    assert "100%" in error


@pytest.mark.slow
def test_stopped_claims_keep_finished_parts(stopped, tmp_path):
    """The measures that share a forward pass are done then, and one that runs the model itself is under way."""
    words = ("--papers", "slash", "--length", "24", "--prompts", "1", "--nulls", "0")
    ended = stopped(signal.SIGINT, "slash_transfer ", "claims", *words)
    assert ended == (130, "stopped by SIGINT")
    (parts,) = (tmp_path / "report").iterdir()
    kept = list(parts.iterdir())
    assert kept
    assert all(read_datasets(path) for path in kept)


@pytest.mark.soak
@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize("delay", range(20))
def test_a_signal_at_any_time_leaves_whole_files(tmp_path, number, delay):
    command = [sys.executable, "-m", "tl_posgen", "analyze", *SHORT, "--out", str(tmp_path / "report")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    time.sleep(1 + 0.2 * delay)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode in (CODES[number], 0, -number)  # the last: at the very end, when Python ends
    assert b"Traceback" not in error or b"in main" not in error  # before our first line Python itself answers
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file() and path.parent.name != "parts")
    assert left in ([], ["results.nc"], FILES)


def test_the_command_leaves_the_handlers_of_its_process_alone(command):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    command("--help")
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_every_command_has_a_place_of_its_own():
    places = {}
    for name in [*WRITTEN, *COMMANDS, "three-axis"]:
        for argument in app_for([name])[name].assemble_argument_collection():
            if argument.name == "--out":
                places[name] = argument.field_info.default
    assert str(places.pop("sweep")) == "runs"
    assert places == {name: f"report-{name}" for name in places}
    assert {"analyze", "slash", "three-axis", "compare", "claims", "toy"} <= places.keys()


def test_a_run_that_was_killed_before_its_page_goes_on(command, monkeypatch, tmp_path):
    """Its results are saved then, and its finished parts are still there; another command does not replace them."""
    out, written = tmp_path / "report", []

    def killed(_: Report) -> dict[str, bytes]:
        raise SystemExit(137)

    with monkeypatch.context() as patched:
        patched.setattr(Report, "page_files", killed)
        assert command("analyze", *SHORT, "--out", out)[0] == 137
    assert sorted(path.name for path in out.iterdir()) == ["parts", "results.nc"]
    code, _, error = command("analyze", *SHORT, "--seed", "1", "--out", out)
    assert code == 2
    assert f"{out}: holds another run's results.nc; choose another place" in error
    assert f"What this run measured is kept in {out / 'parts'}" in error
    monkeypatch.setattr("tl_posgen.core.steps.one_pass", lambda *_, **__: written.append("measured again"))
    assert command("analyze", *SHORT, "--out", out)[0] == 0
    assert not written
    assert {*FILES} <= {path.name for path in out.iterdir()}
    assert "another run's index.html" in command("analyze", *SHORT, "--out", out)[2]


def test_of_two_runs_at_once_the_later_replaces_nothing(command, monkeypatch, tmp_path):
    out, page_of = tmp_path / "report", Parts.__enter__

    def meanwhile(parts: Parts) -> Parts:
        monkeypatch.setattr(Parts, "__enter__", page_of)
        assert command("analyze", *SHORT, "--seed", "1", "--out", out)[0] == 0
        return page_of(parts)

    monkeypatch.setattr(Parts, "__enter__", meanwhile)
    code, printed, error = command("analyze", *SHORT, "--out", out)
    assert code == 2
    assert "mini" in printed
    assert "holds another run's index.html" in error
    assert load(out).provenance["seed"] == 1
    assert list((out / "parts").iterdir())  # of the later run
