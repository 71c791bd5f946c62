"""The texts of a study: files, directories of files, and what `datasets` reads."""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tl_posgen.errors import InputError
from tl_posgen.models.tokens import bundled_text, read_text

BUNDLED = "bundled"


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
    characters: int = 2_000_000
    name: str = ""

    def __post_init__(self) -> None:
        if bool(self.path) == bool(self.dataset):
            raise InputError(f"text {self.name or self.path!r}: give either a path or a dataset")
        if self.characters < 1:
            raise InputError(f"text {self.path or self.dataset}: characters = {self.characters}; give 1 or more")
        if not self.name:
            object.__setattr__(self, "name", Path(self.path or self.dataset).stem)

    @cached_property
    def words(self) -> str:
        """The text itself, read once; it travels with the jobs, so that no worker reads it again.

        Raises:
            InputError: it is not there, not UTF-8, or empty; `datasets` is not installed, or cannot read it.
        """
        parts, missing = [], self.characters
        for part in rows_of(self) if self.dataset else files_of(self.path):
            parts.append(part[:missing])
            missing -= len(part) + 2
            if missing <= 0:
                break
        if not "".join(parts).strip():
            raise InputError(f"text {self.name}: empty")
        return "\n\n".join(parts)

    @property
    def identity(self) -> Any:
        """The part of a job's name: a digest of the words, or the dataset that they are of."""
        if not self.dataset:
            return hashlib.sha256(self.words.encode()).hexdigest()
        return {key: value for key, value in asdict(self).items() if key not in ("path", "name")}


def files_of(path: str) -> Iterator[str]:
    """Yield the one file, or every file of a directory that is not hidden."""
    if path == BUNDLED:
        yield bundled_text()
    elif Path(path).is_dir():
        for file in sorted(Path(path).rglob("*")):
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts):
                yield read_text(file)
    else:
        yield read_text(path)


def rows_of(text: Text) -> Iterator[str]:
    """Yield the rows of a dataset."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise InputError(f"text {text.name}: datasets is not installed; pip install datasets") from error
    try:
        rows = load_dataset(text.dataset, text.config, split=text.split, revision=text.revision, streaming=True)
        for row in rows:
            yield str(row[text.column])
    except KeyError:
        raise InputError(f"text {text.name}: {text.dataset} has no column {text.column!r}; give column = ...") from None
    except Exception as error:  # datasets has many kinds: no such name, no network, a config that has to be chosen
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise InputError(f"text {text.name}: datasets cannot read {text.dataset} ({reason})") from error
