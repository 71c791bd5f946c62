"""Files: written whole or not at all, NetCDF4 with a checksum, values as JSON can hold them."""

import hashlib
import io
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import h5netcdf
import numpy as np
import xarray as xr
from torch import Tensor
from xarray.backends import H5NetCDFStore

from tl_posgen.errors import InputError, OutputError, PosgenError

FORMAT = 4  # of saved results; raised when this version can no longer read them as they were
_PARTIAL = ".partial-"  # prefix of directories for unfinished files
_REPORT = ("index.html", "results.nc", "summary.json")  # the files of a report
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_TRAILER = re.compile(rb"\ntl_posgen sha256 ([0-9a-f]{64})\n")
_LARGE = 2**16  # numbers of an array: from more on it is stored in float32
_SINGLE = "float32, to seven digits; float64 where tl_posgen loads it"
_TRAILER_SIZE = len("\ntl_posgen sha256 \n") + 64
_AS_JSON = "tl_posgen json "  # before a string that HDF5 cannot hold, written as JSON
_UNHELD = re.compile(f"[\0\ud800-\udfff]|^{_AS_JSON}")  # NUL, half of a surrogate pair, what would be read as JSON

# Writing


def write_whole(path: str | os.PathLike, data: bytes) -> Path:
    """Write a file into an existing directory, whole or not at all.

    Raises:
        OutputError: the place cannot be written, or the disk is full. An existing file stays as it was, also if the
            process is stopped.
    """
    path = as_path(path)
    with _output_errors(path):
        place = path.resolve()  # of a link, so that it stays one
        _replace(place.parent, {place.name: data})
    return path


def write_files(directory: str | os.PathLike, files: Mapping[str, bytes]) -> None:
    """Write files into a directory, each whole; make the directory if need be. Errors as in `write_whole`: where there
    is no room for all of them, none is replaced."""
    directory = as_path(directory)
    with _output_errors(directory):
        new_folders = [folder for folder in (directory, *directory.parents) if not folder.exists()]
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _replace(directory, files)
        except BaseException:
            with suppress(OSError):
                for folder in new_folders:
                    folder.rmdir()
            raise


