"""Many models side by side: the files of a study as one dataset, its sentences, table and figures."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
import xarray as xr

from tl_posgen.core.formatting import counted
from tl_posgen.core.measure import HEAD, Measure, Variable
from tl_posgen.core.number import NULLS, Number
from tl_posgen.core.numbers import ALL, SHUFFLED, TRAINED, Numbers, mean_of
from tl_posgen.core.options import require
from tl_posgen.core.report import Report
from tl_posgen.core.result import Result
from tl_posgen.core.store import read_part
from tl_posgen.errors import InputError
from tl_posgen.models.loading.checkpoints import steps_of
from tl_posgen.models.provenance import null_label
from tl_posgen.report.figures import COLOURS, Panels, line, model_label, plain, sides
from tl_posgen.stats.correlations import correlation
from tl_posgen.studies.curves import Curve, followed, numbers_of
from tl_posgen.studies.study import MAIN
from tl_posgen.studies.sweep import finished_jobs

_PER_JOB = ("model", "revision", "text")
_FEWEST = 4  # models for a correlation with size
_COLOURS = {"random init": "grey", "shuffled": "sand"}  # what a caption calls those of null models


def open_study(out: str | os.PathLike) -> xr.Dataset:
    """Return all numbers that a sweep has measured so far, over init x model x revision x text x layer x head.

    A number of a measure is "<measure>_<variable>", such as three_axis_r [init, group, model, revision, text, tokens,
    layer, head]: select init="trained", the seed of a random init, or "shuffled 0"; group="all", tokens="all". NaN
    stands where a model has fewer layers or heads than another, where a job is not finished, and where a measure could
    not be had. Beside them `step` [model, revision], the number in a revision's name, `parameters` [model] and
    `finished` [model, revision, text].

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
    result = Result(measure, measure.describe(data))
    shuffled = [int(one.removeprefix(SHUFFLED)) for one in result.numbers.shuffled]
    provenance = {"model": str(data["init_label"].values[0]), "finished jobs": len(reports)}
    provenance |= {key: settings[key] for key in ("length", "seed", "null_seeds", "versions", "measures")}
    provenance |= {"shuffled_seeds": shuffled, "prompts": settings["n_prompts"], "mask": first.get("mask")}
    return Report({measure.name: replace(result, provenance=provenance)}, provenance)


def _read_study(out: Path) -> dict[tuple[str, ...], Report]:
    """Return the report of every finished job by (model, revision, text)."""
    reports = {place: read_part(path) for place, path in finished_jobs(out).items()}
    if not reports:
        raise InputError(f"{out}: no finished job there; give a directory that tl_posgen.sweep wrote into")
    return reports


