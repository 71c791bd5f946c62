"""Many models side by side: the files of a study as one dataset, its sentences, table and figures."""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
import xarray as xr

from tl_posgen.core.measure import HEAD, Measure, Variable
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import ALL, TRAINED, Numbers, mean_of
from tl_posgen.core.options import require
from tl_posgen.core.report import Report
from tl_posgen.core.result import Result
from tl_posgen.core.store import read_part
from tl_posgen.errors import InputError
from tl_posgen.models.loading.checkpoints import steps_of
from tl_posgen.models.provenance import null_label
from tl_posgen.report.figures import COLOURS, NULL_COLOUR, Panels, line, model_label, plain, sides
from tl_posgen.stats.correlations import correlation
from tl_posgen.studies.curves import Curve, array_of, followed, numbers_of
from tl_posgen.studies.study import MAIN
from tl_posgen.studies.sweep import finished_jobs

PER_JOB = ("model", "revision", "text")
FEWEST = 4  # models for a correlation with size


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
    return _laid_out(_read_study(Path(out)))


def report_study(out: str | os.PathLike) -> Report:
    """Return a study as a Report: models side by side, over revisions, against size; `.write(directory)` makes the
    page."""
    reports = _read_study(Path(out))
    first = next(iter(reports.values())).provenance
    settings, data, measure = first["study"], _laid_out(reports), Overview()
    counts = {"model": str(data["init_label"].values[0]), "finished jobs": len(reports)}
    shared = {key: settings[key] for key in ("length", "seed", "null_seeds", "versions", "measures")}
    provenance = counts | {"prompts": settings["n_prompts"], "mask": first.get("mask")} | shared
    return Report({measure.name: Result(measure, measure.describe(data), provenance)}, provenance)


def _read_study(out: Path) -> dict[tuple[str, ...], Report]:
    """Return the report of every finished job by (model, revision, text)."""
    reports = {place: read_part(path) for place, path in finished_jobs(out).items()}
    if not reports:
        raise InputError(f"{out}: no finished job there; give a directory that tl_posgen.sweep wrote into")
    return reports


