"""A study: models x revisions x texts x measures, written as TOML, checked whole before work starts."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from tl_posgen.core.options import require
from tl_posgen.core.random_inits import check_seed, check_seeds
from tl_posgen.core.store import in_file_name
from tl_posgen.errors import InputError
from tl_posgen.studies.job import Job, measures_with
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
    """A model as a study writes it: `Weights` at each of its revisions.

    Attributes:
        name: on huggingface.co, "mini", or a directory, relative to the study's file.
        revisions: of the Hub; of a directory, the directories in it. The model as it is, if left out.
        label: its name in jobs and tables; the name, or the last part of a directory, if left out.
        backend, dtype, device, tokenizer: as of `Weights`.
    """

    name: str
    revisions: Sequence[str] = ()
    label: str = ""
    backend: str = "auto"
    dtype: str = "auto"
    device: str | None = None
    tokenizer: str | None = None

    def weights(self, folder: Path) -> list[Weights]:
        source = located(self.name, folder)
        label = self.label or (Path(source).name if Path(source).is_absolute() else source)
        tokenizer = self.tokenizer and located(self.tokenizer, folder)
        how = {"backend": self.backend, "dtype": self.dtype, "device": self.device, "tokenizer": tokenizer}
        return [Weights(source, revision, label, **how) for revision in self.revisions or (None,)]


@dataclass(frozen=True)
class Study:
    """What is measured of which models on which texts.

    Attributes:
        name: of the study.
        weights, texts, measures: every model is measured on every text with all measures, in one job.
        length, n_prompts, seed, null_seeds: as in `analyze`.
        drop_cache: delete a revision's files from the Hub's cache once its jobs are done.

    Example:
        >>> study = Study.of({"name": "two_lengths", "models": ["mini"], "measures": [{"name": "slash", "kappa": 0.2}]})
        >>> [job.name for job in study.jobs()]
        ['mini/bundled']
    """

    name: str
    weights: tuple[Weights, ...]
    texts: tuple[Text, ...]
    measures: tuple[tuple[str, Mapping[str, Any]], ...]
    length: int = 512
    n_prompts: int = 4
    seed: int = 0
    null_seeds: tuple[int, ...] = (0,)
    drop_cache: bool = False

    @classmethod
    def of(cls, study: "Study | Mapping[str, Any] | str | os.PathLike") -> "Study":
        """A study from its file, or from what such a file holds.

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
        """Every job, those of one model at one revision one after the other."""
        cut = (self.length, self.n_prompts, self.seed, self.null_seeds, self.drop_cache, len(self.texts) > 1)
        return [Job(self.name, one, text, self.measures, *cut) for one in self.weights for text in self.texts]


def parsed(told: Mapping[str, Any], folder: Path) -> Study:
    """The study that a file holds, every entry looked at."""
    known = {"name", "models", "texts", "measures", "length", "n_prompts", "seed", "null_seeds", "drop_cache"}
    if unknown := [key for key in told if key not in known]:
        raise InputError(f"study: no entry {unknown[0]!r}; there are {', '.join(sorted(known))}")
    name, length, n_prompts = told.get("name"), told.get("length", 512), told.get("n_prompts", 4)
    if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name):
        raise InputError(f"study: name = {name!r}; give letters, digits, _ and -")
    require("length", length, int)
    require("n_prompts", n_prompts, int)
    require("drop_cache", told.get("drop_cache", False), bool)
    if length < 2 or n_prompts < 1:
        raise InputError(f"study: length = {length}, n_prompts = {n_prompts}; give 2 and 1 at least")
    entries = [made(Entry, one, "models") for one in listed(told, "models")]
    texts = [made(Text, one, "texts", "path") for one in listed(told, "texts", [BUNDLED])]
    measures = [measure_of(one) for one in listed(told, "measures", MEASURES)]
    measures_with(measures)
    study = Study(
        name,
        tuple(one for entry in entries for one in entry.weights(folder)),
        tuple(replace(text, path=path_of_text(text.path, folder) if text.path else "") for text in texts),
        tuple(measures),
        length,
        n_prompts,
        check_seed(told.get("seed", 0)),
        tuple(check_seeds(told.get("null_seeds", (0,)))),
        told.get("drop_cache", False),
    )
    known_as: set[Any] = set()
    for job in study.jobs():
        names = {job.name, job.place, in_file_name(job.name)}
        if known_as & names:
            raise InputError(f"study: two jobs are called {job.name}; give a model a label, or a text a name")
        known_as |= names
    return study


def listed(told: Mapping[str, Any], key: str, default: Sequence[Any] | None = None) -> Sequence[Any]:
    found = told.get(key, default)
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        raise InputError(f"study: {key} = {found!r}; give a list with one entry at least")
    return found


def made(kind: type[Made], told: Any, where: str, short: str = "name") -> Made:
    """An entry of a list: a table of its fields, or one word for the field `short`."""
    told = {short: told} if isinstance(told, str) else told
    if not isinstance(told, Mapping):
        raise InputError(f"{where}: {told!r}; give a word or a table")
    hints = get_type_hints(kind)
    known: Any = {one.name: one for one in fields(kind)}  # pyright: ignore[reportArgumentType]
    if unknown := [key for key in told if key not in known]:
        raise InputError(f"{where}: no entry {unknown[0]!r}; there are {', '.join(known)}")
    if missing := [name for name, one in known.items() if one.default is MISSING and name not in told]:
        raise InputError(f"{where}: {dict(told)!r} lacks {missing[0]!r}")
    for key, value in told.items():
        require(f"{where}: {key}", value, hints[key])
    return kind(**told)


def measure_of(told: Any) -> tuple[str, dict[str, Any]]:
    """A measure by its name, or a table of its name and options."""
    told = {"name": told} if isinstance(told, str) else told
    if not isinstance(told, Mapping) or not isinstance(told.get("name"), str):
        raise InputError(f"measures: {told!r}; give a name, or a table with a name and options")
    return told["name"], {key: value for key, value in told.items() if key != "name"}


def located(name: str, folder: Path) -> str:
    """A path relative to the study's file, as an absolute one; a name of something else as it is."""
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
    """The same of a text, which nothing but a file or a directory can be."""
    return name if name == BUNDLED else str((folder / Path(located(name, folder)).expanduser()).resolve())
