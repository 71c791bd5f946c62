"""The jobs of a study: one model at one revision on one text each, whose file is there when it is finished."""

import json
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from tl_posgen.core import registry
from tl_posgen.core.engine import analyze
from tl_posgen.core.files import write_together
from tl_posgen.core.measure import Measure
from tl_posgen.core.random_inits import RandomInits
from tl_posgen.core.report import Report, load_provenance
from tl_posgen.core.store import part_path, read_part, write_part
from tl_posgen.errors import InputError, OutputError
from tl_posgen.models.loading.hub import drop_from_cache
from tl_posgen.models.provenance import versions
from tl_posgen.models.streaming.stream import LONG
from tl_posgen.studies.processes import Outcome
from tl_posgen.studies.texts import Text
from tl_posgen.studies.weights import Weights

MAIN = "main"  # the revision of a model that a study names none of
PART = f"*-{16 * '[0-9a-f]'}.nc"

Place: TypeAlias = tuple[str, ...]  # model, revision, text


def jobs_in(out: Path, settings: Mapping[str, Any] | None = None) -> dict[Place, Path]:
    """(model, revision, text) -> the file of every finished job of a directory.

    Args:
        settings: of the study that they have to be of; of the first one, if left out.

    Raises:
        InputError: jobs of another study, other settings or versions; two files of one job; a file that is damaged, or
            no job's.
    """
    found: dict[Place, Path] = {}
    for path in sorted(out.glob(PART)):
        provenance = read_part(path, load_provenance)
        if "study" not in provenance:
            raise InputError(f"{path}: no job of a study; give another --out")
        of_it: Mapping[str, Any] = provenance["study"]
        settings = of_it if settings is None else settings
        for key, now in settings.items():
            if (then := of_it.get(key)) != now:
                raise InputError(
                    f"out: {out} holds a study with {key} {then}, and this one has {now}; give another --out"
                )
        place = tuple(provenance["job"])
        if place in found:
            raise InputError(f"{path}: the same job as {found[place].name}; delete the one that is out of date")
        found[place] = path
    return found


@dataclass(frozen=True)
class Job:
    """One model at one revision on one text with all measures of a study; its file holds one Report.

    Attributes:
        study: its name.
        measures: (name, options) of each.
        length, n_prompts, seed, null_seeds: as in `analyze`.
        drop_cache: delete the model from the Hub's cache when all its jobs are done.
        keeps_model: hold the model beside its random inits, for the next job; else they take its place.
    """

    study: str
    weights: Weights
    text: Text
    measures: tuple[tuple[str, Mapping[str, Any]], ...]
    length: int
    n_prompts: int
    seed: int
    null_seeds: tuple[int, ...]
    drop_cache: bool = False
    keeps_model: bool = False

    @property
    def name(self) -> str:
        return f"{self.weights.name}/{self.text.name}"

    @property
    def place(self) -> Place:
        """Where its numbers stand among those of the study."""
        return (self.weights.label, self.weights.revision or MAIN, self.text.name)

    @property
    def asked(self) -> list[Measure]:
        """Its measures with their options, and those that they come after."""
        return measures_with(self.measures)

    @property
    def precise(self) -> bool:
        return any(measure.precise for measure in self.asked)

    @property
    def settings(self) -> dict[str, Any]:
        """What all jobs of a study have in common, JSON-ready; models and texts may be added."""
        measures = {measure.name: measure.options() for measure in self.asked}
        cut = {"length": self.length, "n_prompts": self.n_prompts, "seed": self.seed, "null_seeds": [*self.null_seeds]}
        return {"study": self.study, "measures": measures, **cut, "versions": versions()}

    @cached_property
    def configuration(self) -> dict[str, Any]:
        """Everything that its result depends on, JSON-ready; paths are told by what lies there."""
        shared = {key: value for key, value in self.settings.items() if key != "study"}
        return {"weights": self.weights.identity, "text": self.text.identity, **shared}

    @cached_property
    def bytes_needed(self) -> int:
        """Memory that it takes, estimated before its model is loaded: of the weights, of a random init beside them
        where the model is kept, and of a pass, streamed where prompts are long.

        Raises:
            InputError, ModelError: the model or its tokenizer is not there.
        """
        matrices = max(measure.matrices for measure in self.asked)
        how = {
            "copies": 1 + bool(self.null_seeds and self.keeps_model),
            "is_streamed": self.length > LONG,
            "matrices": matrices,
        }
        return self.weights.shape.bytes_needed(self.length, self.weights.itemsize(precise=self.precise), **how)

    @cached_property
    def file(self) -> str:
        """Named once, where the study is read: a worker of other versions would find another name."""
        return part_path(Path(), self.name, self.configuration).name

    def measure(self, model: Any, null_seeds: Sequence[int]) -> Report:
        """What `analyze` finds; measures that this model cannot be asked for are left out."""
        cut = {"length": self.length, "n_prompts": self.n_prompts, "seed": self.seed, "progress": False}
        several = len(self.measures) > 1
        asked = {"measures": self.asked, "skip_unsupported": several, "null_seeds": null_seeds}
        report = analyze(model, self.text.words, **asked, **cut)
        return Report(report, report.provenance | {"job": list(self.place), "study": self.settings})


def measures_with(measures: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Measure]:
    """Return (name, options) as `analyze` takes them; InputError for an unknown measure or option."""
    return registry.requested([registry.measure_from(name, dict(options)) for name, options in measures])


def attempt(jobs: Sequence[Job], out: Path, expected: Mapping[str, str]) -> Iterator[Outcome]:
    """Jobs of one model, one after the other, its weights loaded once: measured, written, or their error kept.

    A finished job is passed over, so what was interrupted may be given again.

    Args:
        expected: versions that the study was begun with; a worker that has others refuses.

    Raises:
        OutputError: the disk is full, say; nothing further could be kept.
    """
    loaded = None
    for job in jobs:
        path = out / job.file
        try:
            if not path.is_file():
                if expected != versions():
                    raise InputError(f"this worker has {versions()}, and the study was begun with {dict(expected)}")
                if loaded is None and job.keeps_model:
                    model = job.weights.load(precise=job.precise)
                    loaded = model, RandomInits(model, job.null_seeds)
                report = job.measure(*(loaded or (job.weights.pretrained, job.null_seeds)))
                write_part(path, report.as_bytes())
            path.with_suffix(".json").unlink(missing_ok=True)
            yield Outcome(job.name, "finished")
        except OutputError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}".strip()
            told = {"job": job.name, "error": why, "traceback": traceback.format_exc()}
            write_together(out, {path.with_suffix(".json").name: json.dumps(told, indent=1).encode()})
            yield Outcome(job.name, "failed", why.splitlines()[0])
    if jobs[0].drop_cache:
        loaded = None
        drop_from_cache(jobs[0].weights.source, jobs[0].weights.revision)
