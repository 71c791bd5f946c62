"""Files are written whole or not at all: what a failed run leaves is what was there before."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tl_posgen.errors import InputError, OutputError

PARTIAL = ".partial-"  # directories of what is not yet whole
REPORT = ("index.html", "results.nc", "summary.json")  # the files of a report


def write_whole(path: str | os.PathLike, data: bytes) -> Path:
    """Write a file into a directory that is there.

    Raises:
        OutputError: the place cannot be written, or the disk is full. What was there stays, as it does when stopped.
    """
    path = as_path(path)
    with refused(path), partial((path := final(path)).parent) as beside:
        require_replaceable(path)
        write_through(beside / "new", data)
        (beside / "new").replace(path)
    return path


def write_together(directory: str | os.PathLike, files: Mapping[str, bytes]) -> None:
    """Write files into a directory, made if need be: all of them or none; errors as in `write_whole`.

    Stopped by a signal that can be caught, or by any error, all are what they were. After kill -9 or a power cut each
    file is whole, but some may be new and others still old, if it came between two renames (of a disk without hard
    links: one of them may be missing, and lies in the directory `.partial-*` that is left).
    """
    directory = as_path(directory)
    with refused(directory), made(directory) as beside:
        new, old = beside / "new", beside / "old"
        new.mkdir()
        old.mkdir()
        places = {name: final(directory / name) for name in files}
        for name, data in files.items():
            require_replaceable(places[name])
            write_through(new / name, data)
        try:
            for name, place in places.items():
                if place.exists():
                    keep(place, old / name)
                (new / name).replace(place)
        except BaseException:
            for name, place in places.items():
                if (old / name).exists():
                    (old / name).replace(place)
                elif not (new / name).exists():
                    place.unlink(missing_ok=True)
            raise


def keep(path: Path, kept: Path) -> None:
    """A file under a second name, too; moved there where the disk knows no hard links."""
    try:
        os.link(path, kept)
    except OSError:
        path.replace(kept)


def as_path(path: str | os.PathLike) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"{path!r}: give a path to write to")
    return Path(path)


def final(path: Path) -> Path:
    """Where a file stands that is written: behind a link, which stays as it is."""
    return path.resolve() if path.is_symlink() else path


@contextmanager
def partial(directory: Path) -> Iterator[Path]:
    """A directory for what is not yet whole, on the same disk."""
    with tempfile.TemporaryDirectory(dir=directory, prefix=PARTIAL) as beside:
        yield Path(beside)


def require_replaceable(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is there and is not a file")


def write_through(path: Path, data: bytes) -> None:
    """Write a file as far as the disk itself: a full one may say so only then."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def require_writable(directory: str | os.PathLike) -> Path:
    """The directory, once it is known that it can be made and written; called before long work, it leaves nothing."""
    directory = as_path(directory)
    with refused(directory), made(directory):
        pass
    return directory


def require_free(directory: str | os.PathLike, force: bool = False) -> None:
    """Refuse a directory that holds a report, unless it may be replaced.

    Raises:
        OutputError: one of its files is there.
    """
    there = [name for name in REPORT if not force and os.path.lexists(as_path(directory) / name)]
    if there:
        held = f"{directory}: holds another run's {there[0]}"
        raise OutputError(f"{held}; choose another place, or give force=True to replace it")


@contextmanager
def made(directory: Path) -> Iterator[Path]:
    """`partial` of a directory that is made if need be, with its parents; those that are empty afterwards go again."""
    missing = [one for one in (directory, *directory.parents) if not one.exists()]
    try:
        with begun(directory) as beside:
            yield Path(beside)
    finally:
        for one in missing:
            with suppress(OSError):  # not empty, or not made
                one.rmdir()


def begun(directory: Path, tries: int = 20) -> tempfile.TemporaryDirectory:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=directory, prefix=PARTIAL)
    except FileNotFoundError:  # another process made it too, and removed it again as it was empty
        if not tries:
            raise
        return begun(directory, tries - 1)


@contextmanager
def refused(path: Path) -> Iterator[None]:
    """Whatever the system says, as an OutputError that names the path."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a zero byte in a path
        reason = getattr(error, "strerror", None) or str(error)
        raise OutputError(f"{path}: cannot write there ({reason}); choose another place") from error