def _in_order(places: Iterable[tuple[str, ...]], sizes: Mapping[str, float]) -> dict[str, list[str]]:
    """Return models by size, revisions and texts by the numbers in their names, "main" last.

    Example:
        >>> _in_order([("a", step, "book") for step in ("main", "step80", "step500")], {"a": 1e9})["revision"]
        ['step80', 'step500', 'main']
    """

    def key(name: str) -> tuple[Any, ...]:
        numbers = [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
        return sizes.get(name, 0), name == MAIN, numbers

    return {dim: sorted(set(names), key=key) for dim, names in zip(PER_JOB, zip(*places, strict=True), strict=True)}


def _laid_out(reports: Mapping[tuple[str, ...], Report]) -> xr.Dataset:
    """Return the numbers of finished jobs in their places of arrays over all models, revisions and texts."""
    settings = next(iter(reports.values())).provenance["study"]
    sizes = {place[0]: float(report.provenance["parameters"]) for place, report in reports.items()}
    jobs = [numbers_of(report.values()) for report in reports.values()]
    every = xr.concat(
        jobs, "job", data_vars="all", coords="minimal", compat="override", join="outer", combine_attrs="override"
    )
    places = pd.MultiIndex.from_tuples(list(reports), names=PER_JOB)
    whole = every.assign_coords(xr.Coordinates.from_pandas_multiindex(places, "job")).unstack("job")
    order: dict[str, list[str]] = _in_order(reports, sizes) | {"init": [TRAINED, *map(str, settings["null_seeds"])]}
    if "group" in whole:
        order["group"] = sorted(map(str, whole["group"].values), key=lambda group: group != ALL)
    whole = whole.reindex({dim: np.array(labels) for dim, labels in order.items()})
    whole = whole.transpose("init", "group", *PER_JOB, ..., *HEAD, missing_dims="ignore")
    finished = xr.DataArray.from_series(pd.Series(1.0, places))
    whole["finished"] = finished.reindex({dim: whole[dim] for dim in PER_JOB}).notnull()
    whole["parameters"] = ("model", np.array([sizes[name] for name in order["model"]]))
    by_model = [_steps(reports, name, order["revision"]) for name in order["model"]]
    whole["step"] = (("model", "revision"), np.array(by_model))
    n = len(order["model"])
    label = f"{settings['study']}, {n} model{'s' * (n > 1)}"
    labels = [label, *(f"{label}, {null_label(seed)}" for seed in settings["null_seeds"])]
    return whole.assign_coords(init_label=("init", labels)).assign_attrs(measures=list(settings["measures"]))


def _steps(reports: Mapping[tuple[str, ...], Report], model: str, revisions: list[str]) -> list[float]:
    """Return the step of each revision that a model has; NaN for the others."""
    own = [revision for revision in revisions if any(place[:2] == (model, revision) for place in reports)]
    known = dict(zip(own, steps_of(own), strict=True))
    return [float(known.get(revision, np.nan)) for revision in revisions]


def _of_init(array: xr.DataArray, init: str) -> xr.DataArray:
    """Return the part of one init; NaN of a random init that has no such number."""
    if "init" in array.dims:
        return array.sel(init=init, drop=True)
    return array if init == TRAINED else xr.full_like(array, np.nan, dtype=float)


def _per_job(own: Numbers, curve: Curve, init: str = TRAINED) -> xr.DataArray:
    """Return the number of every job [model, revision, text]."""
    return mean_of(_of_init(array_of(own, curve), init)).reset_coords(drop=True).transpose(*PER_JOB)


def _at_the_end(array: xr.DataArray, own: Numbers) -> xr.DataArray:
    """Return an array over jobs at each model's last finished revision, texts averaged."""
    there = own.data["finished"].any("text").transpose("model", "revision")
    last = there.sizes["revision"] - 1 - there[:, ::-1].argmax("revision")
    return array.isel(revision=last.drop_vars("revision", errors="ignore")).mean("text")


def _r_with_size(own: Numbers, curve: Curve) -> float | None:
    """Return the correlation over models of a number with ln parameters; None of fewer than four."""
    values, sizes = _at_the_end(_per_job(own, curve), own).values, np.log(own.data["parameters"].values)
    known = np.isfinite(values) & np.isfinite(sizes)
    if known.sum() < FEWEST or len(np.unique(sizes[known])) < 3:
        return None
    return correlation(torch.from_numpy(sizes[known]), torch.from_numpy(values[known])).r


def _curve_panels(
    draw: Callable[..., list[Any]], title: str, subtitle: str, **x_axis: Any
) -> Callable[[Any], go.Figure]:
    """Return a figure with a panel a curve, the model's and its first random init's."""

    def figure(result: Any) -> go.Figure:
        own, curves = result.numbers, followed(result.dataset)
        panels = Panels([curve.label for curve in curves], columns=3, row_height=280)
        inits = [TRAINED, *own.inits][: len(sides(result))]
        for number, curve in enumerate(curves):
            for init, (label, _, colour) in zip(inits, sides(result), strict=True):
                panels.add(number, *draw(own, curve, init, label, colour))
        grey = "; grey: random init" if own.inits else ""
        made = panels.finish(f"{title} · {model_label(result.own)}", f"{subtitle}{grey}")
        return made.update_xaxes(**x_axis)

    return figure


def _models_of(own: Numbers, curve: Curve, init: str, label: str, colour: str) -> list[Any]:
    """Draw the heads of every model as a box, or its number as a point."""
    models = [plain(name) for name in own.data["model"].values]
    array = mean_of(_of_init(own.array(curve.name, **curve.at), init))
    if "head" not in array.dims or colour == NULL_COLOUR:
        return [_points(models, _at_the_end(_per_job(own, curve, init), own), label, colour)]
    array = array.mean([dim for dim in array.dims if dim not in (*PER_JOB, *HEAD)])
    heads = _at_the_end(array, own).stack(unit=HEAD).transpose("model", "unit")
    x = np.repeat(models, heads.sizes["unit"])
    return [go.Box(x=x, y=heads.values.ravel(), name=label, marker={"color": colour, "size": 3}, line={"width": 1})]


def _revisions_of(own: Numbers, curve: Curve, init: str, label: str, colour: str) -> list[Any]:
    """Draw one line a model over its revisions."""
    values, found = _per_job(own, curve, init).mean("text"), []
    for place, model in enumerate(own.data["model"].values):
        there = own.data["finished"].sel(model=model).any("text").values
        if there.sum() > 1:
            x, y = own.data["step"].sel(model=model).values[there] + 1, values.sel(model=model).values[there]
            is_null = colour == NULL_COLOUR
            shade = NULL_COLOUR if is_null else COLOURS[place % len(COLOURS)]
            mode = "lines" if is_null else "lines+markers"
            found.append(line(x, y, label if is_null else plain(model), shade, mode=mode))
    return found


def _sizes_of(own: Numbers, curve: Curve, init: str, label: str, colour: str) -> list[Any]:
    """Draw a point a model over its parameters."""
    names = [plain(name) for name in own.data["model"].values]
    values = _at_the_end(_per_job(own, curve, init), own)
    return [_points(own.data["parameters"].values, values, label, colour).update(text=names)]


def _points(x: Any, y: Any, label: str, colour: str) -> go.Scatter:
    """Return markers without lines."""
    return go.Scatter(x=x, y=np.asarray(y), mode="markers", name=label, marker={"color": colour, "size": 8})


@dataclass(frozen=True)
class Overview(Measure):
    """Measures of many models.

    Every measure of a study over its models, revisions and texts, heads averaged; beside randomly initialised models of
    the same shapes.

    Source: ours
    """

    name = "study"  # pyright: ignore[reportAssignmentType]
    question = "How do models compare?"
    rows = PER_JOB
    variables = {
        "finished": Variable("finished", "", "whether the job's file is there", PER_JOB),
        "parameters": Variable("parameters", "", "numbers in the model's weights, as loaded", ("model",)),
        "step": Variable("step", "", "the number in a revision's name, or its place", ("model", "revision")),
    }

    def findings(self, own: Numbers) -> list[str]:
        return [sentence for curve in followed(own.dataset) if (sentence := self.sentence(own, curve))]

    def sentence(self, own: Numbers, curve: Curve) -> str:
        """Return where a curve is lowest and highest, of one model in order of training, beside its random inits; "" of
        a curve without a number."""
        there = own.data["finished"].any("text")
        several = there.sum("revision") > 1
        each = _per_job(own, curve).mean("text").where(there).stack(place=("model", "revision")).dropna("place")
        if not curve.sentence or not each.size:
            return ""
        form, values, places = curve.form, each.values, each["place"].values
        n, is_one = len(values), own.data.sizes["model"] == 1
        labels = [
            str(at) if is_one and n > 1 else f"{model} at {at}" if several.sel(model=model) else str(model)
            for model, at in places
        ]
        ends = [int(values.argmin()), int(values.argmax())]
        low, high = (f"{values[at]:{form}} ({labels[at]})" for at in (sorted(ends) if is_one else ends))
        what = "revisions" if is_one else f"models{' and revisions' if bool(several.any()) else ''}"
        course = f"lies between {low} and {high} over {n} {what}" if n > 1 else f"is {low}"
        if n > 1 and values.min() == values.max():
            course = f"is {values[0]:{form}} in all {n} {what}"
        inits = tuple(float(_at_the_end(_per_job(own, curve, init), own).mean()) for init in own.inits)
        size = _r_with_size(own, curve)
        with_size = "" if size is None else f"; with ln parameters r = {size:.2f}"
        return f"{curve.sentence} {course}{Number(0.0, inits=inits).null_in_brackets:{form}}{with_size}."

    def table(self, own: Numbers) -> pd.DataFrame:
        """Return a row a finished job: every curve, heads averaged."""
        inits = own.inits if own.is_null else [TRAINED]
        columns = {
            curve.label: sum(_per_job(own, curve, init) for init in inits) / len(inits)
            for curve in followed(own.dataset)
            if curve.column
        }
        data = xr.Dataset({"finished": own.data["finished"], **columns})
        frame = data.to_dataframe(dim_order=list(PER_JOB)).reset_index()
        return pd.DataFrame(frame.loc[frame["finished"], [*PER_JOB, *columns]]).reset_index(drop=True)

    def kinds(self, data: xr.Dataset) -> Sequence[str]:
        """Return no models where there is one at several revisions, no revisions where no model has several, no sizes
        where all models have one."""
        several = bool((data["finished"].any("text").sum("revision") > 1).any())
        sizes = data["parameters"].values
        side_by_side = data.sizes["model"] > 1 or not several
        has = {"models": side_by_side, "revisions": several, "size": len(np.unique(sizes[np.isfinite(sizes)])) > 1}
        return [kind for kind, there in has.items() if there]

    figures = {
        "models": _curve_panels(
            _models_of, "Models side by side", "at the last revision, texts averaged; boxes: heads"
        ),
        "revisions": _curve_panels(
            _revisions_of, "Over revisions", "heads and texts averaged, by step + 1", type="log", dtick=1
        ),
        "size": _curve_panels(
            _sizes_of, "Against size", "by parameters, at the last revision; heads and texts averaged", type="log"
        ),
    }
