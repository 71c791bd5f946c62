"""The files of a study as one labelled dataset, and as a page."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from tl_posgen.errors import InputError
from tl_posgen.models.loading.checkpoints import steps_of
from tl_posgen.options import fits, require
from tl_posgen.parts import read_part
from tl_posgen.result import Report, Result
from tl_posgen.studies.curves import PER_HEAD, numbers_in
from tl_posgen.studies.job import MAIN, Place, jobs_in
from tl_posgen.studies.overview import MEASURE, PER_JOB


def open_study(out: str | os.PathLike, *, null: int | None = None) -> xr.Dataset:
    """Everything that a sweep has measured so far, over model x revision x text x layer x head.

    Every per-head number of a measure is "<measure>_<variable>" [model, revision, text, layer, head], every other
    number of its summary "<measure>_<key>" [model, revision, text]. NaN stands where a model has fewer layers or heads
    than another, where a job is not finished, and where a measure could not be had. Beside them `step` [model,
    revision], the number in a revision's name, `parameters` [model] and `finished` [model, revision, text].

    Args:
        out: the directory of `sweep`.
        null: of the random inits of this place in null_seeds; of the models themselves, if left out.

    Raises:
        InputError: nothing was swept into that directory, nothing is finished, or a file is damaged.

    Example:
        >>> import tempfile
        >>> import tl_posgen
        >>> study = {"name": "small", "models": ["mini"], "length": 16, "n_prompts": 1, "null_seeds": []}
        >>> with tempfile.TemporaryDirectory() as out:
        ...     _ = tl_posgen.sweep(study, out=out, progress=False)
        ...     data = tl_posgen.open_study(out)
        >>> data["three_axis_r"].dims
        ('model', 'revision', 'text', 'layer', 'head')
    """
    require("out", out, str | os.PathLike)
    return laid_out(read_study(Path(out)), null)


def report_study(out: str | os.PathLike) -> Report:
    """The same as a Report: models side by side, over revisions, against size; `.write(directory)` makes the page."""
    reports = read_study(Path(out))
    first = next(iter(reports.values())).provenance
    settings = first["study"]
    nulls = tuple(laid_out(reports, place) for place in range(len(settings["null_seeds"])))
    own = laid_out(reports)
    kept = {key: settings[key] for key in ("length", "seed", "null_seeds", "versions", "measures")}
    told = {"model": own.attrs["model"], "jobs": own["finished"].size, "finished": len(reports)}
    provenance = told | {"prompts": settings["n_prompts"], "mask": first.get("mask")} | kept
    return Report({"study": Result("study", own, nulls, provenance)}, provenance)


def read_study(out: Path) -> dict[Place, Report]:
    """The report of every finished job by (model, revision, text)."""
    reports = {place: read_part(path) for place, path in jobs_in(out).items()}
    if not reports:
        raise InputError(f"{out}: no finished job there; give a directory that tl_posgen.sweep wrote into")
    return reports


def in_order(places: Iterable[Place], sizes: Mapping[str, float]) -> dict[str, list[str]]:
    """Models by size, revisions and texts by the numbers in their names, "main" last.

    Example:
        >>> in_order([("a", "main", "book"), ("a", "step80", "book"), ("a", "step500", "book")], {"a": 1e9})["revision"]
        ['step80', 'step500', 'main']
    """

    def key(name: str) -> tuple[Any, ...]:
        numbers = [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
        return sizes.get(name, 0), name == MAIN, numbers

    return {dim: sorted(set(names), key=key) for dim, names in zip(PER_JOB, zip(*places, strict=True), strict=True)}


def laid_out(reports: Mapping[Place, Report], null: int | None = None) -> xr.Dataset:
    """Finished jobs put into their places of arrays over all models, revisions and texts."""
    settings = next(iter(reports.values())).provenance["study"]
    sizes = {place[0]: float(report.provenance["parameters"]) for place, report in reports.items()}
    coords = in_order(reports, sizes)
    seeds = settings["null_seeds"]
    if null is not None and not (fits(null, int) and 0 <= null < len(seeds)):
        raise InputError(f"null = {null!r}: the study has {len(seeds)} random inits, counted from 0")
    found = {place: xr.Dataset(numbers_in(one.values(), null)) for place, one in reports.items()}
    shape = tuple(map(len, coords.values()))
    heads = tuple(max((one.sizes.get(dim, 0) for one in found.values()), default=0) for dim in PER_HEAD)
    arrays: dict[str, xr.DataArray] = {}
    finished = xr.DataArray(np.zeros(shape, dtype=bool), coords, PER_JOB)
    for place, data in found.items():
        finished.loc[dict(zip(PER_JOB, place, strict=True))] = True
        where = tuple(coords[dim].index(label) for dim, label in zip(PER_JOB, place, strict=True))
        for name, array in data.data_vars.items():
            if str(name) not in arrays:
                dims = (*PER_JOB, *array.dims)
                values = np.full((*shape, *heads[: 2 * bool(array.dims)]), np.nan)
                arrays[str(name)] = xr.DataArray(values, dims=dims, attrs=array.attrs)
            arrays[str(name)].values[(*where, *map(slice, array.shape))] = array.values
    dataset = xr.Dataset(arrays, {**coords, **{dim: range(n) for dim, n in zip(PER_HEAD, heads, strict=True)}})
    dataset["finished"] = finished
    dataset["parameters"] = ("model", np.array([sizes[name] for name in coords["model"]]))
    dataset["step"] = (
        ("model", "revision"),
        np.array([steps(reports, name, coords["revision"]) for name in coords["model"]]),
    )
    n = len(coords["model"])
    label = f"{settings['study']}, {n} model{'s' * (n > 1)}"
    label += "" if null is None else f", random init (seed {seeds[null]})"
    names = list(settings["measures"])
    return MEASURE.describe(dataset.assign_attrs(rows=list(PER_JOB), model=label, measures=names))


def steps(reports: Mapping[Place, Report], model: str, revisions: list[str]) -> list[float]:
    """The step of each revision that a model has; NaN for the others."""
    own = [revision for revision in revisions if any(place[:2] == (model, revision) for place in reports)]
    known = dict(zip(own, steps_of(own), strict=True))
    return [float(known.get(revision, np.nan)) for revision in revisions]
