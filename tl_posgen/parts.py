"""Finished parts of long work, kept in a directory: a part is a function of its configuration, which names its file."""

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import xarray as xr
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.errors import InputError, OutputError
from tl_posgen.files import as_path, require_writable, write_together
from tl_posgen.measure import Request
from tl_posgen.models.model import Model
from tl_posgen.models.probe_layers import Probed
from tl_posgen.models.provenance import fingerprint
from tl_posgen.models.wrapped import wrap
from tl_posgen.registry import BUILT_IN
from tl_posgen.result import Report, Result, load, results_bytes

PACKAGES = ("tl-posgen", "transformer-lens", "torch", "transformers")


@cache
def versions() -> dict[str, str]:
    """What a result may depend on beside its configuration."""
    return {name: version(name) for name in PACKAGES}


def key_of(configuration: Mapping[str, Any]) -> str:
    """Sixteen letters of this configuration and these versions.

    Example:
        >>> key_of({"length": 8, "seed": 0}) == key_of({"seed": 0, "length": 8}) != key_of({"seed": 1, "length": 8})
        True
    """
    told = json.dumps({**configuration, "versions": versions()}, sort_keys=True, default=str)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def part_path(directory: Path, name: str, configuration: Mapping[str, Any]) -> Path:
    """Where a part's file is: a readable name, and the key that decides."""
    return Path(directory) / f"{in_file_name(name)}-{key_of(configuration)}.nc"


def in_file_name(name: str) -> str:
    """What a file's name shows of it."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name)[-80:].strip("-")


def kept(directory: Path, name: str, configuration: Mapping[str, Any], make: Callable[[], Report]) -> Report:
    """A finished part, or `make()` written whole: nothing else says that it is finished.

    Raises:
        InputError: the finished part is damaged; the message names its file.
        OutputError: it cannot be written.
    """
    path = part_path(directory, name, configuration)
    finish(path, make)
    return read_part(path)


def finish(path: Path, make: Callable[[], Report]) -> None:
    """Write what `make` gives, where it is not there yet."""
    if not path.is_file():
        report = make()
        write_together(path.parent, {path.name: results_bytes(report, report.provenance)})


def read_part(path: Path, read: Callable[[Path], Any] = load) -> Any:
    """A finished part's Report, or what else is read of it."""
    try:
        return read(path)
    except (InputError, KeyError, ValueError) as error:
        raise InputError(
            f"{path}: this finished part is damaged ({error}); delete the file, and it is measured again"
        ) from error


class Parts:
    """The finished parts of analyses: what each measured of one model, the random inits too. A stopped analysis takes
    up those of the one before.

    Args:
        directory: where they are kept; None for nowhere.

    Attributes:
        files: of the parts that this object has measured or taken up.
    """

    def __init__(self, directory: str | os.PathLike | None = None):
        self.directory = None if directory is None else require_writable(as_path(directory))
        self.files: list[Path] = []
        self.said = False

    def __enter__(self) -> "Parts":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and self.files and not self.said:
            self.said, n = True, len(self.files)
            said = "1 part is finished and kept" if n == 1 else f"{n} parts are finished and kept"
            tqdm.write(f"{said} in {self.directory}; the same again goes on from there", file=sys.stderr)

    def datasets(
        self,
        name: str,
        requests: Sequence[Request],
        configuration: Mapping[str, Any],
        make: Callable[[], Mapping[str, xr.Dataset]],
    ) -> dict[str, xr.Dataset]:
        """What these requests found of one model, by name: of a finished part, or `make()`.

        A part with a measure that is not built in is never kept, as nothing says when its code changes. One that cannot
        be written is said to be lost if the analysis is stopped, which goes on.
        """
        if self.directory is None or any(request.name not in BUILT_IN for request in requests):
            return dict(make())
        asked = {request.name: request.as_dict() for request in requests}
        path = part_path(self.directory, name, {**configuration, "measures": asked})
        if path.is_file():
            found = {name: result.dataset for name, result in read_part(path).items()}
        else:
            found = dict(make())
            report = Report({name: Result(name, one) for name, one in found.items()}, {})
            try:
                write_together(path.parent, {path.name: results_bytes(report, {})})
            except OutputError as error:
                tqdm.write(f"{name} is not kept: {error}", file=sys.stderr)
                return found
        self.files.append(path)
        return found

    def discard(self) -> None:
        """Delete them, and their directory if nothing else is in it."""
        for path in self.files:
            path.unlink(missing_ok=True)
        if self.directory is not None and self.directory.is_dir() and not any(self.directory.iterdir()):
            self.directory.rmdir()


def configuration_of(model: Model, prompts: Any, **settings: Any) -> dict[str, Any]:
    """Everything that an analysis depends on beside its measures, by content and JSON-ready.

    Raises:
        InputError: hooks on the model, or prompts whose content nothing tells: another run might take them for these.
    """
    if any(point.fwd_hooks for point in model.hook_dict.values()):
        raise InputError("keep: another run cannot know what the hooks on this model do; remove them, or keep nothing")
    layers = [layer.geometry for layer in wrap(model).found() if isinstance(layer, Probed)]
    return {
        "weights": fingerprint(model),
        "layers": content([replace(layer, error=None) for layer in layers]),
        "backend": wrap(model).origin.backend,
        "dtype": str(model.cfg.dtype),
        "device": next(model.parameters()).device.type,
        "prompts": content(prompts),
        **{name: content(value) for name, value in settings.items()},
    }


def content(value: Any) -> Any:
    """A value by its content, JSON-ready; of an array its dtype, shape and digest.

    Example:
        >>> content(((1, 2.0), {"text": "tea"}))
        [[1, 2.0], {'text': 'tea'}]
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray | np.generic):
        return [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: content(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): content(one) for name, one in value.items()}
    if isinstance(value, Sequence):
        return [content(one) for one in value]
    raise InputError(f"keep: what a {type(value).__name__} holds cannot be told; give texts or token ids")