def _in_order(names: Sequence[str], sizes: Mapping[str, float]) -> list[str]:
    """Return models by size, revisions, texts and null models by the numbers in their names, "main" last.

    Example:
        >>> _in_order(["main", "step80", "step500", "step80"], {})
        ['step80', 'step500', 'main']
    """

    def key(name: str) -> tuple[Any, ...]:
        numbers = [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
        return sizes.get(name, 0), name == MAIN, numbers

    return sorted(set(names), key=key)


def _laid_out(reports: Mapping[tuple[str, ...], Report]) -> xr.Dataset:
    """Return the numbers of finished jobs in their places of arrays over all models, revisions and texts."""
    settings = next(iter(reports.values())).provenance["study"]
    sizes = {place[0]: float(report.provenance["parameters"]) for place, report in reports.items()}
    every = xr.concat(
        [numbers_of(report.values()) for report in reports.values()],
        "job",
        data_vars="all",
        coords="minimal",
        compat="override",
        join="outer",
        combine_attrs="override",
    )
    places = pd.MultiIndex.from_tuples(list(reports), names=_PER_JOB)
    whole = every.assign_coords(xr.Coordinates.from_pandas_multiindex(places, "job")).unstack("job")
    order = {dim: _in_order(names, sizes) for dim, names in zip(_PER_JOB, zip(*reports, strict=True), strict=True)}
    inits = map(str, whole["init"].values if "init" in whole else ())
    nulls = [*map(str, settings["null_seeds"]), *_in_order([one for one in inits if one.startswith(SHUFFLED)], {})]
    order["init"] = [TRAINED, *nulls]
    if "group" in whole:
        order["group"] = sorted(map(str, whole["group"].values), key=lambda group: group != ALL)
    whole = whole.reindex({dim: np.array(labels) for dim, labels in order.items()})
    whole = whole.transpose("init", "group", *_PER_JOB, ..., *HEAD, missing_dims="ignore")
    finished = xr.DataArray.from_series(pd.Series(1.0, places))
    whole["finished"] = finished.reindex({dim: whole[dim] for dim in _PER_JOB}).notnull()
    whole["parameters"] = ("model", np.array([sizes[name] for name in order["model"]]))
    steps = []
    for model in order["model"]:
        own = [revision for revision in order["revision"] if any(place[:2] == (model, revision) for place in reports)]
        known = dict(zip(own, steps_of(own), strict=True))
        steps.append([float(known.get(revision, np.nan)) for revision in order["revision"]])
    whole["step"] = (("model", "revision"), np.array(steps))
    label = f"{settings['study']}, {counted(len(order['model']), 'model')}"
    labels = [label, *(f"{label}, {null_label(one)}" for one in nulls)]
    return whole.assign_coords(init_label=("init", labels)).assign_attrs(measures=list(settings["measures"]))


def _per_job(own: Numbers, curve: Curve, init: str = TRAINED, over: Sequence[str] = ()) -> xr.DataArray:
    """Return the number of every job [model, revision, text, *over]; NaN of a null model that has no such number."""
    array = curve.array(own)
    if "init" in array.dims:
        array = array.sel(init=init, drop=True)
    elif init != TRAINED:
        array = xr.full_like(array, np.nan, dtype=float)
    array = mean_of(array).reset_coords(drop=True)
    return array.mean([dim for dim in array.dims if dim not in (*_PER_JOB, *over)]).transpose(*_PER_JOB, ...)


def _at_the_end(array: xr.DataArray, own: Numbers) -> xr.DataArray:
    """Return an array over jobs at each model's last finished revision, texts averaged."""
    there = own.data["finished"].any("text").transpose("model", "revision")
    last = there.sizes["revision"] - 1 - there[:, ::-1].argmax("revision")
    return array.isel(revision=last.drop_vars("revision", errors="ignore")).mean("text")


def _panels_of(kind: str, title: str, subtitle: str, **x_axis: Any) -> Callable[[Any], go.Figure]:
    """Return a figure with a panel a curve, of the model and the first null model of each kind: models side by side,
    the heads of each as a box; a line a model over its revisions; or a point a model over its parameters."""

    def figure(result: Any) -> go.Figure:
        own, curves = result.numbers, followed(result.dataset)
        models = [plain(name) for name in own.data["model"].values]
        inits = [TRAINED, *(one.labels[0] for one in own.by_null.values())]
        panels = Panels([curve.label for curve in curves], columns=3, row_height=280)
        for (number, curve), (init, (label, _, colour)) in product(
            enumerate(curves), zip(inits, sides(result), strict=True)
        ):
            marks: dict[str, Any] = {"mode": "markers", "name": label, "marker": {"color": colour, "size": 8}}
            over = HEAD if kind == "models" and init == TRAINED and "head" in own.dataset[curve.name].dims else ()
            each = _per_job(own, curve, init, over)
            if kind == "revisions":
                for place, model in enumerate(models):
                    there = own.data["finished"].isel(model=place).any("text").values
                    x, y = own.data["step"].values[place][there] + 1, each.mean("text").values[place][there]
                    if there.sum() > 1 and init == TRAINED:
                        panels.add(number, line(x, y, model, COLOURS[place % len(COLOURS)], mode="lines+markers"))
                    elif there.sum() > 1:
                        panels.add(number, line(x, y, label, colour))
            elif over:
                heads = _at_the_end(each, own).stack(unit=HEAD).transpose("model", "unit")
                x, look = np.repeat(models, heads.sizes["unit"]), {"color": colour, "size": 3}
                panels.add(number, go.Box(x=x, y=heads.values.ravel(), name=label, marker=look, line={"width": 1}))
            else:
                x = models if kind == "models" else own.data["parameters"].values
                panels.add(number, go.Scatter(x=x, y=_at_the_end(each, own).values, text=models, **marks))
        told = "; ".join([subtitle, *(f"{words}: {null}" for null, words in _COLOURS.items() if null in own.by_null)])
        return panels.finish(f"{title} · {model_label(result.own)}", told).update_xaxes(**x_axis)

    return figure


@dataclass(frozen=True)
class Overview(Measure):
    """Measures of many models.

    Every measure of a study over its models, revisions and texts, heads averaged; beside randomly initialised models of
    the same shapes, and the models with shuffled weights.

    Source: ours
    """

    name = "study"  # pyright: ignore[reportAssignmentType]
    question = "How do models compare?"
    rows = _PER_JOB
    variables = {
        "finished": Variable("finished", "", "whether the job's file is there", _PER_JOB),
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
        of_nulls = {}
        for kind, one in own.by_null.items():
            means = [float(_at_the_end(_per_job(own, curve, init), own).mean()) for init in one.labels]
            of_nulls[NULLS[kind]] = tuple(mean for mean in means if mean == mean)  # some are of what one pass gives
        last, sizes = _at_the_end(_per_job(own, curve), own).values, np.log(own.data["parameters"].values)
        known = np.isfinite(last) & np.isfinite(sizes)
        with_size = ""
        if known.sum() >= _FEWEST and len(np.unique(sizes[known])) > 2:
            r = correlation(torch.from_numpy(sizes[known]), torch.from_numpy(last[known])).r
            with_size = f"; with ln parameters r = {r:.2f}"
        return f"{curve.sentence} {course}{Number(0.0, **of_nulls).null_in_brackets:{form}}{with_size}."

    def table(self, own: Numbers) -> pd.DataFrame:
        """Return a row a finished job: every curve, heads averaged."""
        columns = {
            curve.label: sum(_per_job(own, curve, init) for init in own.labels) / len(own.labels)
            for curve in followed(own.dataset)
        }
        data = xr.Dataset({"finished": own.data["finished"], **columns})
        frame = data.to_dataframe(dim_order=list(_PER_JOB)).reset_index()
        return pd.DataFrame(frame.loc[frame["finished"], [*_PER_JOB, *columns]]).reset_index(drop=True)

    def kinds(self, data: xr.Dataset) -> Sequence[str]:
        """Return no models where there is one at several revisions, no revisions where no model has several, no sizes
        where all models have one."""
        several = bool((data["finished"].any("text").sum("revision") > 1).any())
        sizes = data["parameters"].values
        side_by_side = data.sizes["model"] > 1 or not several
        has = {"models": side_by_side, "revisions": several, "size": len(np.unique(sizes[np.isfinite(sizes)])) > 1}
        return [kind for kind, there in has.items() if there]

    figures = {
        "models": _panels_of("models", "Models side by side", "at the last revision, texts averaged; boxes: heads"),
        "revisions": _panels_of(
            "revisions", "Over revisions", "heads and texts averaged, by step + 1", type="log", dtick=1
        ),
        "size": _panels_of(
            "size", "Against size", "by parameters, at the last revision; heads and texts averaged", type="log"
        ),
    }
