"""Running a study by joblib: finished jobs are passed over, so that a stopped run is simply started again."""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from joblib import Parallel, delayed, parallel_config
from tqdm.auto import tqdm

from tl_posgen.core import registry
from tl_posgen.core.engine import analyze
from tl_posgen.core.files import require_writable, write_files
from tl_posgen.core.options import require
from tl_posgen.core.report import Report
from tl_posgen.core.saved import load_provenance
from tl_posgen.core.store import Parts, read_part
from tl_posgen.errors import InputError, OutputError
from tl_posgen.models import open_session
from tl_posgen.models.conversion.files import drop_from_cache, first_line
from tl_posgen.studies.study import Job, Study

JOBS = "jobs"  # the directory of their files
_PARTS = "parts"  # the directory of what is kept of jobs that are not finished
_FAILED = ".failed"  # suffix of a file with the error of a job, beside where its own would be
_STARTS = 4  # a local Ray gives itself 30 s, in which a busy machine has not even loaded it


def sweep(
    study: Study | Mapping[str, Any] | str | os.PathLike,
    *,
    out: str | os.PathLike,
    workers: int = 1,
    ray: str | None = None,
    progress: bool = True,
) -> dict[str, str]:
    """Measure models x revisions x texts into a directory that `open_study` reads: a call of `analyze` and a file each.

    A job that fails is said in one line, and the others go on. A run that is stopped goes on from its finished jobs,
    and in the others from what `analyze(keep=...)` has kept of them. Returned is what became of each job, see `states`.

    Args:
        study: the path of a TOML file, what such a file holds, or a `Study`.
        out: directory of the results; for Ray on several machines one that all of them see.
        workers: processes of this machine, each with its share of the cores; each takes a model at a revision.
        ray: address of a Ray cluster that takes their place, "host:port", or "auto" for the one running here; "local"
            starts one. Each model gets one CPU, and one GPU where the cluster has any.

    Raises:
        InputError: what `Study.read` refuses, a text that cannot be read, a directory of another study, other settings
            or versions, a damaged result, no Ray.
        OutputError: the directory cannot be written, or the disk is full.

    Example:
        >>> import tempfile
        >>> import tl_posgen
        >>> study = {"name": "small", "models": ["mini"], "length": 16, "n_prompts": 1, "nulls": 0}
        >>> with tempfile.TemporaryDirectory() as out:
        ...     tl_posgen.sweep(study, out=out, progress=False)
        {'mini/bundled': 'finished'}
    """
    study = Study.read(study)
    require("workers", workers, int)
    require("out", out, str | os.PathLike)
    require("ray", ray, str | None)
    if workers < 1:
        raise InputError(f"workers {workers}: give 1 or more")
    out, jobs = Path(out).absolute(), study.jobs()
    done = finished_jobs(out, jobs)
    to_do = [job for job in jobs if job.place not in done]
    _ = [job.text.words for job in to_do]  # read now, by this process alone
    require_writable(out)
    groups = [list(group) for _, group in groupby(to_do, key=attrgetter("weights"))]
    files = {job.name: out / JOBS / job.file for job in jobs}
    with (
        _executor(workers, ray if groups else None) as options,
        tqdm(total=len(groups), desc=study.name, unit="model", disable=not progress) as bar,
    ):
        try:
            here = workers == 1 and ray is None  # in this process, so that the steps of a job have a bar below
            for name, error in _outcomes(groups, partial(_measure, out=out, progress=progress and here), options, bar):
                if not files[name].is_file():
                    failed = files[name].with_suffix(_FAILED).name
                    write_files(out / JOBS, {failed: error.encode(errors="backslashreplace")})
                    bar.write(f"{name} failed: {error}", file=sys.stderr)
        except (KeyboardInterrupt, SystemExit):
            n = sum(path.is_file() for path in files.values())
            bar.write(
                f"{n} of {len(jobs)} jobs are finished and kept in {out}; the same again goes on from there",
                file=sys.stderr,
            )
            raise
    with suppress(OSError):
        (out / _PARTS).rmdir()
    return states(study, out)


def _outcomes(
    groups: Sequence[Sequence[Any]], work: Callable[[Sequence[Any]], Any], options: Mapping[str, Any], bar: tqdm
) -> Iterator[tuple[str, str]]:
    """Yield (name, error) of the jobs that fail, once their model is done. Where a worker is lost (killed, out of
    memory), and joblib stops the others with it, the models that are not done run again, one at a time."""

    class WithBar(Parallel):
        shown = 0

        def print_progress(self) -> None:  # which joblib calls after each task
            bar.update(self.n_completed_tasks - self.shown)
            self.shown = self.n_completed_tasks

    waiting = {group[0].name: group for group in groups}
    try:
        parallel: Any = WithBar(batch_size=1, **options)  # pyright: ignore[reportArgumentType]
        for first, errors in parallel(delayed(work)(group) for group in groups):
            del waiting[first]
            yield from errors.items()
    except OutputError:
        raise
    except Exception as error:  # of joblib or Ray: the jobs' own are returned
        if len(groups) == 1:
            reason = first_line(error)
            yield from ((job.name, f"its worker was lost ({reason})") for job in groups[0])
            return
        for group in waiting.values():
            yield from _outcomes([group], work, options, bar)


