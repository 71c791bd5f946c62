"""A command in a copy of this process, which has imported everything: what a fresh interpreter takes seconds for.

    pid = start(["analyze", "--length", "32"])
    os.kill(pid, signal.SIGTERM)
    assert exit_code(pid) == 143

What it prints is lost.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence

import torch

from tl_posgen.cli import main


def child(function: Callable[[], None]) -> int:
    """The id of a copy of this process that runs a function and ends with its exit code."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        torch.set_num_threads(1)  # makes the pool anew that the fork broke: two threads at once would find none
        function()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:  # before the command has begun
        code = 128 + signal.SIGINT
    finally:
        os._exit(code)


def start(words: Sequence[str], prepare: Callable[[], None] = lambda: None) -> int:
    """The id of a process that runs the command, after what prepares it."""

    def run() -> None:
        sys.argv = ["tl-posgen", *words]
        prepare()
        main()

    return child(run)


def exit_code(pid: int) -> int:
    """As subprocess has it: minus the signal's number, where one ended the process."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
