"""kill -9 in every command: what stands under the names of results is whole, whenever it comes."""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

import tl_posgen
from tl_posgen import files
from tl_posgen.cli import main
from tl_posgen.models.tokens import bundled_text
from tl_posgen.result import Report

CHECKPOINTS = Path(__file__).parents[1] / "examples" / "mini_model" / "checkpoints"
SHORT = ("--length", "32", "--prompts", "1", "--no-null")
COMMANDS = {
    "analyze": ("--measures", "mean_key", *SHORT),
    "substitute": SHORT,
    "distance": SHORT,
    "perturb": ("--ratios", "0,0.5", "--n-cloze", "2", *SHORT),
    "length": SHORT,
    "planes": SHORT,
    "slash": SHORT,
    "coupling": ("--k", "5", *SHORT),
    "emerge": (*map(str, sorted(CHECKPOINTS.iterdir())[:2]), "--tokenizer", "mini", *SHORT[:4]),
    "claims": ("--papers", "slash", "--length", "48", "--prompts", "2", "--no-null"),
}


def child(words, prepare=lambda: None):
    """The id of a copy of this process that runs a command."""
    if pid := os.fork():
        return pid
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        sys.argv = ["tl-posgen", *words]
        prepare()
        main()
    finally:
        os._exit(0)


def require_whole(directory):
    """Every file is whole, but those that are not under a name of a result."""
    left = [path for path in directory.rglob("*") if path.is_file()]
    for path in (path for path in left if ".partial-" not in str(path)):
        if path.suffix == ".nc":
            assert isinstance(tl_posgen.load(path), Report)
        elif path.suffix == ".json":
            json.loads(path.read_text())
        else:
            assert path.name == "index.html"
            assert path.read_text().rstrip().endswith("</html>")
    return left


@pytest.mark.parametrize(("step", "when"), [("fsync", 1), ("replace", 3)])
def test_a_command_that_is_killed_while_it_writes_leaves_whole_files(mini, tmp_path, step, when):
    """Over an older report, it is killed at its n-th write to the disk, or its n-th renaming."""
    words = ("analyze", *COMMANDS["analyze"], "--out", str(tmp_path / "report"))
    options = {"measures": "mean_key", "length": 32, "n_prompts": 1, "null_seeds": (), "progress": False}
    tl_posgen.analyze(mini, bundled_text(), **options).write(tmp_path / "report")

    def prepare():
        place = files.os if step == "fsync" else Path
        plain, calls = getattr(place, step), []

        def counted(*arguments):
            calls.append(1)
            if len(calls) == when:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*arguments)

        setattr(place, step, counted)

    _, status = os.waitpid(child(words, prepare), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert len(require_whole(tmp_path)) >= 3


@pytest.mark.soak
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("number", range(4))
def test_a_command_that_is_killed_at_any_time_leaves_whole_files(mini, tmp_path, command, number):
    pid = child((command, *COMMANDS[command], "--out", str(tmp_path / "report")))
    time.sleep(random.Random(f"{command} {number}").uniform(0.2, 20))
    if os.waitpid(pid, os.WNOHANG) == (0, 0):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    require_whole(tmp_path)
