"""Many models side by side: the files of a study as one dataset, its sentences, table and figures."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from tl_posgen.core.formatting import counted
from tl_posgen.core.measure import HEAD, Measure, Variable
from tl_posgen.core.numbers import ALL, NUMBER_DIMS, TRAINED, Numbers, at_init, mean_of, mean_over
from tl_posgen.core.options import require
from tl_posgen.core.report import Report
from tl_posgen.core.result import Result
from tl_posgen.core.store import read_part
from tl_posgen.errors import InputError
from tl_posgen.models.loading.checkpoints import steps_of
from tl_posgen.models.loading.null_kinds import NULL_KINDS, in_order, kind_and_seed, null_label
from tl_posgen.report.figures import plain
from tl_posgen.report.kinds import bars, lines
from tl_posgen.studies.curves import Followed, followed, numbers_of
from tl_posgen.studies.study import MAIN
from tl_posgen.studies.sweep import finished_jobs

_PER_JOB = ("model", "revision", "text")
_FEWEST = 4  # models for a correlation with size


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
    kinds_and_seeds = [kind_and_seed(label) for label in result.numbers.nulls]
    seeds = {
        kind.seeds: [seed for null_kind, seed in kinds_and_seeds if null_kind is kind] for kind in NULL_KINDS.values()
    }
    provenance = {"model": str(data["init_label"].values[0]), "finished jobs": len(reports)}
    texts = [str(text) for text in data["text"].values]
    provenance |= {"text": texts[0] if len(texts) == 1 else f"each of {', '.join(texts)}"}
    provenance |= {key: settings[key] for key in ("length", "seed", "versions", "measures")}
    provenance |= seeds | {"prompts": settings["n_prompts"], "mask": first.get("mask")}
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
    by_job = xr.concat(
        [numbers_of(report.values()) for report in reports.values()],
        "job",
        data_vars="all",
        coords="minimal",
        compat="override",
        join="outer",
        combine_attrs="override",
    )
    places = pd.MultiIndex.from_tuples(list(reports), names=_PER_JOB)
    data = by_job.assign_coords(xr.Coordinates.from_pandas_multiindex(places, "job")).unstack("job")
    order = {dim: _in_order(names, sizes) for dim, names in zip(_PER_JOB, zip(*reports, strict=True), strict=True)}
    inits = {*map(str, data["init"].values if "init" in data else ())} - {TRAINED}
    nulls = in_order(_in_order([*inits], {}))
    order["init"] = [TRAINED, *nulls]
    if "group" in data:
        order["group"] = sorted(map(str, data["group"].values), key=lambda group: group != ALL)
    data = data.reindex({dim: np.array(labels) for dim, labels in order.items()})
    data = data.transpose("init", "group", *_PER_JOB, ..., *HEAD, missing_dims="ignore")
    finished = xr.DataArray.from_series(pd.Series(1.0, places))
    data["finished"] = finished.reindex({dim: data[dim] for dim in _PER_JOB}).notnull()
    data["parameters"] = ("model", np.array([sizes[name] for name in order["model"]]))
    steps = []
    for model in order["model"]:
        revisions = [
            revision for revision in order["revision"] if any(place[:2] == (model, revision) for place in reports)
        ]
        step_of = dict(zip(revisions, steps_of(revisions), strict=True))
        steps.append([float(step_of.get(revision, np.nan)) for revision in order["revision"]])
    data["step"] = (("model", "revision"), np.array(steps))
    label = f"{settings['study']}, {counted(len(order['model']), 'model')}"
    labels = [label, *(f"{label}, {null_label(null)}" for null in nulls)]
    return data.assign_coords(init_label=("init", labels)).assign_attrs(measures=list(settings["measures"]))


def _at_the_end(curve: Followed) -> Callable[[Numbers], xr.DataArray]:
    """Return the function of the `Numbers` that gives a followed number at each model's last finished revision."""

    def array(numbers: Numbers) -> xr.DataArray:
        finished = numbers.data["finished"].any("text").transpose("model", "revision")
        last = finished.sizes["revision"] - 1 - finished[:, ::-1].argmax("revision")
        return curve.array(numbers).isel(revision=last.drop_vars("revision", errors="ignore"))

    return array


def _of_models(result: Any) -> dict[str, list[Any]]:
    """Return a panel a followed number, at each model's last revision."""
    return {curve.label: [("mean", _at_the_end(curve))] for curve in followed(result.dataset)}