def _measure(jobs: Sequence[Job], out: Path, progress: bool) -> tuple[str, dict[str, str]]:
    """Measure jobs of one model, its weights loaded once, and write each file when its job is done; return the name of
    the first, and the errors by name.

    Args:
        progress: show a bar of the steps of each job.

    Raises:
        OutputError: the disk is full, say; nothing further could be kept.
    """
    weights, study, errors = jobs[0].weights, jobs[0].study, {}
    model: Any = weights.pretrained  # of which analyze makes room for its random inits
    for job in jobs:
        path, parts = out / JOBS / job.file, Parts(_parts_of(job, out))
        if path.is_file():
            continue
        try:
            if len(jobs) > 1 and model is weights.pretrained:
                precise = any(measure.precise for measure in registry.requested(study.measures))
                model = open_session(model, precise=precise)
            several = len(study.measures) > 1  # a study of one measure fails where the model does not allow it
            options = {"measures": study.measures, "skip_unsupported": several, "progress": progress}
            report = analyze(model, job.text.words, keep=parts, **options, **study.cut)
            of_job = {"job": list(job.place), "study": study.settings, "identity": job.identity}
            write_files(path.parent, {path.name: Report(report, report.provenance | of_job).as_bytes()})
            parts.discard()
            path.with_suffix(_FAILED).unlink(missing_ok=True)
        except OutputError:
            raise
        except Exception as error:
            errors[job.name] = f"{type(error).__name__}: {error}".splitlines()[0]
    if study.drop_cache:
        model = None
        drop_from_cache(str(weights.pretrained.name_or_directory), weights.revision)
    return jobs[0].name, errors


@contextmanager
def _executor(workers: int, ray: str | None) -> Iterator[dict[str, Any]]:
    """Give the arguments of joblib's Parallel; inside the block a Ray cluster is connected where one is asked for."""
    if ray is None:
        yield {"n_jobs": workers, "return_as": "generator_unordered"}
        return
    try:
        import ray as cluster  # pyright: ignore[reportMissingImports]
        from ray.util.joblib import register_ray  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InputError("ray: Ray is not installed; in a clone of tl_posgen: pip install '.[ray]'") from error
    was_connected = cluster.is_initialized()
    for tried in range(0 if was_connected else _STARTS):
        try:
            cluster.init(address=ray, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
            break
        except Exception as error:  # Ray has many kinds, a plain Exception for a node that starts too slowly
            cluster.shutdown()
            reason = first_line(error)
            if "timed out during startup" not in reason or tried + 1 == _STARTS:
                raise InputError(f"ray: no Ray at {ray} ({reason}); start one with `ray start --head`") from error
    try:
        register_ray()
        on_gpu = cluster.cluster_resources().get("GPU", 0) >= 1
        with parallel_config(backend="ray", ray_remote_args={"num_cpus": 1, "num_gpus": int(on_gpu)}):
            yield {"n_jobs": -1}  # of which joblib has no generator
    finally:
        if not was_connected:
            cluster.shutdown()


def states(study: Study | Mapping[str, Any] | str | os.PathLike, out: str | os.PathLike) -> dict[str, str]:
    """Return "finished", "failed: ..." (the next run tries it again), "begun" (a part is kept) or "to do" of every
    job of a study; asks no network, loads nothing. Errors as in `sweep`."""
    jobs, state_of = Study.read(study).jobs(), dict[str, str]()
    done = finished_jobs(Path(out), jobs)
    for job in jobs:
        failed = Path(out, JOBS, job.file).with_suffix(_FAILED)
        error = failed.read_text(encoding="utf-8", errors="replace") if failed.is_file() else ""
        waiting = "begun" if any(_parts_of(job, Path(out)).rglob("*.nc")) else "to do"
        state_of[job.name] = "finished" if job.place in done else f"failed: {error}" if error else waiting
    return state_of


def _parts_of(job: Job, out: Path) -> Path:
    """Return the directory of what is kept of a job that is not finished."""
    return out / _PARTS / Path(job.file).stem


def finished_jobs(out: Path, jobs: Sequence[Job] = ()) -> dict[tuple[str, ...], Path]:
    """Return (model, revision, text) -> the file of every finished job of a directory.

    Args:
        jobs: of one study; those in the directory have to be of it.

    Raises:
        InputError: jobs of another study, other settings or versions, or of other weights or text; a file that is
            damaged, or no job's.
    """
    files: dict[tuple[str, ...], Path] = {}
    expected = {job.place: job for job in jobs}
    settings: Mapping[str, Any] | None = jobs[0].study.settings if jobs else None
    for path in sorted((out / JOBS).glob("*.nc")):
        provenance = read_part(path, load_provenance)
        if "study" not in provenance:
            raise InputError(f"{path}: no job of a study; give another --out")
        of_file: Mapping[str, Any] = provenance["study"]
        settings = of_file if settings is None else settings
        for key, now in settings.items():
            if (then := of_file.get(key)) != now:
                refusal = f"out: {out} holds a study with {key} {then}, and this one has {now}"
                if key == "package":
                    refusal = f"out: {out} holds a study that other code of tl_posgen has measured"
                raise InputError(f"{refusal}; give another --out")
        place = tuple(provenance["job"])
        if place in expected and expected[place].identity != provenance["identity"]:
            changed = "with other weights, text, tokenizer, dtype, device or backend than it has now"
            raise InputError(f"{path}: {expected[place].name} {changed}; delete the file, or give another --out")
        files[place] = path
    return files
