"""Running a study: finished jobs are passed over, so that an interrupted run is simply started again."""

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from tqdm.auto import tqdm

from tl_posgen.core.files import PARTIAL, require_writable
from tl_posgen.core.options import require
from tl_posgen.errors import InputError
from tl_posgen.models.loading.load import usable
from tl_posgen.models.memory import memory_of
from tl_posgen.models.provenance import versions
from tl_posgen.studies.job import Job, attempt, jobs_in
from tl_posgen.studies.on_ray import on_ray
from tl_posgen.studies.processes import Outcome, local, processes
from tl_posgen.studies.study import Study

Executor = Literal["local", "processes", "ray"]
STALE = 3600  # seconds after which nobody goes on writing a file


@dataclass(frozen=True)
class Swept:
    """Outcome of a run of a study.

    Attributes:
        out: the directory.
        finished: names of the jobs whose file is there.
        failed: name -> error of those that ended with one; they are tried again with `retry`.
        unfinished: name -> reason of those whose worker was lost; the next run takes them up.
        is_whole: whether every job of the study, those of other shards too, is finished or failed, and some finished.
    """

    out: Path
    finished: tuple[str, ...]
    failed: Mapping[str, str]
    unfinished: Mapping[str, str]
    is_whole: bool

    def __str__(self) -> str:
        counts = {"finished": self.finished, "failed": self.failed, "unfinished": self.unfinished}
        return ", ".join(f"{len(jobs)} {state}" for state, jobs in counts.items() if jobs or state == "finished")


def sweep(
    study: Study | Mapping[str, Any] | str | os.PathLike,
    *,
    out: str | os.PathLike,
    executor: Executor | str = "local",
    workers: int = 2,
    address: str | None = None,
    shard: str = "1/1",
    retry: bool = False,
    progress: bool = True,
) -> Swept:
    """Measure models x revisions x texts, a job and a file each, into a directory that `open_study` reads.

    A job's file is written whole when it is done, and named by a hash of its configuration and the versions. Finished
    jobs are passed over; what a run that was killed leaves is taken up by the next.

    Args:
        study: the path of a TOML file, what such a file holds, or a `Study`.
        out: directory of the results; for "ray" on several machines one that all of them see.
        executor: "local", "processes" on this machine, or "ray".
        workers: how many processes.
        address: of a Ray cluster, see `on_ray`.
        shard: "i/n": only the i-th of n parts, split by model and revision; any scheduler starts the n of them.
        retry: also try again jobs that failed.

    Raises:
        InputError: what `Study.read` refuses, a text that cannot be read, a directory of another study, other settings
            or versions, a damaged result, no Ray, more memory needed than there is.
        ModelError: a model that is not there.
        OutputError: the directory cannot be written, or the disk is full.

    Example:
        >>> import tempfile
        >>> import tl_posgen
        >>> study = {"name": "small", "models": ["mini"], "length": 16, "n_prompts": 1, "null_seeds": []}
        >>> with tempfile.TemporaryDirectory() as out:
        ...     print(tl_posgen.sweep(study, out=out, progress=False))
        1 finished
    """
    study = Study.read(study)
    require("workers", workers, int)
    require("out", out, str | os.PathLike)
    require("retry", retry, bool)
    if executor not in get_args(Executor) or workers < 1:
        raise InputError(f"executor {executor!r}, workers {workers}: choose {', '.join(get_args(Executor))}, 1 or more")
    chosen, out, jobs = shard_of(shard), Path(out).absolute(), study.jobs()
    done = jobs_in(out, jobs)
    require_writable(out)
    of_models = [list(group) for _, group in groupby(jobs, key=attrgetter("weights"))][chosen]
    mine = [job for group in of_models for job in group]
    failed = {} if retry else {job.name: why for job in mine if (why := error_of(out / job.file))}
    to_do = [[job for job in group if job.place not in done and job.name not in failed] for group in of_models]
    to_do = [group for group in to_do if group]
    outcomes = outcomes_of(to_do, out, executor, workers, address)
    for job, why in failed.items():
        tqdm.write(f"{job} failed before, and is tried again with retry (--retry): {why}", file=sys.stderr)
    unfinished: dict[str, str] = {}
    with tqdm(total=sum(map(len, to_do)), desc=study.name, unit="job", disable=not progress) as bar:
        try:
            for outcome in outcomes:
                bar.update()
                if outcome.state != "finished":
                    (failed if outcome.state == "failed" else unfinished)[outcome.job] = outcome.why
                    bar.write(f"{outcome.job} {outcome.state}: {outcome.why}")
        except (KeyboardInterrupt, SystemExit):
            kept = [*states(study, out).values()].count("finished")
            bar.write(f"{kept} of {len(jobs)} jobs are finished and kept in {out}; the same command goes on from there")
            raise
    for left in out.glob(f"{PARTIAL}*"):  # what killed runs left half-written; a younger one may be another shard's
        if left.stat().st_mtime < time.time() - STALE:
            shutil.rmtree(left, ignore_errors=True)
    state = states(study, out)
    finished = tuple(job.name for job in mine if state[job.name] == "finished")
    lost = {job: why for job, why in unfinished.items() if state[job] != "finished"}
    return Swept(out, finished, failed, lost, "finished" in state.values() and "to do" not in state.values())


