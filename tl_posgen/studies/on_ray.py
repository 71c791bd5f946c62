"""Jobs on Ray: a task a group of jobs; placement, memory, GPUs and retries are Ray's own."""

import logging
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tl_posgen.errors import InputError
from tl_posgen.studies.processes import Outcome, Work

RETRIES = 3  # of a task whose worker or node is lost; what it had finished is passed over
STARTS = 4  # a local Ray gives itself 30 s, in which a busy machine has not even loaded it


def on_ray(
    groups: Sequence[Sequence[Any]], work: Work, *, bytes_needed: Callable[[Any], int], address: str | None = None
) -> Iterator[Outcome]:
    """Run groups of jobs on a Ray cluster, each on one worker, with the memory of its largest job as a resource.

    A task gets one CPU, and one GPU where the cluster has any. Files are written by the workers: on several machines
    the directory has to be one that all of them see.

    Args:
        bytes_needed: memory of a job.
        address: of the cluster: "host:port", or "auto" for the one running here; what RAY_ADDRESS says, else a new one
            here, if left out. (Ray itself would first look for one that ran here, and wait minutes if it is gone.)

    Raises:
        InputError: Ray is not installed or not reachable, or no node has the memory that a job needs.
    """
    with connected(address) as ray:
        resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        most = max(node.get("memory", 0) for node in resources)
        on_gpu = any(node.get("GPU", 0) >= 1 for node in resources)
        needs = [max(map(bytes_needed, group)) for group in groups]
        for group, need in zip(groups, needs, strict=True):
            if need > most:
                sizes = f"{need / 1e9:.1f} GB, and the largest node of this Ray has {most / 1e9:.1f} GB"
                raise InputError(f"{group[0].name} needs about {sizes}; give a shorter length, or a larger node")
        task, running = ray.remote(one_group), {}
        for group, need in zip(groups, needs, strict=True):
            how = {"num_cpus": 1, "num_gpus": int(on_gpu), "memory": need, "max_retries": RETRIES}
            running[task.options(name=group[0].name, **how).remote(work, group)] = [job.name for job in group]
        while running:
            for stream in ray.wait(list(running), num_returns=1)[0]:
                try:
                    outcome = ray.get(next(stream))
                    running[stream].remove(outcome.job)
                    yield outcome
                except StopIteration:
                    del running[stream]
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                except ray.exceptions.RayError as error:
                    reason = str(error).strip().splitlines()[0]
                    yield from (Outcome(name, "unfinished", reason) for name in running.pop(stream))


def one_group(work: Work, group: Sequence[Any]) -> Iterator[Outcome]:
    yield from work(group)


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Give the module `ray`, connected inside the block; a connection that was there before stays."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InputError("executor ray: Ray is not installed; in a clone of tl_posgen: pip install '.[ray]'") from error
    if ray.is_initialized():
        yield ray
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    try:
        if named := re.fullmatch(r"(?:ray://)?(.+):(\d+)", address):
            socket.create_connection((named[1], int(named[2])), timeout=10).close()  # Ray itself tries for minutes
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
        for attempt in range(STARTS):
            try:
                ray.init(address=address, **quiet)
                break
            except Exception as slow:
                if "timed out during startup" not in str(slow) or attempt + 1 == STARTS:
                    raise
                ray.shutdown()
    except Exception as error:  # Ray has many kinds, a plain Exception for a node that starts too slowly
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"executor ray: no Ray at {address} ({reason}); start one with `ray start --head`") from error
    try:
        yield ray
    finally:
        ray.shutdown()
