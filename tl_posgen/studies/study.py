"""A study: models x revisions x texts x measures, written as TOML, checked whole before work starts."""

import hashlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch

from tl_posgen.core import registry
from tl_posgen.core.measure import Measure
from tl_posgen.core.null_models import Nulls, seeds_by_kind
from tl_posgen.core.options import Count, Within, check_options, with_options
from tl_posgen.core.store import PACKAGE, code_of, in_file_name
from tl_posgen.errors import InputError, PosgenError, check_seed
from tl_posgen.models.conversion.files import first_line
from tl_posgen.models.loading.load import Pretrained
from tl_posgen.models.provenance import versions
from tl_posgen.models.tokens import BUNDLED_NAME, NamedText, bundled_text, read_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

MEASURES = ("three_axis", "variance", "mean_key")
BUNDLED = "bundled"
MAIN = "main"  # the revision of a model that a study names none of
_IDENTITY = (".json", ".safetensors", ".gguf", ".model", ".txt", ".jinja")  # files that make a model or a tokenizer
_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Text:
    """One text, the same for every model; each reads it with its own tokenizer.

    Attributes:
        path: a file; a directory, whose files are read in the order of their names; or "bundled", the bundled book.
        dataset: instead of a path, a name or path that `datasets.load_dataset` reads. config, split, revision: its own.
        column: of the dataset; its rows are joined by empty lines.
        characters: at most so many are read.
        name: of the text in jobs and tables; the last part of path or dataset if left out.

    Example:
        >>> Text("bundled", characters=30).words
        '## Chapter 1 - Down the Rabbit'
    """

    path: str = ""
    dataset: str = ""
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    column: str = "text"
    characters: Count = 2_000_000
    name: str = ""

    def __post_init__(self) -> None:
        check_options(self, "texts")
        if bool(self.path) == bool(self.dataset):
            raise InputError(f"text {self.name or self.path!r}: give either a path or a dataset")
        if not self.name:
            object.__setattr__(self, "name", Path(self.path or self.dataset).stem)

    @cached_property
    def words(self) -> str:
        """The text itself, read once; it travels with the jobs, so that no worker reads it again.

        Raises:
            InputError: it is not there, not UTF-8, or empty; `datasets` is not installed, or cannot read it.
        """
        parts, missing = [], self.characters
        for part in self._rows() if self.dataset else self._files():
            parts.append(part[:missing])
            missing -= len(part) + 2
            if missing <= 0:
                break
        if not "".join(parts).strip():
            raise InputError(f"text {self.name}: empty")
        return NamedText("\n\n".join(parts), BUNDLED_NAME if self.path == BUNDLED else self.name)

    @property
    def identity(self) -> Any:
        """A digest of the words; of a dataset on the Hub, what names it."""
        if not self.dataset or Path(self.dataset).exists():
            return hashlib.sha256(self.words.encode()).hexdigest()
        return {key: value for key, value in asdict(self).items() if key not in ("path", "name")}

    def _files(self) -> Iterator[str]:
        if self.path == BUNDLED:
            yield bundled_text()
            return
        path = Path(self.path)
        for file in sorted(entry for entry in path.rglob("*") if entry.is_file()) if path.is_dir() else [path]:
            if file == path or not any(part.startswith(".") for part in file.relative_to(path).parts):
                yield read_text(file)

    def _rows(self) -> Iterator[str]:
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise InputError(f"text {self.name}: datasets is not installed; pip install datasets") from error
        try:
            options: dict[str, Any] = {"split": self.split, "revision": self.revision, "streaming": True}
            for row in load_dataset(self.dataset, self.config, **options):
                yield str(row[self.column])
        except Exception as error:  # datasets has many kinds: no such name, no network, a config that has to be chosen
            reason = f"no column {self.column!r}" if isinstance(error, KeyError) else first_line(error)
            raise InputError(f"text {self.name}: cannot be read of dataset {self.dataset} ({reason})") from error


