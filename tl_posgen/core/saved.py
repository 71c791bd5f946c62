"""Saved results: a file back to the report that wrote it."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xarray as xr

from tl_posgen.core import registry
from tl_posgen.core.files import FORMAT, read_attributes, read_netcdf, readable
from tl_posgen.core.measure import DEFINED, HEAD, Measure
from tl_posgen.core.report import Report
from tl_posgen.core.result import Result
from tl_posgen.core.views import view
from tl_posgen.errors import InputError

_MOST_MAPS = 12  # of a measure that is not installed


def load(path: str | os.PathLike) -> Report:
    """Return the Report of a file that `Report.save`, `Report.write` or `Result.save` wrote.

    Args:
        path: the .nc file, or the directory that `write` made.

    Raises:
        InputError: no such file, one that is damaged or was changed, of another version, or not a results file.
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"{path!r}: give the path of a .nc file that .save() wrote, or of its directory")
    path = Path(path)
    with readable(path):
        path = path / "results.nc" if path.is_dir() else path
        if not path.is_file():
            raise InputError(f"{path}: does not exist; give the directory of a report, or its .nc file")
        groups = read_netcdf(path)
        attributes = groups["/"].attrs
        if 1 <= (version := attributes["format"]) < FORMAT:
            then = f"tl_posgen 0.{int(version) + 1}"
            remedy = f"measure again, or load it with {then}"
            raise InputError(f"{path}: saved by {then}, whose files this version cannot read; {remedy}")
        if version != FORMAT:
            remedy = f"and this one reads {FORMAT}; install that one"
            raise InputError(f"{path}: saved in format {version} by another version of tl_posgen, {remedy}")
        results = {}
        for name in json.loads(attributes["order"]):
            dataset = groups[f"/{name}"]
            provenance = json.loads(dataset.attrs.pop("provenance"))
            measure = _measure_named(name, provenance.get("options", {}))
            results[name] = (measure.result_class or Result)(measure, dataset, provenance)
        return Report(results, json.loads(attributes["provenance"]))


def unknown_measure(name: str) -> Measure:
    """Return a measure of this name that maps what a saved result holds, where its own is not installed here."""

    def scalars(data: xr.Dataset) -> list[str]:
        return [str(variable) for variable, array in data.data_vars.items() if set(array.dims) == set(HEAD)]

    def map_of_scalars(result: Result) -> Any:
        return view("map of heads")(*scalars(result.trained)[:_MOST_MAPS], title=f"{title} per head")(result)

    def kinds(self: Measure, data: xr.Dataset) -> Sequence[str]:
        return ["map"] if scalars(data) else []

    title = name.replace("_", " ")
    about = "A measure that is not installed.\n\nIts package is not; its per-head numbers are shown.\n\nSource: unknown"
    namespace = {"__doc__": about, "question": title, "figures": {"map": map_of_scalars}, "kinds": kinds}
    return dataclass(frozen=True)(type("".join(map(str.capitalize, name.split("_"))), (Measure,), namespace))()


def load_provenance(path: Path) -> dict[str, Any]:
    """Return the provenance of the report in a file that `load` reads, and none of its arrays."""
    with readable(path):
        return json.loads(read_attributes(path)["provenance"])


def _measure_named(name: str, options: Mapping[str, Any]) -> Measure:
    """Return the measure of a saved result with its options: a registered one, or one that this session has defined;
    one that maps heads where there is neither."""
    kind = registry.find_or_none(name) or DEFINED.get(name)
    if kind is None:
        return unknown_measure(name)
    with suppress(InputError):
        return kind.with_options(options)
    accepted: dict[str, Any] = {}
    for option, value in options.items():
        with suppress(InputError):  # options that JSON cannot hold, or of another version
            kind.with_options({**accepted, option: value})
            accepted[option] = value
    return kind.with_options(accepted)
