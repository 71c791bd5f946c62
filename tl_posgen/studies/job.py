"""The jobs of a study: one model at one revision on one text each, whose file is there when it is finished."""

import json
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tl_posgen.core.engine import analyze
from tl_posgen.core.files import write_together
from tl_posgen.core.null_models import NullModels
from tl_posgen.core.report import Report, load_provenance
from tl_posgen.core.store import part_path, read_part, write_part
from tl_posgen.errors import InputError, OutputError
from tl_posgen.models.loading.hub import drop_from_cache
from tl_posgen.models.provenance import versions
from tl_posgen.models.streaming.stream import LONG
from tl_posgen.studies.processes import Outcome
from tl_posgen.studies.texts import Text
from tl_posgen.studies.weights import Weights

if TYPE_CHECKING:
    from tl_posgen.studies.study import Study

MAIN = "main"  # the revision of a model that a study names none of
PART = f"*-{16 * '[0-9a-f]'}.nc"

Place: TypeAlias = tuple[str, ...]  # model, revision, text


@dataclass(frozen=True)
class Job:
    """One model at one revision on one text with all measures of a study; its file holds one Report."""

    study: "Study"
    weights: Weights
    text: Text

    @property
    def name(self) -> str:
        return f"{self.weights.name}/{self.text.name}"

    @property
    def place(self) -> Place:
        """The labels of its numbers among those of the study."""
        return (self.weights.label, self.weights.revision or MAIN, self.text.name)

    @cached_property
    def file(self) -> str:
        """The name of its file: by all that its result depends on, paths by their content.

        Made once, where the study is read: a worker of other versions would find another name.
        """
        shared = {key: value for key, value in self.study.settings.items() if key != "study"}
        configuration = {"weights": self.weights.identity, "text": self.text.identity, **shared}
        return part_path(Path(), self.name, configuration).name

    @cached_property
    def bytes_needed(self) -> int:
        """Memory for it, estimated before its model is loaded: of the weights, of a random init beside them where the
        model is kept, and of a pass, streamed where prompts are long.

        Raises:
            InputError, ModelError: the model or its tokenizer is not there.
        """
        study = self.study
        return self.weights.shape.bytes_needed(
            study.length,
            self.weights.itemsize(precise=study.precise),
            copies=1 + bool(study.null_seeds and study.keeps_models),
            is_streamed=study.length > LONG,
            matrices=max(measure.matrices for measure in study.asked),
        )

    def measure(self, model: Any, null_seeds: Sequence[int] | NullModels) -> Report:
        """Return the report of `analyze`, without measures that this model cannot be asked for."""
        study = self.study
        cut = {"length": study.length, "n_prompts": study.n_prompts, "consecutive": study.consecutive}
        cut |= {"seed": study.seed, "null_seeds": null_seeds, "shuffled_seeds": ()}
        several = len(study.measures) > 1
        report = analyze(model, self.text.words, measures=study.asked, skip_unsupported=several, progress=False, **cut)
        return Report(report, report.provenance | {"job": list(self.place), "study": study.settings})


def jobs_in(out: Path, jobs: Sequence[Job] = ()) -> dict[Place, Path]:
    """(model, revision, text) -> the file of every finished job of a directory.

    Args:
        jobs: of one study; those in the directory have to be of it.

    Raises:
        InputError: jobs of another study, other settings or versions, or of other weights or text; two files of one
            job; a file that is damaged, or no job's.
    """
    found: dict[Place, Path] = {}
    settings: Mapping[str, Any] | None = jobs[0].study.settings if jobs else None
    for path in sorted(out.glob(PART)):
        provenance = read_part(path, load_provenance)
        if "study" not in provenance:
            raise InputError(f"{path}: no job of a study; give another --out")
        of_file: Mapping[str, Any] = provenance["study"]
        settings = of_file if settings is None else settings
        for key, now in settings.items():
            if (then := of_file.get(key)) != now:
                raise InputError(
                    f"out: {out} holds a study with {key} {then}, and this one has {now}; give another --out"
                )
        place = tuple(provenance["job"])
        if place in found:
            raise InputError(f"{path}: the same job as {found[place].name}; delete the one that is out of date")
        found[place] = path
    for job in jobs:
        if (path := found.get(job.place)) and path.name != job.file:
            changed = "with other weights, text, tokenizer, dtype, device or backend than it has now"
            raise InputError(f"{path}: {job.name} {changed}; delete the file, or give another --out")
    return found


def attempt(jobs: Sequence[Job], out: Path, expected: Mapping[str, str]) -> Iterator[Outcome]:
    """Measure jobs of one model, its weights loaded once, and write each file when its job is done; keep errors.

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
                if loaded is None and job.study.keeps_models:
                    model = job.weights.pretrained.load(precise=job.study.precise)
                    loaded = model, NullModels(model, job.study.null_seeds)
                report = job.measure(*(loaded or (job.weights.pretrained, job.study.null_seeds)))
                write_part(path, report.as_bytes())
            path.with_suffix(".json").unlink(missing_ok=True)
            yield Outcome(job.name, "finished")
        except OutputError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}".strip()
            kept = {"job": job.name, "error": why, "traceback": traceback.format_exc()}
            write_together(out, {path.with_suffix(".json").name: json.dumps(kept, indent=1).encode()})
            yield Outcome(job.name, "failed", why.splitlines()[0])
    if jobs[0].study.drop_cache:
        loaded = None
        drop_from_cache(jobs[0].weights.source, jobs[0].weights.revision)
