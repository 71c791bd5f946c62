"""Jobs without a model, for tests of executors; run as a script, a driver that can be killed.

python tests/sweep_jobs.py OUT
"""

import os
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tl_posgen.core.files import write_whole
from tl_posgen.errors import OutputError
from tl_posgen.studies.processes import Outcome, processes


@dataclass(frozen=True)
class Quick:
    """Takes `seconds`, then writes its name; "fatal" fails for all, "killed" kills its process the first time,
    "always killed" every time."""

    name: str
    seconds: float = 0.0
    kind: str = ""


def work(jobs, out: str):
    for job in jobs:
        path, tried = Path(out, job.name), Path(out, f"tried-{job.name}")
        if not path.exists():
            time.sleep(job.seconds)
            if job.kind == "fatal":
                raise OutputError("no space")
            if job.kind == "always killed" or (job.kind == "killed" and not tried.exists()):
                tried.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            write_whole(path, job.name.encode() * 1000)
            with Path(out, "log").open("a") as log:
                log.write(f"{job.name} {os.getpid()} {os.environ.get('OMP_NUM_THREADS')}\n")
        yield Outcome(job.name, "finished")


GROUPS = [[Quick(f"job{group}{number}", 0.1) for number in range(3)] for group in range(6)]

if __name__ == "__main__":
    for outcome in processes(GROUPS, partial(work, out=sys.argv[1]), workers=2):
        print(outcome, flush=True)
