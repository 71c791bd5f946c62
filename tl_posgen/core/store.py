"""Finished parts of long work: files, each found again by what it depends on; and finished results that an analysis
takes up: what they must have in common with it."""

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from shutil import rmtree
from time import perf_counter, time
from types import TracebackType
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.core.files import as_path, netcdf_bytes, read_netcdf, require_writable, write_files
from tl_posgen.core.formatting import counted
from tl_posgen.core.measure import Measure
from tl_posgen.core.options import require
from tl_posgen.core.registry import BUILT_IN
from tl_posgen.core.report import Report
from tl_posgen.core.result import Result
from tl_posgen.core.saved import load
from tl_posgen.errors import InputError, OutputError
from tl_posgen.models.geometry.probe import Probed
from tl_posgen.models.provenance import fingerprint, versions
from tl_posgen.models.session import Session

_STARTED = time()
_OURS = Measure.__module__.partition(".")[0]
WORTH_KEEPING = 0.2  # seconds that a condition must have taken to be kept


def key_of(configuration: Mapping[str, Any]) -> str:
    """Return sixteen letters of this configuration, these versions and this package's code.

    Example:
        >>> key_of({"length": 8, "seed": 0}) == key_of({"seed": 0, "length": 8}) != key_of({"seed": 1, "length": 8})
        True
    """
    text = json.dumps({**configuration, "versions": versions(), "package": PACKAGE}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def part_path(directory: Path, name: str, configuration: Mapping[str, Any]) -> Path:
    """Return the path of a part's file: a readable name, and the key by which it is found."""
    return Path(directory) / f"{in_file_name(name)}-{key_of(configuration)}.nc"


def in_file_name(name: str) -> str:
    """Return what a file's name shows of a part's name."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name)[-80:]


def read_part(path: Path, reader: Callable[[Path], Any] = load) -> Any:
    """Return the Report of a finished part, or what else is read of it; InputError of a damaged one."""
    try:
        return reader(path)
    except (InputError, KeyError, ValueError) as error:
        raise InputError(
            f"{path}: this finished part is damaged ({error}); delete the file, and it is measured again"
        ) from error


def code_of(measure: Measure) -> str | None:
    """Return sixteen letters of the source of a measure that is not built in: all Python files of the packages that its
    classes are of, or their files where these are in none. "" for a built-in one, see `PACKAGE`.

    None where that is not to be had: a class of a notebook, or a file that was changed after this process began, so
    that other code may be at work. What these files import from elsewhere is not looked at.
    """
    if measure.name in BUILT_IN:
        return ""
    tops = {kind.__module__.partition(".")[0] for kind in type(measure).__mro__}
    files = [file for top in sorted(tops - {_OURS} - sys.stdlib_module_names) for file in _files_of(top)]
    is_known = all(file.is_file() and file.stat().st_mtime < _STARTED for file in files)
    return _digest_of(files) if is_known else None


def _files_of(top: str) -> list[Path]:
    """Return the Python files of a package, or the file of a module, which may not be there."""
    module = sys.modules.get(top)
    name, folders = getattr(module, "__file__", None), getattr(module, "__path__", ())
    return [file for folder in folders for file in sorted(Path(folder).rglob("*.py"))] or [Path(name or "")]


def _digest_of(files: Sequence[Path]) -> str:
    """Return sixteen letters of the names and the content of files."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


PACKAGE = _digest_of([file for file in _files_of(_OURS) if file.is_file()])  # this package's source, as it is imported


def _with_measures(configuration: Mapping[str, Any], measures: Sequence[Measure]) -> dict[str, Any] | None:
    """Return a configuration with options and code of measures; None where the code of one is not known."""
    codes = {measure.name: code_of(measure) for measure in measures}
    if None in codes.values():
        return None
    return {**configuration, "measures": {measure.name: measure.options() for measure in measures}, "code": codes}


class Parts:
    """The finished parts of analyses, from which a stopped one goes on: datasets of one model or random init each; of a
    measure that is not finished, the conditions that are.

    Its maker enters it: when the block is stopped it prints what is kept.

    Attributes:
        directory: where they are kept; None for nowhere.
        files: of the parts that this object has measured or read.
        folders: of the conditions of parts that are not finished.
    """

    def __init__(self, directory: str | os.PathLike | None = None):
        self.directory = None if directory is None else require_writable(as_path(directory))
        self.files: list[Path] = []
        self.folders: list[Path] = []

    @classmethod
    def kept_in(cls, keep: "str | os.PathLike | Parts | None") -> "AbstractContextManager[Parts]":
        """Return the argument `keep` as a context manager: a new one of a directory, a caller's own as it is."""
        require("keep", keep, str | os.PathLike | Parts | None)
        return nullcontext(keep) if isinstance(keep, Parts) else cls(keep)

    def __enter__(self) -> "Parts":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        n, m = len(self.files), sum(1 for folder in self.folders for _ in folder.glob("*.nc"))
        if error is not None and n + m:
            counts = [counted(n, "part")] if n else []
            counts += [counted(m, "condition") + (" of the next" if n else "")] if m else []
            kept_parts = f"{' and '.join(counts)} {'is' if n + m == 1 else 'are'} finished and kept"
            tqdm.write(f"{kept_parts} in {self.directory}; the same again goes on from there", file=sys.stderr)

    def report(self, name: str, configuration: Mapping[str, Any], make: Callable[[], Report]) -> Report:
        """Return the finished Report of this configuration, or `make()`, kept if it can be written."""
        return self._kept(name, configuration, make, lambda report: report.as_bytes(), load)

    def datasets(
        self,
        name: str,
        measures: Sequence[Measure],
        configuration: Mapping[str, Any],
        make: Callable[[], Mapping[str, xr.Dataset]],
    ) -> dict[str, xr.Dataset]:
        """Return the datasets of these measures for one model, by name: of a finished part, or `make()`.

        With a measure among them whose code is not known (see `code_of`) nothing is kept.
        """
        depends_on = None if self.directory is None else _with_measures(configuration, measures)
        if depends_on is None:
            return dict(make())
        return self._kept(name, depends_on, make, netcdf_bytes, read_datasets)

    def _kept(
        self,
        name: str,
        configuration: Mapping[str, Any],
        make: Callable[[], Any],
        to_bytes: Callable[[Any], bytes],
        reader: Callable[[Path], Any],
    ) -> Any:
        if self.directory is None:
            return make()
        path = part_path(self.directory, name.rstrip(")"), configuration)
        if path.is_file():
            part = read_part(path, reader)
        else:
            part = make()
            try:
                write_files(path.parent, {path.name: to_bytes(part)})
            except OutputError as error:
                tqdm.write(f"{name} is not kept: {error}", file=sys.stderr)
                return part
        folder = path.with_suffix("")  # of its finished conditions
        self.files.append(path)
        rmtree(folder, ignore_errors=True)
        self.folders = [unfinished for unfinished in self.folders if unfinished != folder]
        return part

    def condition(
        self,
        name: str,
        measure: Measure,
        configuration: Mapping[str, Any],
        at: Mapping[str, Any],
        make: Callable[[], xr.Dataset],
    ) -> xr.Dataset:
        """Return what a measure found under one condition, at these labels: finished before, or `make()`, which is kept
        until the part that `datasets` gives is finished, if it took WORTH_KEEPING seconds."""
        depends_on = _with_measures(configuration, [measure]) if self.directory is not None else None
        if self.directory is None or depends_on is None:
            return make()
        folder = part_path(self.directory, name.rstrip(")"), depends_on).with_suffix("")
        path = part_path(folder, " ".join(map(str, at.values())), {"at": content(at)})
        if path.is_file():
            return read_part(path, read_datasets)["condition"]
        began, dataset = perf_counter(), make()
        if perf_counter() - began >= WORTH_KEEPING:
            self.folders += [] if folder in self.folders else [folder]
            with suppress(OutputError):  # the part itself says so
                write_files(folder, {path.name: netcdf_bytes({"condition": dataset})})
        return dataset

    def discard(self) -> None:
        """Delete them, and their directory if nothing else is in it."""
        with suppress(OSError):
            for folder in self.folders:
                rmtree(folder, ignore_errors=True)
            for path in self.files:
                path.unlink(missing_ok=True)
            if self.directory is not None and not any(self.directory.iterdir()):
                self.directory.rmdir()


def read_datasets(path: Path) -> dict[str, xr.Dataset]:
    """Return the datasets of a part by name."""
    return {name.strip("/"): data for name, data in read_netcdf(path).items() if name != "/"}


def check_after(after: Any) -> dict[str, Result]:
    """Return finished results by name; InputError for anything else."""
    results = {} if after is None else after
    if not isinstance(results, Mapping) or not all(
        isinstance(result, Result) and result.name == name for name, result in results.items()
    ):
        raise InputError("after: give a Report, or a mapping of measure name to its Result")
    return dict(results)


def require_options(measure: Measure, result: Result) -> None:
    """Refuse a finished result of other options; both have those that were left out filled in."""
    then, now = (of.options() for of in (result.measure, measure))
    if then != now:
        raise InputError(f"after: {measure.name} was measured with {then}, and is asked for with {now}; leave it out")


def require_same(name: str, result: Result, provenance: Mapping[str, Any]) -> None:
    """Refuse a finished result of another model, of one that computes something else with the same weights, of other
    prompts or of other null models."""
    of_model = ("backend", "dtype", "weights", "added_hooks", "logits")
    for key in (*of_model, "tokens_sha256", "nulls", "heads", "seed", "first", "fwd_hooks", "metric"):
        then, now = (record.get(key, "all" if key == "heads" else "none") for record in (result.provenance, provenance))
        if key == "logits" and (then != now or now is None):
            seen = f"the same weights gave other logits for the same few tokens ({then}, now {now})"
            raise InputError(f"after: {name} was measured when {seen}; leave it out to measure it anew")
        if then != now:
            what = "other null models" if key == "nulls" else f"another {key}"
            raise InputError(
                f"after: {name} was measured with {what} ({then}, now {now}); leave it out to measure it anew"
            )


def configuration_of(session: Session, prompts: Any, logits: str | None, **settings: Any) -> dict[str, Any]:
    """Return all that an analysis depends on beside its measures, by content and JSON-ready; `logits` is what
    `logits_digest` gives.

    Raises:
        InputError: prompts whose content cannot be read; any hook at the model's hook points, a function of
            TransformerLens too, which the logits of a few tokens leave out; a model that cannot read these, which
            say what else changes it: hooks that torch alone knows, an adapter, a function that was replaced.
    """
    model, origin = session.model, session.origin
    if any(point.fwd_hooks for point in model.hook_dict.values()):
        raise InputError(
            "keep: another run cannot know what the hooks on this model do; remove them, or give keep=None"
        )
    if logits is None:
        raise InputError(
            "keep: this model cannot read a few tokens, so another run cannot know what was put into it (a function in "
            "the place of a forward, a hook of torch); remove it, or give keep=None"
        )
    layers = [replace(layer.geometry, error=None) for layer in session.layers() if isinstance(layer, Probed)]
    plain = {name: value for name, value in vars(model.cfg).items() if isinstance(value, str | bool | int | float)}
    config = Path(origin.directory or "", "config.json")  # which random inits are made by
    fast = getattr(model.tokenizer, "backend_tokenizer", None)  # all that it does; of a slow one, its vocabulary
    vocabulary = (
        json.dumps(sorted(model.tokenizer.get_vocab().items())) if model.tokenizer is not None and fast is None else ""
    )
    tokenizer = vocabulary if fast is None else fast.to_str()
    return {
        "weights": fingerprint(session),
        "logits": logits,
        "layers": content(layers),
        "cfg": {name: value for name, value in plain.items() if name not in ("model_name", "device", "seed")},
        "config": config.read_text(encoding="utf-8") if origin.directory and config.is_file() else None,
        "initialisation": origin.initialisation,
        "tokenizer": hashlib.sha256(tokenizer.encode()).hexdigest(),
        "backend": origin.backend,
        "dtype": str(session.dtype),
        "device": session.device.type,
        "prompts": content(prompts),
        **{name: content(value) for name, value in settings.items()},
    }


def content(value: Any) -> Any:
    """Return a value by its content, JSON-ready; of an array its dtype, shape and digest.

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
        return {str(name): content(item) for name, item in value.items()}
    if isinstance(value, Sequence):
        return [content(item) for item in value]
    raise InputError(f"keep: the content of a {type(value).__name__} cannot be read; give texts or token ids")
