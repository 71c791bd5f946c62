"""Files written whole or not at all: a failed run leaves the files that were there before."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tl_posgen.errors import InputError, OutputError

PARTIAL = ".partial-"  # prefix of directories for unfinished files
REPORT = ("index.html", "results.nc", "summary.json")  # the files of a report


def write_whole(path: str | os.PathLike, data: bytes) -> Path:
    """Write a file into an existing directory, whole or not at all.

    Raises:
        OutputError: the place cannot be written, or the disk is full. An existing file stays as it was, also if the
            process is stopped.
    """
    path = as_path(path)
    with output_errors(path), partial_directory((path := link_target(path)).parent) as unfinished:
        require_replaceable(path)
        write_through(unfinished / "new", data)
        (unfinished / "new").replace(path)
    return path


def write_together(directory: str | os.PathLike, files: Mapping[str, bytes]) -> None:
    """Write files into a directory, all of them or none; make the directory if need be. Errors as in `write_whole`.

    After an error, or a signal that can be caught, all files are as they were. After kill -9 or a power cut between two
    renames each file is whole, but some may be new and others old; on a disk without hard links one file may be
    missing, and is found in the directory `.partial-*` that is left.
    """
    directory = as_path(directory)
    with output_errors(directory), made_directory(directory) as unfinished:
        new, old = unfinished / "new", unfinished / "old"
        new.mkdir()
        old.mkdir()
        places = {name: link_target(directory / name) for name in files}
        for name, data in files.items():
            require_replaceable(places[name])
            write_through(new / name, data)
        try:
            for name, place in places.items():
                if place.exists():
                    keep_copy(place, old / name)
                (new / name).replace(place)
        except BaseException:
            for name, place in places.items():
                if (old / name).exists():
                    (old / name).replace(place)
                elif not (new / name).exists():
                    place.unlink(missing_ok=True)
            raise


def keep_copy(path: Path, kept: Path) -> None:
    """Give a file a second name, or move it there on a disk without hard links."""
    try:
        os.link(path, kept)
    except OSError:
        path.replace(kept)


def as_path(path: str | os.PathLike) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"{path!r}: give a path to write to")
    return Path(path)


def link_target(path: Path) -> Path:
    """Return the path of the file itself: links are followed, so that they stay links."""
    return path.resolve() if path.is_symlink() else path


@contextmanager
def partial_directory(directory: Path) -> Iterator[Path]:
    """Make a directory for unfinished files on the same disk, and remove it afterwards."""
    with tempfile.TemporaryDirectory(dir=directory, prefix=PARTIAL) as unfinished:
        yield Path(unfinished)


def require_replaceable(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is there and is not a file")


def write_through(path: Path, data: bytes) -> None:
    """Write a file as far as the disk itself, since a full disk may report its error only then."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def require_writable(directory: str | os.PathLike) -> Path:
    """Return the directory if it can be made and written; call it before long work. It leaves nothing behind."""
    directory = as_path(directory)
    with output_errors(directory), made_directory(directory):
        pass
    return directory


def require_free(directory: str | os.PathLike, force: bool = False) -> None:
    """Refuse a directory that holds a report, unless it may be replaced.

    Raises:
        OutputError: one of the files of a report is there.
    """
    there = [name for name in REPORT if not force and os.path.lexists(as_path(directory) / name)]
    if there:
        held = f"{directory}: holds another run's {there[0]}"
        raise OutputError(f"{held}; choose another place, or give force=True to replace it")


@contextmanager
def made_directory(directory: Path) -> Iterator[Path]:
    """Make a directory with its parents, and a `partial_directory` inside; remove new empty ones afterwards."""
    missing = [one for one in (directory, *directory.parents) if not one.exists()]
    try:
        with make_and_begin(directory) as unfinished:
            yield Path(unfinished)
    finally:
        for one in missing:
            with suppress(OSError):  # not empty, or not made
                one.rmdir()


def make_and_begin(directory: Path, tries: int = 20) -> tempfile.TemporaryDirectory:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=directory, prefix=PARTIAL)
    except FileNotFoundError:  # another process made it too, and removed it again as it was empty
        if not tries:
            raise
        return make_and_begin(directory, tries - 1)


@contextmanager
def output_errors(path: Path) -> Iterator[None]:
    """Turn every error of the system inside the block into an OutputError that names the path."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a zero byte in a path
        reason = getattr(error, "strerror", None) or str(error)
        raise OutputError(f"{path}: cannot write there ({reason}); choose another place") from error
