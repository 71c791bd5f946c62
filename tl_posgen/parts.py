"""Finished parts of long work, kept in a directory: a part is a function of its configuration, which names its file."""

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.errors import InputError, OutputError
from tl_posgen.files import as_path, require_writable, write_together
from tl_posgen.measure import Request
from tl_posgen.models.geometry.probe import Probed
from tl_posgen.models.model import Model
from tl_posgen.models.provenance import fingerprint, versions
from tl_posgen.models.wrapped import wrap
from tl_posgen.options import require
from tl_posgen.registry import BUILT_IN
from tl_posgen.result import Report, Result, load, results_bytes


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
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name)[-80:]


def write_part(path: Path, report: Report) -> None:
    """Write a finished part whole: nothing else says that it is finished.

    Raises:
        OutputError: it cannot be written.
    """
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

    Who makes it enters it: when the block is stopped it says what is kept.

    Args:
        directory: where they are kept; None for nowhere.

    Attributes:
        files: of the parts that this object has measured or taken up.
    """

    def __init__(self, directory: str | os.PathLike | None = None):
        self.directory = None if directory is None else require_writable(as_path(directory))
        self.files: list[Path] = []

    @classmethod
    def of(cls, keep: "str | os.PathLike | Parts | None") -> "AbstractContextManager[Parts]":
        """What was given as `keep`, to be entered: a directory anew, the parts of a caller as they are."""
        require("keep", keep, str | os.PathLike | Parts | None)
        return nullcontext(keep) if isinstance(keep, Parts) else cls(keep)

    def __enter__(self) -> "Parts":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and self.files:
            n = len(self.files)
            said = "1 part is finished and kept" if n == 1 else f"{n} parts are finished and kept"
            tqdm.write(f"{said} in {self.directory}; the same again goes on from there", file=sys.stderr)

    def report(self, name: str, configuration: Mapping[str, Any], make: Callable[[], Report]) -> Report:
        """The finished part of this configuration, or `make()`, kept if it can be written."""
        if self.directory is None:
            return make()
        path = part_path(self.directory, name.rstrip(")"), configuration)
        if path.is_file():
            found = read_part(path)
        else:
            found = make()
            try:
                write_part(path, found)
            except OutputError as error:
                tqdm.write(f"{name} is not kept: {error}", file=sys.stderr)
                return found
        self.files.append(path)
        return found

    def datasets(
        self,
        name: str,
        requests: Sequence[Request],
        configuration: Mapping[str, Any],
        make: Callable[[], Mapping[str, xr.Dataset]],
    ) -> dict[str, xr.Dataset]:
        """What these requests found of one model, by name: of a finished part, or `make()`.

        With a measure among them that is not built in nothing is kept, as nothing says when its code changes.
        """
        if any(request.name not in BUILT_IN for request in requests):
            return dict(make())
        asked = {request.name: request.as_dict() for request in requests}

        def report() -> Report:
            return Report({name: Result(name, one) for name, one in make().items()}, {})

        found = self.report(name, {**configuration, "measures": asked}, report)
        return {name: result.dataset for name, result in found.items()}

    def discard(self) -> None:
        """Delete them, and their directory if nothing else is in it."""
        with suppress(OSError):
            for path in self.files:
                path.unlink(missing_ok=True)
            if self.directory is not None and not any(self.directory.iterdir()):
                self.directory.rmdir()


def refuse_hooks(model: Any, given: Mapping[str, Any]) -> None:
    """Refuse hooks, given for a run or at the model's hook points: another run might take their numbers for its own.
    Hooks that torch alone knows are not seen, as a bridge has some of its own.

    Raises:
        InputError: there is a hook.
    """
    if given:
        raise InputError("keep: another run cannot know what fwd_hooks do; give one of them")
    if any(point.fwd_hooks for point in model.hook_dict.values()):
        raise InputError(
            "keep: another run cannot know what the hooks on this model do; remove them, or give keep=None"
        )


def configuration_of(model: Model, prompts: Any, **settings: Any) -> dict[str, Any]:
    """Everything that an analysis depends on beside its measures, by content and JSON-ready.

    Raises:
        InputError: prompts whose content nothing tells.
    """
    wrapped, weight = wrap(model), next(model.parameters())
    origin = wrapped.origin
    layers = [replace(one.geometry, error=None) for one in wrapped.found() if isinstance(one, Probed)]
    plain = {name: value for name, value in vars(model.cfg).items() if isinstance(value, str | bool | int | float)}
    config = Path(origin.directory or "", "config.json")  # which random inits are made by
    return {
        "weights": fingerprint(model),
        "layers": content(layers),
        "cfg": {name: value for name, value in plain.items() if name not in ("model_name", "device", "seed")},
        "config": config.read_text(encoding="utf-8") if origin.directory and config.is_file() else None,
        "initialisation": origin.initialisation,
        "tokenizer": tokenizer_digest(model),
        "backend": origin.backend,
        "dtype": str(weight.dtype),
        "device": weight.device.type,
        "prompts": content(prompts),
        **{name: content(value) for name, value in settings.items()},
    }


def tokenizer_digest(model: Model) -> str | None:
    """Of all that its tokenizer does, where there is one; of a slow tokenizer, of its vocabulary."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        return None
    fast = getattr(tokenizer, "backend_tokenizer", None)
    told = json.dumps(sorted(tokenizer.get_vocab().items())) if fast is None else fast.to_str()
    return hashlib.sha256(told.encode()).hexdigest()


def content(value: Any) -> Any:
    """A value by its content, JSON-ready; of an array its dtype, shape and digest.

    Example:
        >>> content(((1, 2.0), {"text": "tea"}))
        [[1, 2.0], {'text': 'tea'}]
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Tensor):
        value = (value.float() if value.dtype == torch.bfloat16 else value).detach().cpu().numpy()
    if isinstance(value, xr.Dataset):
        return {str(name): content(array.values) for name, array in sorted(value.variables.items())}
    if isinstance(value, np.ndarray | np.generic):
        is_text = value.dtype.kind in "OU"  # a file gives back the one for the other
        held = json.dumps(value.tolist()).encode() if is_text else value.tobytes()
        kind = "text" if is_text else str(value.dtype)
        return [kind, list(value.shape), hashlib.sha256(held).hexdigest()]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: content(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): content(one) for name, one in value.items()}
    if isinstance(value, Sequence):
        return [content(one) for one in value]
    raise InputError(f"keep: what a {type(value).__name__} holds cannot be told; give texts or token ids")