def _replace(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write all files beside their places, as far as the disk itself, then rename each."""
    with tempfile.TemporaryDirectory(dir=directory, prefix=_PARTIAL) as new:
        places = {Path(new, str(n)): (directory / name).resolve() for n, name in enumerate(files)}
        for (unfinished, place), data in zip(places.items(), files.values(), strict=True):
            if place.exists() and not place.is_file():
                raise FileExistsError(f"{place} is there and is not a file")
            with unfinished.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # a full disk may report its error only then
        for unfinished, place in places.items():
            unfinished.replace(place)


def as_path(path: str | os.PathLike) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"{path!r}: give a path to write to")
    return Path(path)


def require_writable(directory: str | os.PathLike) -> Path:
    """Return the directory if it can be made and written; call it before long work. It leaves nothing behind."""
    directory = as_path(directory)
    with _output_errors(directory):
        there = next(folder for folder in (directory, *directory.parents) if folder.exists())
        with tempfile.TemporaryDirectory(dir=there, prefix=_PARTIAL) as scratch:
            (scratch / directory.relative_to(there)).mkdir(parents=True, exist_ok=True)
    return directory


def require_free(directory: str | os.PathLike, force: bool = False) -> None:
    """Refuse a directory that holds a report, unless it may be replaced.

    Raises:
        OutputError: one of the files of a report is there.
    """
    there = [name for name in _REPORT if not force and os.path.lexists(as_path(directory) / name)]
    if there:
        held = f"{directory}: holds another run's {there[0]}"
        raise OutputError(f"{held}; choose another place, or give force=True to replace it")


@contextmanager
def _output_errors(path: Path) -> Iterator[None]:
    """Turn every error of the system inside the block into an OutputError that names the path."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a zero byte in a path
        reason = getattr(error, "strerror", None) or str(error)
        raise OutputError(f"{path}: cannot write there ({reason}); choose another place") from error


# NetCDF4


def netcdf_bytes(groups: Mapping[str, xr.Dataset]) -> bytes:
    """Return a NetCDF4 file of these groups, followed by the SHA-256 of its bytes, which HDF5 ignores.

    HDF5's own checksums leave out strings and references: one flipped bit there can keep its reader busy for ever. Any
    program that reads NetCDF4 reads the file: xarray.open_datatree(path), ncdump.
    """
    memory = io.BytesIO()  # HDF5 that cannot finish writing to a full disk takes the process down
    with h5netcdf.File(memory, "w") as file:
        for group, dataset in groups.items():
            _with_strings(dataset, _held_string).dump_to_store(H5NetCDFStore(file, group=group, mode="a"))
    return memory.getvalue() + b"\ntl_posgen sha256 %s\n" % hashlib.sha256(memory.getvalue()).hexdigest().encode()


def _in_single(data: xr.Dataset) -> xr.Dataset:
    """Return the dataset with large arrays of float64 in float32, which halves its file and keeps seven digits, but for
    arrays with numbers beyond float32; their attribute `stored` says so, and `read_netcdf` makes them float64 again.
    """
    large = {name: array for name, array in data.data_vars.items() if array.dtype == np.float64 and array.size > _LARGE}
    with np.errstate(over="ignore"):
        short = {name: array.astype(np.float32) for name, array in large.items()}
    held = {name: array for name, array in short.items() if np.array_equal(np.isinf(array), np.isinf(large[name]))}
    return data.assign({name: array.assign_attrs(stored=_SINGLE) for name, array in held.items()})


def results_bytes(results: Mapping[str, tuple[xr.Dataset, Mapping[str, Any]]], provenance: Mapping[str, Any]) -> bytes:
    """Return results, dataset and provenance by name, as the bytes of one NetCDF4 file, a group each; large arrays in
    float32."""
    attributes = {"format": FORMAT, "order": json.dumps(list(results)), "provenance": json.dumps(dict(provenance))}
    groups = {"/": xr.Dataset(attrs=attributes)}
    for name, (dataset, of_result) in results.items():
        groups[name] = _in_single(dataset).assign_attrs(provenance=json.dumps(dict(of_result)))
    return netcdf_bytes(groups)


def read_netcdf(path: Path) -> dict[str, xr.Dataset]:
    """Return the groups of a file of `netcdf_bytes`, in memory, by name: "/" and "/<group>".

    Raises:
        InputError: the file is damaged, was changed, or is something else.
    """
    _require_undamaged(path)
    groups = xr.open_groups(path, engine="h5netcdf")
    try:
        return {name: _in_double(_with_strings(group.load(), _given_string)) for name, group in groups.items()}
    finally:
        for group in groups.values():
            group.close()


def _in_double(data: xr.Dataset) -> xr.Dataset:
    """Return the dataset with what `_in_single` shortened as float64."""
    short = {
        name: array.astype(np.float64) for name, array in data.data_vars.items() if array.attrs.get("stored") == _SINGLE
    }
    for array in short.values():
        del array.attrs["stored"]
    return data.assign(short)


def read_attributes(path: Path) -> dict[str, Any]:
    """Return the attributes of a file of `netcdf_bytes` without reading arrays; errors as in `read_netcdf`."""
    _require_undamaged(path)
    with h5netcdf.File(path, "r") as file:
        return {name: _changed_strings(value, _given_string) for name, value in file.attrs.items()}


def _require_undamaged(path: Path) -> None:
    """Refuse a file whose bytes have changed since it was written."""
    held = memoryview(path.read_bytes())
    if held[: len(_SIGNATURE)] != _SIGNATURE:
        raise InputError(f"{path}: not a results file; give a .nc file that .save() wrote")
    trailer = _TRAILER.fullmatch(held[-_TRAILER_SIZE:])
    if trailer is None:
        raise InputError(f"{path}: ends without its checksum: cut short or changed; copy it again, or measure anew")
    if hashlib.sha256(held[:-_TRAILER_SIZE]).hexdigest().encode() != trailer[1]:
        raise InputError(f"{path}: damaged, its checksum does not fit; copy it again, or measure anew")


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn every error of h5py, xarray, json or the system inside the block into an InputError that names the path."""
    try:
        yield
    except PosgenError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(f"{path}: cannot be read ({reason}); give a .nc file that .save() wrote") from error


def _held_string(text: str) -> str:
    """Return a string as HDF5 can hold it, which takes no NUL and no half of a surrogate pair.

    Example:
        >>> _held_string("a"), _held_string("a\\0"), _given_string(_held_string("a\\0")) == "a\\0"
        ('a', 'tl_posgen json "a\\\\u0000"', True)
    """
    return _AS_JSON + json.dumps(text) if _UNHELD.search(text) else text


def _given_string(text: str) -> str:
    """Return the string that `_held_string` was given."""
    return json.loads(text.removeprefix(_AS_JSON)) if text.startswith(_AS_JSON) else text


def _with_strings(data: xr.Dataset, change: Callable[[str], str]) -> xr.Dataset:
    """Return the dataset with every string in arrays, labels and attributes changed."""
    arrays = {
        name: xr.Variable(array.dims, _changed_strings(array.values, change), _changed_strings(array.attrs, change))
        for name, array in data.variables.items()
    }
    labels = {name: arrays.pop(name) for name in data.coords}
    return xr.Dataset(arrays, labels, _changed_strings(data.attrs, change))


def _changed_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return a string, or a collection of them, changed; anything else as it is."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _changed_strings(item, change) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_changed_strings(item, change) for item in value)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "OU":
        return value
    changed = [_changed_strings(item, change) for item in value.ravel().tolist()]
    if changed == value.ravel().tolist():
        return value
    # numpy's own strings lose a NUL at the end, pandas' objects refuse halves of pairs
    kind = str if any("\ud800" <= letter <= "\udfff" for item in changed for letter in str(item)) else object
    return np.array(changed, dtype=kind).reshape(value.shape)


# JSON


def jsonable(value: Any) -> Any:
    """Return a value as JSON can hold it: NaN and infinity, which JSON lacks, become null, arrays lists, others words.

    Example:
        >>> jsonable({"r": np.float32(0.5), "curve": np.array([1.0, np.nan]), 3: (True, None)})
        {'r': 0.5, 'curve': [1.0, None], '3': [True, None]}
    """
    if isinstance(value, np.generic | np.ndarray | Tensor):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    return [jsonable(item) for item in value] if isinstance(value, Sequence) else str(value)
