"""The files of a study as one labelled dataset, and as a page."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from tl_posgen.errors import InputError
from tl_posgen.models.checkpoints import steps_of
from tl_posgen.result import Report, Result
from tl_posgen.sweep.curves import PER_HEAD, numbers_in
from tl_posgen.sweep.job import read_part
from tl_posgen.sweep.overview import MEASURE, PER_JOB
from tl_posgen.sweep.run import INDEX, read_index

MAIN = "main"  # the revision of a model that a study names none of


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
        >>> from tl_posgen.sweep import sweep
        >>> study = {"name": "small", "models": ["mini"], "length": 16, "n_prompts": 1, "null_seeds": []}
        >>> with tempfile.TemporaryDirectory() as out:
        ...     _ = sweep(study, out=out, progress=False)
        ...     data = open_study(out)
        >>> data["three_axis_r"].dims
        ('model', 'revision', 'text', 'layer', 'head')
    """
    index, reports = read_study(Path(out))
    return laid_out(index, reports, null)


def report_study(out: str | os.PathLike) -> Report:
    """The same as a Report: models side by side, over revisions, against size; `.write(directory)` makes the page."""
    index, reports = read_study(Path(out))
    settings, first = index["settings"], next(iter(reports.values())).provenance
    nulls = tuple(laid_out(index, reports, place) for place in range(len(settings["null_seeds"])))
    own = laid_out(index, reports)
    kept = {key: settings[key] for key in ("length", "seed", "null_seeds", "versions", "measures")}
    told = {"model": own.attrs["model"], "jobs": len(index["jobs"]), "finished": len(reports)}
    provenance = told | {"prompts": settings["n_prompts"], "mask": first.get("mask")} | kept
    return Report({"study": Result("study", own, nulls, provenance)}, provenance)


def read_study(out: Path) -> tuple[dict[str, Any], dict[tuple[str, ...], Report]]:
    """study.json, and the report of every finished job by (model, revision, text)."""
    index = read_index(out)
    if index is None:
        raise InputError(f"{out}: no {INDEX} there; give a directory that tl_posgen.sweep wrote into")
    files = {tuple(job[dim] or MAIN for dim in PER_JOB): out / job["file"] for job in index["jobs"]}
    reports = {place: read_part(path) for place, path in files.items() if path.is_file()}
    if not reports:
        raise InputError(f"{out}: none of {len(files)} jobs is finished; run the sweep first")
    return index, reports


def laid_out(
    index: Mapping[str, Any], reports: Mapping[tuple[str, ...], Report], null: int | None = None
) -> xr.Dataset:
    """Finished jobs put into their places of arrays over all jobs."""
    settings = index["settings"]
    coords = {dim: list(dict.fromkeys(job[dim] or MAIN for job in index["jobs"])) for dim in PER_JOB}
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
    sizes = [
        next((one.provenance["parameters"] for key, one in reports.items() if key[0] == name), np.nan)
        for name in coords["model"]
    ]
    dataset["parameters"] = ("model", np.array(sizes, float))
    dataset["step"] = (
        ("model", "revision"),
        np.array([steps(index, name, coords["revision"]) for name in coords["model"]]),
    )
    n = len(coords["model"])
    label = f"{settings['study']}, {n} model{'s' * (n > 1)}"
    label += "" if null is None else f", random init (seed {settings['null_seeds'][null]})"
    names = list(settings["measures"])
    return MEASURE.describe(dataset.assign_attrs(rows=list(PER_JOB), model=label, measures=names))


def steps(index: Mapping[str, Any], model: str, revisions: list[str]) -> list[float]:
    """The step of each revision that a model has; NaN for the others."""
    own = list(dict.fromkeys(job["revision"] or MAIN for job in index["jobs"] if job["model"] == model))
    known = dict(zip(own, steps_of(own), strict=True))
    return [float(known.get(revision, np.nan)) for revision in revisions]
