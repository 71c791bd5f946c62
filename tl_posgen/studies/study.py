"""A study: models x revisions x texts x measures, written as TOML, checked whole before work starts."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from tl_posgen.core import registry
from tl_posgen.core.measure import Measure
from tl_posgen.core.null_models import check_seed, check_seeds
from tl_posgen.core.options import require
from tl_posgen.core.store import in_file_name
from tl_posgen.errors import InputError, PosgenError
from tl_posgen.models.conversion.source import local_directory
from tl_posgen.models.loading.load import Pretrained
from tl_posgen.models.provenance import versions
from tl_posgen.studies.job import Job
from tl_posgen.studies.texts import BUNDLED, Text
from tl_posgen.studies.weights import Weights

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

MEASURES = ("three_axis", "variance", "mean_key")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Entry:
    """A model as a study writes it, with all its revisions.

    Attributes:
        name: on huggingface.co, "mini", or a directory, relative to the study's file.
        revisions: of the Hub; of a directory, the directories in it. The model as it is, if left out.
        label: its name in jobs and tables; the name, or the last part of a directory, if left out.
        backend, dtype, device: as in `load_model`; dtype by its name, such as "bfloat16".
        tokenizer: a directory, or "mini", for checkpoints that have none.
    """

    name: str
    revisions: Sequence[str] = ()
    label: str = ""
    backend: str = "auto"
    dtype: str = "auto"
    device: str | None = None
    tokenizer: str | None = None

    def weights(self, folder: Path) -> list[Weights]:
        """Return the weights of every revision; paths are relative to the folder."""
        source = located(self.name, folder)
        label = self.label or (Path(source).name if Path(source).is_absolute() else source)
        tokenizer = self.tokenizer and located(self.tokenizer, folder)
        how, found = (self.backend, self.dtype, self.device), []
        for revision in self.revisions or (None,):
            try:
                if revision is not None and source != "mini" and (here := local_directory(source)):
                    pretrained = Pretrained(here / revision, *how, tokenizer=tokenizer)
                else:
                    pretrained = Pretrained(source, *how, revision, tokenizer)
            except PosgenError as error:
                raise InputError(f"model {source}: {error}") from error
            found.append(Weights(label, revision, pretrained))
        return found


@dataclass(frozen=True)
class Study:
    """Models x texts x measures: every model is measured on every text with all measures, in one job.

    Attributes:
        name: of the study.
        weights, texts, measures: models at their revisions, texts, and (name, options) of each measure.
        length, n_prompts, consecutive, seed, null_seeds: as in `analyze`.
        drop_cache: delete a revision's files from the Hub's cache once its jobs are done.

    Example:
        >>> slash = {"name": "slash", "kappa": 0.2}
        >>> study = Study.read({"name": "two_lengths", "models": ["mini"], "measures": [slash]})
        >>> [job.name for job in study.jobs()]
        ['mini/bundled']
    """

    name: str
    weights: tuple[Weights, ...]
    texts: tuple[Text, ...]
    measures: tuple[tuple[str, Mapping[str, Any]], ...]
    length: int = 512
    n_prompts: int = 4
    consecutive: bool = False
    seed: int = 0
    null_seeds: tuple[int, ...] = (0,)
    drop_cache: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[\w-]+", self.name):
            raise InputError(f"study: name = {self.name!r}; give letters, digits, _ and -")
        for key, kind in {"length": int, "n_prompts": int, "consecutive": bool, "drop_cache": bool}.items():
            require(key, getattr(self, key), kind)
        if self.length < 2 or self.n_prompts < 1:
            raise InputError(f"study: length = {self.length}, n_prompts = {self.n_prompts}; give 2 and 1 at least")
        check_seed(self.seed)
        _ = self.asked  # unknown measures and options are refused now
        known_as: set[Any] = set()
        for job in self.jobs():
            names = {job.name, job.place, in_file_name(job.name)}
            if known_as & names:
                raise InputError(f"study: two jobs are called {job.name}; give a model a label, or a text a name")
            known_as |= names

    @classmethod
    def read(cls, study: "Study | Mapping[str, Any] | str | os.PathLike") -> "Study":
        """Return the study of a file, or of what such a file holds.

        Raises:
            InputError: no such file, no TOML, an entry that is unknown, missing or of another type, an unknown measure
                or option, two models, texts or jobs of one name.
        """
        if isinstance(study, Study):
            return study
        if isinstance(study, Mapping):
            return parsed(study, Path.cwd())
        if not isinstance(study, str | os.PathLike):
            raise InputError(f"study {study!r}: give the path of a TOML file, or what such a file holds")
        path = Path(study)
        try:
            return parsed(tomllib.loads(path.read_text(encoding="utf-8-sig")), path.resolve().parent)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise InputError(f"{path}: not TOML ({error})") from error
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a zero byte in the path
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"{path}: cannot be read ({reason}); give a study's file") from error

    def jobs(self) -> list[Job]:
        """Return every job, those of one model at one revision one after the other."""
        return [Job(self, one, text) for one in self.weights for text in self.texts]

    @property
    def asked(self) -> list[Measure]:
        """Its measures with their options, and those that they come after.

        Raises:
            InputError: an unknown measure or option.
        """
        return registry.requested([registry.measure_from(name, dict(options)) for name, options in self.measures])

    @property
    def precise(self) -> bool:
        """True if a measure needs float32."""
        return any(measure.precise for measure in self.asked)

    @property
    def keeps_models(self) -> bool:
        """True if a model is held beside its random inits, for its next text; else they take its place."""
        return len(self.texts) > 1

    @property
    def settings(self) -> dict[str, Any]:
        """All that every job depends on beside its model and text, JSON-ready; models and texts may be added."""
        measures = {measure.name: measure.options() for measure in self.asked}
        cut = {"length": self.length, "n_prompts": self.n_prompts, "consecutive": self.consecutive}
        cut |= {"seed": self.seed, "null_seeds": [*self.null_seeds]}
        return {"study": self.name, "measures": measures, **cut, "versions": versions()}


def parsed(written: Mapping[str, Any], folder: Path) -> Study:
    """Return the study that a file in this folder holds."""
    known = {"models", *(one.name for one in fields(Study) if one.name != "weights")}
    if unknown := [key for key in written if key not in known]:
        raise InputError(f"study: no entry {unknown[0]!r}; there are {', '.join(sorted(known))}")
    entries = [made(Entry, one, "models") for one in listed(written, "models")]
    texts = [made(Text, one, "texts", "path") for one in listed(written, "texts", [BUNDLED])]
    measures = tuple(measure_of(one) for one in listed(written, "measures", MEASURES))
    more = {key: written[key] for key in ("length", "n_prompts", "consecutive", "seed", "drop_cache") if key in written}
    if "null_seeds" in written:
        more["null_seeds"] = tuple(check_seeds(written["null_seeds"]))
    return Study(
        written.get("name"),  # pyright: ignore[reportArgumentType]
        tuple(one for entry in entries for one in entry.weights(folder)),
        tuple(replace(text, path=path_of_text(text.path, folder) if text.path else "") for text in texts),
        measures,
        **more,
    )


def listed(written: Mapping[str, Any], key: str, default: Sequence[Any] | None = None) -> Sequence[Any]:
    """Return the list of an entry; refuse an empty one."""
    found = written.get(key, default)
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        raise InputError(f"study: {key} = {found!r}; give a list with one entry at least")
    return found


def made(kind: type[Made], written: Any, where: str, short: str = "name") -> Made:
    """Return an entry of a list: of a table of its fields, or of one word for the field `short`."""
    written = {short: written} if isinstance(written, str) else written
    if not isinstance(written, Mapping):
        raise InputError(f"{where}: {written!r}; give a word or a table")
    hints = get_type_hints(kind)
    known: Any = {one.name: one for one in fields(kind)}  # pyright: ignore[reportArgumentType]
    if unknown := [key for key in written if key not in known]:
        raise InputError(f"{where}: no entry {unknown[0]!r}; there are {', '.join(known)}")
    if missing := [name for name, one in known.items() if one.default is MISSING and name not in written]:
        raise InputError(f"{where}: {dict(written)!r} lacks {missing[0]!r}")
    for key, value in written.items():
        require(f"{where}: {key}", value, hints[key])
    return kind(**written)


def measure_of(written: Any) -> tuple[str, dict[str, Any]]:
    """Return (name, options) of a name, or of a table of a name and options."""
    written = {"name": written} if isinstance(written, str) else written
    if not isinstance(written, Mapping) or not isinstance(written.get("name"), str):
        raise InputError(f"measures: {written!r}; give a name, or a table with a name and options")
    return written["name"], {key: value for key, value in written.items() if key != "name"}


def located(name: str, folder: Path) -> str:
    """Return a path relative to the folder as an absolute one; a name of something else as it is."""
    if name in ("mini", BUNDLED):
        return name
    if "\0" in name:
        raise InputError(f"study: {name!r} holds a zero byte; give the path without it")
    path = folder / Path(name).expanduser()
    if path.exists() or name.startswith((".", "~", "/")):
        return str(path.resolve())
    if Path(name).exists():
        raise InputError(f"study: {name!r} is here, and not beside the study, in {folder}; give its absolute path")
    return name


def path_of_text(name: str, folder: Path) -> str:
    """Return the absolute path of a text, which nothing but a file or a directory can be."""
    return name if name == BUNDLED else str((folder / Path(located(name, folder)).expanduser()).resolve())
