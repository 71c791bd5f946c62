"""Ends of a process in the middle of its work, in every command: what stands under the names of results is whole,
whenever they come, what was finished is kept, and the same command succeeds afterwards.

`make soak` ends each command at random moments.
"""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pandas as pd
import pytest
from forked import child, exit_code, start

import tl_posgen
from tl_posgen.cli.commands import COMMANDS as OF_MEASURES
from tl_posgen.cli.commands import WRITTEN
from tl_posgen.core import files
from tl_posgen.core.files import read_netcdf
from tl_posgen.core.report import Report
from tl_posgen.models.tokens import bundled_text

CHECKPOINTS = sorted((Path(__file__).parents[1] / "examples" / "mini_model" / "checkpoints").iterdir())
SHORT = ("--length", "32", "--prompts", "1", "--nulls", "0")
LONG_ENOUGH = ("--length", "40", "--prompts", "1", "--nulls", "0")  # for a gap
COMMANDS = {
    "analyze": ("--measures", "mean_key", *SHORT),
    "substitute": SHORT,
    "distance": SHORT,
    "perturb": ("--ratios", "0,0.5", "--n-cloze", "2", *SHORT),
    "length": ("--inside", "32", "--prompts", "2", "--nulls", "0"),
    "frequencies": ("--edits", "drop", "--groups", "planes", "--half", "6", "--n-copies", "1", *LONG_ENOUGH),
    "planes": SHORT,
    "perturb-planes": ("--strengths", "1", *SHORT),
    "profiles": SHORT,
    "slash": SHORT,
    "toy": ("--seeds", "1", "--steps", "200"),
    "coupling": ("--k", "5", *SHORT),
    "coupling-scores": ("scores.csv", "--tokenizer", "mini", "--k", "5", "--length", "24", "--prompts", "1"),
    "emerge": (*map(str, CHECKPOINTS[:2]), "--tokenizer", "mini", *SHORT),
    "compare": ("saved.nc", "saved.nc"),
    "explain": ("--prompt", "Down, down, down.", "--head", "3.1"),
    "sweep": ("study.toml",),
    "claims": ("--papers", "slash", "--length", "48", "--prompts", "2", "--nulls", "0"),
    "check": (),
    "measures": (),
}
WITHOUT_FILES = ("check", "measures")
SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
STUDY = """
name = "killed"
length = 32
n_prompts = 1
nulls = 0
measures = ["three_axis"]
texts = ["bundled"]

[[models]]
name = "CHECKPOINTS"
revisions = ["step00000", "step00080", "step00500"]
tokenizer = "mini"
"""


@cache
def saved_report() -> bytes:
    """The file of a small report."""
    options = {"measures": "variance", "length": 32, "n_prompts": 4, "nulls": 0, "progress": False}
    report = tl_posgen.analyze("mini", bundled_text(), **options)
    return report.as_bytes()


def words_of(command: str, directory: Path) -> list[str]:
    """The command with its input and output in a directory."""
    (directory / "study.toml").write_text(STUDY.replace("CHECKPOINTS", str(CHECKPOINTS[0].parent)))
    rows = [f"{path},{score}" for score, path in enumerate(CHECKPOINTS[:4])]
    (directory / "scores.csv").write_text("\n".join(["model,score", *rows]))
    if command == "compare":
        (directory / "saved.nc").write_bytes(saved_report())
    out = [] if command in WITHOUT_FILES else ["--out", str(directory / "report")]
    inputs = ("study.toml", "scores.csv", "saved.nc")
    here = [str(directory / word) if word in inputs else word for word in COMMANDS[command]]
    return [command, *here, *out]


def at_step(place: object, step: str, when: int) -> Callable[[], None]:
    """Make the n-th call of a function the end of the process."""

    def prepare() -> None:
        plain, calls = getattr(place, step), []

        def counted(*arguments):
            calls.append(1)
            if len(calls) == when:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*arguments)

        setattr(place, step, counted)

    return prepare


def finished(directory: Path) -> dict[Path, int]:
    """When each file under the name of a result was written; every one is whole."""
    found = {path: path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file()}
    found = {path: written for path, written in found.items() if ".partial-" not in str(path)}
    for path in found:
        if "parts" in path.parts:
            assert read_netcdf(path)
        elif path.suffix == ".nc":
            assert isinstance(tl_posgen.load(path), Report)
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".csv":
            assert len(pd.read_csv(path))
        else:
            assert path.name == "index.html"
            assert path.read_text().rstrip().endswith("</html>")
    return found


def test_every_command_is_here():
    assert sorted([*WRITTEN, *OF_MEASURES]) == sorted(COMMANDS)


OLD, NEW = ({name: f"{age} {name}".encode() * 1000 for name in "abc"} for age in ("old", "new"))


@pytest.mark.parametrize(("step", "when"), [*(("fsync", n) for n in (1, 3)), *(("replace", n) for n in range(1, 5))])
def test_files_are_each_old_or_new_after_a_kill(tmp_path, step, when):
    files.write_files(tmp_path, OLD)
    stop = at_step(os if step == "fsync" else Path, step, when)

    def write() -> None:
        stop()
        files.write_files(tmp_path, NEW)

    assert (exit_code(child(write)) == -signal.SIGKILL) == (when <= len(NEW))
    now = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert now.keys() == OLD.keys()
    assert all(data in (OLD[name], NEW[name]) for name, data in now.items())
    files.write_files(tmp_path, NEW)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == NEW


@pytest.fixture(scope="module")
def seconds(mini, tmp_path_factory):
    """How long a command takes that nothing ends."""

    @cache
    def measured(command: str) -> float:
        directory, began = tmp_path_factory.mktemp("whole"), time.monotonic()
        assert exit_code(start(words_of(command, directory))) == 0
        assert bool(finished(directory / "report")) == (command not in WITHOUT_FILES)
        return time.monotonic() - began

    return measured


@pytest.mark.soak
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("moment", range(4))
def test_a_command_that_is_ended_at_any_time_leaves_whole_files(seconds, tmp_path, command, number, moment):
    words, out = words_of(command, tmp_path), tmp_path / "report"
    after = random.Random(f"{command} {number} {moment}").random() * seconds(command)
    pid = start(words)
    time.sleep(after)
    os.kill(pid, number)
    assert exit_code(pid) in (0, -number, 128 + number)
    kept = finished(out)
    left = [*tmp_path.rglob(".partial-*")]
    assert not left or number == signal.SIGKILL
    assert exit_code(start(words)) == 0
    now = finished(out)
    stay = [path for path in kept if command == "claims" or "parts" not in path.parts]
    assert now.keys() >= set(stay)
    if command in ("sweep", "claims"):  # whose jobs or parts stay
        parts = [path for path in stay if path.suffix == ".nc" and path.name != "results.nc"]
        assert [now[path] for path in parts] == [kept[path] for path in parts]