@dataclass(frozen=True)
class Entry:
    """A model as a study writes it, with all its revisions.

    Attributes:
        name: on huggingface.co, "mini", or a directory, relative to the study's file.
        revisions: of the Hub; of a directory, the directories in it. The model as it is, if left out.
        label: its name in jobs, titles and tables; the name, or the last part of a directory, if left out.
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

    def __post_init__(self) -> None:
        check_options(self, "models")
        if not self.name:
            raise InputError("models: name = '': give a name on the Hub, a directory, or mini")
        try:  # its name alone: of a cluster, another machine may have it
            torch.device("cpu" if self.device in (None, "auto") else self.device)
        except RuntimeError as error:
            raise InputError(f"models: device = {self.device!r}: torch knows no device of that name") from error

    def weights(self, folder: Path) -> "list[Weights]":
        """Return the model at every revision; paths are relative to the folder."""
        source = _located(self.name, folder)
        label = self.label or (Path(source).name if Path(source).is_absolute() else source)
        tokenizer = self.tokenizer and _located(self.tokenizer, folder)
        loading, at_revisions = (self.backend, self.dtype, self.device), []
        for revision in self.revisions or (None,):
            is_inside = revision is not None and Path(source).is_dir()
            place = str(Path(source, revision)) if is_inside and revision else source
            if Path(place).is_absolute() and not Path(place).exists():
                raise InputError(f"model {place}: no such directory")
            try:
                at = None if is_inside else revision
                pretrained = Pretrained(place, *loading, at, tokenizer, name=self.label or None)
            except PosgenError as error:
                raise InputError(f"model {source}: {error}") from error
            at_revisions.append(Weights(label, revision, pretrained))
        return at_revisions


@dataclass(frozen=True)
class Weights:
    """One model at one revision, which is loaded by the job that measures it."""

    label: str
    revision: str | None
    pretrained: Pretrained

    @property
    def name(self) -> str:
        return self.label + ("" if self.revision is None else f"@{self.revision}")

    @cached_property
    def identity(self) -> list[Any]:
        """Name and revision on the Hub, or the content of a directory; that of the tokenizer; how it is loaded."""
        pretrained = self.pretrained
        files = [place and digest_of(str(place)) for place in (pretrained.name_or_directory, pretrained.tokenizer)]
        return [*files, self.revision, pretrained.backend, str(pretrained.dtype), pretrained.device]


@dataclass(frozen=True)
class Study:
    """Models x texts x measures: every model is measured on every text with all measures, in one job.

    Attributes:
        name: of the study.
        models, texts, measures: models at their revisions, texts, and measures; those that they come after are added.
        length, n_prompts, consecutive, first, seed, nulls: as in `analyze`.
        drop_cache: delete a revision's files from the Hub's cache once its jobs are done.

    Example:
        >>> slash = {"name": "slash", "kappa": 0.2}
        >>> study = Study.read({"name": "two_lengths", "models": ["mini"], "measures": [slash]})
        >>> [job.name for job in study.jobs()]
        ['mini/bundled']
    """

    name: str
    models: Sequence[Weights]
    texts: Sequence[Text]
    measures: Sequence[Measure]
    length: Annotated[int, Within(2, words="a whole number, 2 or more")] = 512
    n_prompts: Count = 4
    consecutive: bool = False
    first: str | int | None = None
    seed: int = 0
    nulls: Nulls = 1
    drop_cache: bool = False

    def __post_init__(self) -> None:
        seeds_by_kind(self.nulls)
        check_options(self, "study")
        if not re.fullmatch(r"[\w-]+", self.name):
            raise InputError(f"study: name = {self.name!r}; give letters, digits, _ and -")
        registry.requested(self.measures)  # none twice
        check_seed(self.seed)
        known_as: set[Any] = set()
        for job in self.jobs():
            names = {job.name, job.place, job.file}
            if known_as & names:
                raise InputError(f"study: two jobs are called {job.name}; give a model a label, or a text a name")
            known_as |= names

    @classmethod
    def read(cls, study: "Study | Mapping[str, Any] | str | os.PathLike") -> "Study":
        """Return the study of a file, or of what such a file holds.

        Raises:
            InputError: no such file, no TOML, an entry that is unknown, missing or of another type, a directory that
                is not there, an unknown measure or option, two models, texts or jobs of one name.
        """
        if isinstance(study, Study):
            return study
        if isinstance(study, Mapping):
            return _parsed(study, Path.cwd())
        if not isinstance(study, str | os.PathLike):
            raise InputError(f"study {study!r}: give the path of a TOML file, or what such a file holds")
        path = Path(study)
        try:
            return _parsed(tomllib.loads(path.read_text(encoding="utf-8-sig")), path.resolve().parent)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise InputError(f"{path}: not TOML ({error})") from error
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a zero byte in the path
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"{path}: cannot be read ({reason}); give a study's file") from error

    def jobs(self) -> "list[Job]":
        """Return every job, those of one model at one revision one after the other."""
        return [Job(self, weights, text) for weights in self.models for text in self.texts]

    @property
    def cut(self) -> dict[str, Any]:
        """How its texts are cut into prompts, and its seeds, as `analyze` takes them."""
        cut = {name: getattr(self, name) for name in ("length", "n_prompts", "consecutive", "first", "seed")}
        return cut | {"nulls": seeds_by_kind(self.nulls) if isinstance(self.nulls, Mapping) else int(self.nulls)}

    @property
    def settings(self) -> dict[str, Any]:
        """All that every job depends on beside its model and text, JSON-ready; models and texts may be added."""
        measures = {measure.name: measure.options() for measure in registry.requested(self.measures)}
        code = {"code": self.code} if self.code else {}
        made_by = {"versions": versions(), "package": self.package}
        return {"study": self.name, "measures": measures, **code, **self.cut, **made_by}

    @cached_property
    def package(self) -> str:
        """The code of this package; it travels with the jobs."""
        return PACKAGE

    @cached_property
    def code(self) -> dict[str, str]:
        """The code of each measure that is not built in, see `code_of`; it travels with the jobs.

        Raises:
            InputError: it is not known, so that nothing tells whether a finished job is of the same.
        """
        codes = {measure.name: code_of(measure) for measure in registry.requested(self.measures)}
        if lacking := [name for name, code in codes.items() if code is None]:
            raise InputError(
                f"measures: the code of {lacking[0]} is in no file, or its file was changed after this process began; "
                "write it to a file, and start again"
            )
        return {name: str(code) for name, code in codes.items() if code}


@dataclass(frozen=True)
class Job:
    """One model at one revision on one text with all measures of a study; its file holds one Report."""

    study: Study
    weights: Weights
    text: Text

    @property
    def name(self) -> str:
        return f"{self.weights.name}/{self.text.name}"

    @property
    def place(self) -> tuple[str, str, str]:
        """The labels of its numbers among those of the study: model, revision, text."""
        return (self.weights.label, self.weights.revision or MAIN, self.text.name)

    @property
    def file(self) -> str:
        return f"{in_file_name(self.name)}.nc"

    @property
    def identity(self) -> list[Any]:
        """The content of what it measures: a finished job of another content is not taken for it."""
        return [self.weights.identity, self.text.identity]


def digest_of(name: str) -> str:
    """Return a digest of the files (or the file) that make a model or tokenizer: they may change under one path. What
    is no path is its own digest.

    Example:
        >>> digest_of("EleutherAI/pythia-70m")
        'EleutherAI/pythia-70m'
    """
    path = Path(name)
    if not path.is_absolute() and not path.is_dir():
        return name
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        if file.is_file() and file.suffix in _IDENTITY:
            digest.update(f"{file.name} {file.stat().st_size} ".encode())
            with file.open("rb") as opened:
                while part := opened.read(2**20):
                    digest.update(part)
    return digest.hexdigest()


def _parsed(written: Mapping[str, Any], folder: Path) -> Study:
    """Return the study that a file in this folder holds."""
    lists = {
        key: written.get(key, usual) for key, usual in (("models", None), ("texts", [BUNDLED]), ("measures", MEASURES))
    }
    for key, entries in lists.items():
        if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
            raise InputError(f"study: {key} = {entries!r}; give a list with one entry at least")
    models = [weights for entry in lists["models"] for weights in _entry_from(Entry, entry, "models").weights(folder)]
    texts = [_entry_from(Text, entry, "texts", "path") for entry in lists["texts"]]
    places = {
        text.path: BUNDLED if text.path == BUNDLED else str(folder / _located(text.path, folder)) for text in texts
    }
    texts = [replace(text, path=places[text.path]) if text.path else text for text in texts]  # no name of anything else
    measures = []
    for entry in lists["measures"]:
        table = {"name": entry} if isinstance(entry, str) else entry
        if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
            raise InputError(f"measures: {entry!r}; give a name, or a table with a name and options")
        options = {key: value for key, value in table.items() if key != "name"}
        measures.append(registry.measure_from(table["name"], options))
    parsed = {"models": models, "texts": texts, "measures": measures}
    return _entry_from(Study, {**written, **parsed}, "study")


def _entry_from(kind: type[_Made], written: Any, where: str, short: str = "name") -> _Made:
    """Return an entry of a list: of a table of its fields, or of one word for the field `short`."""
    written = {short: written} if isinstance(written, str) else written
    if not isinstance(written, Mapping):
        raise InputError(f"{where}: {written!r}; give a word or a table")
    return with_options(kind, written, where)


def _located(name: str, folder: Path) -> str:
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
