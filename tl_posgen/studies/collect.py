"""The files of a study: one labelled dataset, and a page."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from tl_posgen.core.measure import HEAD
from tl_posgen.core.numbers import ALL, TRAINED
from tl_posgen.core.options import require
from tl_posgen.core.report import Report
from tl_posgen.core.result import Result
from tl_posgen.core.store import read_part
from tl_posgen.errors import InputError
from tl_posgen.models.loading.checkpoints import steps_of
from tl_posgen.models.provenance import null_label
from tl_posgen.studies.curves import numbers_of
from tl_posgen.studies.overview import PER_JOB, Overview
from tl_posgen.studies.study import MAIN
from tl_posgen.studies.sweep import finished_jobs


def open_study(out: str | os.PathLike) -> xr.Dataset:
    """Return all numbers that a sweep has measured so far, over init x model x revision x text x layer x head.

    A number of a measure is "<measure>_<variable>", such as three_axis_r [init, group, model, revision, text, tokens,
    layer, head]: select init="trained" or the seed of a random init, group="all", tokens="all". NaN stands where a
    model has fewer layers or heads than another, where a job is not finished, and where a measure could not be had.
    Beside them `step` [model, revision], the number in a revision's name, `parameters` [model] and `finished` [model,
    revision, text].

    Args:
        out: the directory of `sweep`.

    Raises:
        InputError: nothing was swept into that directory, nothing is finished, or a file is damaged.

    Example:
        >>> import tempfile
        >>> import tl_posgen
        >>> study = {"name": "small", "models": ["mini"], "length": 16, "n_prompts": 1, "null_seeds": []}
        >>> with tempfile.TemporaryDirectory() as out:
        ...     _ = tl_posgen.sweep(study, out=out, progress=False)
        ...     data = tl_posgen.open_study(out)
        >>> data["three_axis_r"].sel(init="trained", group="all").dims
        ('model', 'revision', 'text', 'tokens', 'layer', 'head')
    """
    require("out", out, str | os.PathLike)
    return laid_out(read_study(Path(out)))


def report_study(out: str | os.PathLike) -> Report:
    """Return a study as a Report: models side by side, over revisions, against size; `.write(directory)` makes the
    page."""
    reports = read_study(Path(out))
    first = next(iter(reports.values())).provenance
    settings, data, measure = first["study"], laid_out(reports), Overview()
    counts = {"model": str(data["init_label"].values[0]), "finished jobs": len(reports)}
    shared = {key: settings[key] for key in ("length", "seed", "null_seeds", "versions", "measures")}
    provenance = counts | {"prompts": settings["n_prompts"], "mask": first.get("mask")} | shared
    return Report({measure.name: Result(measure, measure.describe(data), provenance)}, provenance)


def read_study(out: Path) -> dict[tuple[str, ...], Report]:
    """Return the report of every finished job by (model, revision, text)."""
    reports = {place: read_part(path) for place, path in finished_jobs(out).items()}
    if not reports:
        raise InputError(f"{out}: no finished job there; give a directory that tl_posgen.sweep wrote into")
    return reports


def in_order(places: Iterable[tuple[str, ...]], sizes: Mapping[str, float]) -> dict[str, list[str]]:
    """Return models by size, revisions and texts by the numbers in their names, "main" last.

    Example:
        >>> in_order([("a", "main", "book"), ("a", "step80", "book"), ("a", "step500", "book")], {"a": 1e9})["revision"]
        ['step80', 'step500', 'main']
    """

    def key(name: str) -> tuple[Any, ...]:
        numbers = [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
        return sizes.get(name, 0), name == MAIN, numbers

    return {dim: sorted(set(names), key=key) for dim, names in zip(PER_JOB, zip(*places, strict=True), strict=True)}


def laid_out(reports: Mapping[tuple[str, ...], Report]) -> xr.Dataset:
    """Return the numbers of finished jobs in their places of arrays over all models, revisions and texts."""
    settings = next(iter(reports.values())).provenance["study"]
    sizes = {place[0]: float(report.provenance["parameters"]) for place, report in reports.items()}
    jobs = [numbers_of(report.values()) for report in reports.values()]
    every = xr.concat(
        jobs, "job", data_vars="all", coords="minimal", compat="override", join="outer", combine_attrs="override"
    )
    places = pd.MultiIndex.from_tuples(list(reports), names=PER_JOB)
    whole = every.assign_coords(xr.Coordinates.from_pandas_multiindex(places, "job")).unstack("job")
    order: dict[str, list[str]] = in_order(reports, sizes) | {"init": [TRAINED, *map(str, settings["null_seeds"])]}
    if "group" in whole:
        order["group"] = sorted(map(str, whole["group"].values), key=lambda group: group != ALL)
    whole = whole.reindex({dim: np.array(labels) for dim, labels in order.items()})
    whole = whole.transpose("init", "group", *PER_JOB, ..., *HEAD, missing_dims="ignore")
    finished = xr.DataArray.from_series(pd.Series(1.0, places))
    whole["finished"] = finished.reindex({dim: whole[dim] for dim in PER_JOB}).notnull()
    whole["parameters"] = ("model", np.array([sizes[name] for name in order["model"]]))
    by_model = [steps(reports, name, order["revision"]) for name in order["model"]]
    whole["step"] = (("model", "revision"), np.array(by_model))
    n = len(order["model"])
    label = f"{settings['study']}, {n} model{'s' * (n > 1)}"
    labels = [label, *(f"{label}, {null_label(seed)}" for seed in settings["null_seeds"])]
    return whole.assign_coords(init_label=("init", labels)).assign_attrs(measures=list(settings["measures"]))


def steps(reports: Mapping[tuple[str, ...], Report], model: str, revisions: list[str]) -> list[float]:
    """Return the step of each revision that a model has; NaN for the others."""
    own = [revision for revision in revisions if any(place[:2] == (model, revision) for place in reports)]
    known = dict(zip(own, steps_of(own), strict=True))
    return [float(known.get(revision, np.nan)) for revision in revisions]
