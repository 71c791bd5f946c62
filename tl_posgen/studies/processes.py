"""Jobs in processes of this machine, one torch thread each; a worker that is killed costs its job and nothing else."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, TypeAlias


@dataclass(frozen=True)
class Outcome:
    """State of a job: finished, failed with an error that is kept, or unfinished as its worker ended."""

    job: str
    state: Literal["finished", "failed", "unfinished"]
    why: str = ""


Work: TypeAlias = Callable[[Sequence[Any]], Iterator[Outcome]]


def local(groups: Sequence[Sequence[Any]], work: Work) -> Iterator[Outcome]:
    """Run groups of jobs in this process, one after the other."""
    for group in groups:
        yield from work(group)


def processes(groups: Sequence[Sequence[Any]], work: Work, *, workers: int) -> Iterator[Outcome]:
    """Run groups of jobs in so many processes, each of which takes a further group when it is done with one.

    Where a worker ends in the middle of a job (killed, out of memory), the job is unfinished, and another worker goes
    on with the rest of its group. Workers end with this process, however that ends, and where `work` raises.
    """
    waiting = [list(group) for group in groups]
    started: list[Worker] = []
    try:
        started += [Worker(work) for _ in range(min(workers, len(waiting)))]
        while True:
            for place, worker in enumerate(started):
                if not worker.jobs and waiting:
                    if not worker.process.is_alive():
                        started[place] = worker = Worker(work)
                    worker.send(waiting.pop(0))
            busy = {worker.connection: worker for worker in started if worker.jobs}
            if not busy:
                return
            for connection in wait(list(busy)):
                worker = busy[connection]  # pyright: ignore[reportArgumentType]
                try:
                    found = worker.connection.recv()
                except (EOFError, ConnectionResetError):
                    yield Outcome(worker.jobs.pop(0).name, "unfinished", worker.ended())
                    if worker.jobs:
                        waiting.insert(0, worker.jobs)
                        worker.jobs = []
                    continue
                if isinstance(found, BaseException):
                    raise found
                worker.jobs.pop(0)
                yield found
    finally:
        for worker in started:
            worker.stop()


class Worker:
    """A process and the jobs that it still has to report."""

    def __init__(self, work: Work):
        context, before = get_context("spawn"), os.environ.get("OMP_NUM_THREADS")
        self.connection, theirs = context.Pipe()
        self.jobs: list[Any] = []
        self.process = context.Process(target=serve, args=(theirs, work), daemon=True)
        os.environ["OMP_NUM_THREADS"] = "1"  # read when the process imports torch
        try:
            with without_interrupts():
                self.process.start()
        finally:
            os.environ.pop("OMP_NUM_THREADS") if before is None else os.environ.update(OMP_NUM_THREADS=before)
        theirs.close()

    def send(self, jobs: list[Any]) -> None:
        self.jobs = list(jobs)
        with suppress(BrokenPipeError):  # it has ended; that shows when it is asked for what it found
            self.connection.send(jobs)

    def ended(self) -> str:
        """Return how it ended, in words."""
        self.process.join()
        code = self.process.exitcode or 0
        return f"its worker was killed ({signal.Signals(-code).name})" if code < 0 else f"its worker ended ({code})"

    def stop(self) -> None:
        """End it; on its way out it removes what is half written."""
        self.connection.close()
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(10)
        if self.process.is_alive():
            self.process.kill()


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Start processes that never hear Ctrl-C, which reaches every process: the first one stops the others."""
    if threading.current_thread() is not threading.main_thread():  # no other thread may set signals
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def serve(connection: Connection, work: Work) -> None:
    """Do the jobs that come and send their outcomes, until nobody sends any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for one that was not started without_interrupts
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parent = parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    with suppress(EOFError, BrokenPipeError):
        while True:
            jobs = connection.recv()
            try:
                for outcome in work(jobs):
                    connection.send(outcome)
            except BrokenPipeError:
                raise
            except Exception as error:
                connection.send(error)
