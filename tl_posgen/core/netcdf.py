"""NetCDF4 files with a checksum: a file whose bytes have changed is refused before it is parsed."""

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5netcdf
import numpy as np
import xarray as xr
from xarray.backends import H5NetCDFStore

from tl_posgen.errors import InputError, PosgenError

SIGNATURE = b"\x89HDF\r\n\x1a\n"
TRAILER = re.compile(rb"\ntl_posgen sha256 ([0-9a-f]{64})\n")
TRAILER_SIZE = len("\ntl_posgen sha256 \n") + 64
AS_JSON = "tl_posgen json "  # before a string that HDF5 cannot hold, written as JSON
UNHELD = re.compile(f"[\0\ud800-\udfff]|^{AS_JSON}")  # NUL, half of a surrogate pair, what would be read as JSON


def netcdf_bytes(groups: Mapping[str, xr.Dataset]) -> bytes:
    """Return a NetCDF4 file of these groups, followed by the SHA-256 of its bytes, which HDF5 ignores.

    Any program that reads NetCDF4 reads it: xarray.open_datatree(path), ncdump.
    """
    memory = io.BytesIO()  # HDF5 that cannot finish writing to a full disk takes the process down
    with h5netcdf.File(memory, "w") as file:
        for group, dataset in groups.items():
            with_strings(dataset, held_string).dump_to_store(H5NetCDFStore(file, group=group, mode="a"))
    digest = hashlib.sha256(memory.getvalue()).hexdigest()
    memory.seek(0, io.SEEK_END)
    memory.write(b"\ntl_posgen sha256 %s\n" % digest.encode())
    return memory.getvalue()


def read_netcdf(path: Path) -> dict[str, xr.Dataset]:
    """Return the groups of a file of `netcdf_bytes`, in memory, by name: "/" and "/<group>".

    Raises:
        InputError: the file is damaged, was changed, or is something else.
    """
    require_undamaged(path)
    groups = xr.open_groups(path, engine="h5netcdf")
    try:
        return {name: with_strings(group.load(), given_string) for name, group in groups.items()}
    finally:
        for group in groups.values():
            group.close()


def read_attributes(path: Path) -> dict[str, Any]:
    """Return the attributes of a file of `netcdf_bytes` without reading arrays; errors as in `read_netcdf`."""
    require_undamaged(path)
    with h5netcdf.File(path, "r") as file:
        return {name: changed_strings(value, given_string) for name, value in file.attrs.items()}


def held_string(text: str) -> str:
    """Return a string as HDF5 can hold it, which takes no NUL and no half of a surrogate pair.

    Example:
        >>> held_string("a"), held_string("a\\0"), given_string(held_string("a\\0")) == "a\\0"
        ('a', 'tl_posgen json "a\\\\u0000"', True)
    """
    return AS_JSON + json.dumps(text) if UNHELD.search(text) else text


def given_string(text: str) -> str:
    """Return the string that `held_string` was given."""
    return json.loads(text.removeprefix(AS_JSON)) if text.startswith(AS_JSON) else text


def with_strings(data: xr.Dataset, change: Callable[[str], str]) -> xr.Dataset:
    """Return the dataset with every string in arrays, labels and attributes changed; itself where none changes."""
    arrays: dict[Any, xr.Variable] = {}
    for name, array in data.variables.items():
        before = array.values
        values, attrs = changed_strings(before, change), changed_strings(array.attrs, change)
        if values is not before or str(attrs) != str(array.attrs):
            arrays[name] = xr.Variable(array.dims, values, attrs)
    labels = {name: arrays.pop(name) for name in list(arrays) if name in data.coords}
    return data.assign(arrays).assign_coords(labels).assign_attrs(changed_strings(data.attrs, change))


def changed_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return a string, or a collection of them, changed; anything else as it is."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: changed_strings(one, change) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(changed_strings(one, change) for one in value)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "OU":
        return value
    found = [changed_strings(one, change) for one in value.ravel().tolist()]
    if found == value.ravel().tolist():
        return value
    # numpy's own strings lose a NUL at the end, pandas' objects refuse halves of pairs
    kind = str if any("\ud800" <= letter <= "\udfff" for one in found for letter in str(one)) else object
    return np.array(found, dtype=kind).reshape(value.shape)


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


def require_undamaged(path: Path) -> None:
    """Refuse a file whose bytes have changed since it was written."""
    size, digest = path.stat().st_size - TRAILER_SIZE, hashlib.sha256()
    with path.open("rb") as file:
        if file.read(len(SIGNATURE)) != SIGNATURE:
            raise InputError(f"{path}: not a results file; give a .nc file that .save() wrote")
        file.seek(max(size, 0))
        trailer = TRAILER.fullmatch(file.read())
        if trailer is None:
            raise InputError(
                f"{path}: ends without its checksum: cut short, changed, or saved before version 0.2; measure anew"
            )
        file.seek(0)
        while part := file.read(min(size, 2**20)):
            digest.update(part)
            size -= len(part)
    if digest.hexdigest().encode() != trailer[1]:
        raise InputError(f"{path}: damaged, its checksum does not fit; copy it again, or measure anew")