def outcomes_of(
    groups: Sequence[Sequence[Job]], out: Path, executor: str, workers: int, address: str | None
) -> Iterator[Outcome]:
    """Return what will become of each job; texts are read and memory is estimated now, by this process alone."""
    if not groups:
        return iter(())
    for job in (job for group in groups for job in group):
        _ = job.text.words, job.bytes_needed
    work = partial(attempt, out=out, expected=versions())
    if executor == "ray":
        return on_ray(groups, work, bytes_needed=attrgetter("bytes_needed"), address=address)
    require_memory(groups, workers if executor == "processes" else 1)
    return local(groups, work) if executor == "local" else processes(groups, work, workers=workers)


def states(study: Study | Mapping[str, Any] | str | os.PathLike, out: str | os.PathLike) -> dict[str, str]:
    """Return "finished", "failed" or "to do" of every job of a study; asks no network, loads nothing."""
    paths = {job.name: Path(out) / job.file for job in Study.read(study).jobs()}
    return {
        name: "finished" if path.is_file() else "failed" if error_of(path) else "to do" for name, path in paths.items()
    }


def shard_of(shard: str) -> slice:
    """Return the i-th of n parts of a list, of "i/n".

    Example:
        >>> [list("abcde")[shard_of(shard)] for shard in ("1/2", "2/2")]
        [['a', 'c', 'e'], ['b', 'd']]
    """
    found = re.fullmatch(r"(\d+)/(\d+)", shard) if isinstance(shard, str) else None
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise InputError(f"shard = {shard!r}: write which of how many, such as 1/4")
    return slice(int(found[1]) - 1, None, int(found[2]))


def error_of(path: Path) -> str | None:
    """Return the error that the job of this file ended with; None where it did not."""
    path = path.with_suffix(".json")
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["error"]) if path.is_file() else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: damaged ({error!r}); delete the file, and the job is tried again") from error


def require_memory(groups: Sequence[Sequence[Job]], workers: int) -> None:
    """Refuse jobs that take more than the memory of their device, so many at a time."""
    workers = min(workers, len(groups))
    for job in (max(group, key=attrgetter("bytes_needed")) for group in groups):
        device = torch.device(usable(job.weights.pretrained.device))
        held, needed = memory_of(device), job.bytes_needed * workers
        if held is not None and needed > held:
            so_many = f"{workers} such jobs need" if workers > 1 else "needs"
            raise InputError(
                f"{job.name}: {so_many} about {needed / 1e9:.1f} GB, and {device} has {held / 1e9:.1f} GB; give fewer "
                "workers, a shorter length, a smaller dtype or no null_seeds"
            )