def _of_revisions(result: Any) -> dict[str, list[Any]]:
    """Return a panel a followed number, with a curve for each model of several revisions."""
    several = result.trained["finished"].any("text").sum("revision") > 1
    models = several["model"].values[several.values].tolist()
    return {
        curve.label: [
            (plain(name), lambda numbers, curve=curve, name=name: curve.array(numbers).sel(model=name))
            for name in models
        ]
        for curve in followed(result.dataset)
    }


_MEANS = "means over heads and texts"
_AT_LAST = f"at the last revision; {_MEANS}"


@dataclass(frozen=True)
class Overview(Measure):
    """Measures of many models.

    Every measure of a study over its models, revisions and texts, heads averaged; beside randomly initialised models of
    the same shapes, and the models with shuffled weights.

    Source: ours
    """

    name = "study"
    question = "How do models compare?"
    rows = _PER_JOB
    variables = {
        "finished": Variable("finished", "", "whether the job's file is there", _PER_JOB),
        "parameters": Variable("parameters", "", "numbers in the model's weights, as loaded", ("model",)),
        "step": Variable("step", "", "the number in a revision's name, or its place", ("model", "revision")),
    }
    figures = {
        "models": bars(_of_models, "model", title="Models side by side", subtitle=_AT_LAST, columns=3),
        "revisions": lines(_of_revisions, "revision", title="Over revisions", subtitle=_MEANS),
        "size": lines(_of_models, "model", x="parameters", title="Against size", subtitle=_AT_LAST, log_x=True),
    }

    def findings(self, numbers: Numbers) -> list[str]:
        """Return where each followed number is lowest and highest, beside the null models, and its correlation with the
        logarithm of the parameters, at each model's last revision."""
        several, sentences = numbers.data["finished"].any("text").sum("revision") > 1, []
        for curve in filter(lambda curve: curve.sentence, followed(numbers.dataset)):
            array = curve.array(numbers).stack(place=("model", "revision"))
            at_places = numbers.along(array, "place")
            means = {
                f"{model} at {revision}" if several.sel(model=model) else model: number.value
                for (model, revision), number in zip(array["place"].values, at_places, strict=True)
                if number
            }
            if not means:
                continue
            form, n, (low, high) = curve.form, len(means), (pick(means, key=means.__getitem__) for pick in (min, max))
            what = f"{n} models{' and revisions' if bool(several.any()) else ''}"
            course = f"lies between {means[low]:{form}} ({low}) and {means[high]:{form}} ({high}) over {what}"
            if means[low] == means[high]:
                course = f"is {means[low]:{form}}" + (f" in all {what}" if n > 1 else f" ({low})")
            last = _at_the_end(curve)(numbers)
            sizes: Any = np.log(numbers.data["parameters"])
            over = mean_over(last, [dim for dim in last.dims if dim not in (*NUMBER_DIMS, "model")])
            defined = sizes.where(mean_of(at_init(over, TRAINED)).notnull()).dropna("model").values
            if len(defined) >= _FEWEST and len(np.unique(defined)) > 2:
                course += f"; with ln parameters r = {numbers.correlation(sizes, over, over=('model',)).plain:.2f}"
            sentences.append(f"{curve.sentence} {course}{numbers.number(last).null_in_brackets:{form}}.")
        return sentences

    def table(self, numbers: Numbers) -> pd.DataFrame:
        """Return a row a finished job: every followed number, heads averaged."""
        frame = numbers.frame({curve.label: curve.array(numbers) for curve in followed(numbers.dataset)}, *_PER_JOB)
        finished = numbers.data["finished"].transpose(*_PER_JOB).values.ravel()
        return pd.DataFrame(frame[finished.astype(bool)]).reset_index(drop=True)

    def kinds(self, data: xr.Dataset) -> Sequence[str]:
        """Return no models where there is one at several revisions, no revisions where no model has several, no sizes
        where all models have one."""
        several = bool((data["finished"].any("text").sum("revision") > 1).any())
        sizes = data["parameters"].values
        side_by_side = data.sizes["model"] > 1 or not several
        has = {"models": side_by_side, "revisions": several, "size": len(np.unique(sizes[np.isfinite(sizes)])) > 1}
        return [kind for kind, applies in has.items() if applies]
