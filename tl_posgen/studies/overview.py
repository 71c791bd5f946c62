"""Many models side by side: the files of a study as one dataset, its sentences, table and figures."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
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
from tl_posgen.models.loading.null_kinds import in_order, kind_and_seed, null_label
from tl_posgen.report.kinds import bars, lines
from tl_posgen.studies.curves import (
    RECOVERED,
    Followed,
    at_last_revision,
    effects_in,
    few_of,
    followed,
    is_per_token,
    numbers_of,
    same_tokens,
)
from tl_posgen.studies.overview_figures import AT_LAST, MEANS, draw_conditions, panels_of_models, panels_of_revisions
from tl_posgen.studies.study import MAIN
from tl_posgen.studies.sweep import finished_jobs

_PER_JOB = ("model", "revision", "text")
_MOST_NAMED = 3  # models in a sentence
_FEWEST = 4  # models for a correlation with size


def open_study(out: str | os.PathLike) -> xr.Dataset:
    """Return all numbers that a sweep has measured so far, over init x model x revision x text x layer x head.

    A number of a measure is "<measure>_<variable>", such as three_axis_r [init, group, model, revision, text, tokens,
    layer, head]: select init="trained", the seed of a random init, or "shuffled 0"; group="all", tokens="all". NaN
    stands where a model has fewer layers or heads than another, where a job is not finished, and where a measure could
    not be had. Beside them `step` [model, revision], the number in a revision's name, `parameters` [model] and
    `finished` [model, revision, text]. Models whose `tokenization` [model, revision, text] is the same number read a
    text as the same tokens; other losses per token are not comparable. A measure with conditions has the dim condition,
    and what they do over it: "<measure>_recovered", or "<measure>_rise" of the loss.

    Args:
        out: the directory of `sweep`.

    Raises:
        InputError: nothing was swept into that directory, nothing is finished, or a file is damaged.

    Example:
        >>> import tempfile
        >>> import tl_posgen
        >>> study = {"name": "small", "models": ["mini"], "length": 16, "n_prompts": 1, "nulls": 0}
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
    by_kind = result.numbers.labels_by_null
    nulls = {kind: [kind_and_seed(label)[1] for label in labels] for kind, labels in by_kind.items()}
    provenance = {"model": str(data["init_label"].values[0]), "finished jobs": len(reports)}
    texts = [str(text) for text in data["text"].values]
    provenance |= {"text": texts[0] if len(texts) == 1 else f"each of {', '.join(texts)}"}
    provenance |= {key: settings[key] for key in ("length", "seed", "versions", "measures")}
    provenance |= {"nulls": nulls, "prompts": settings["n_prompts"], "mask": first.get("mask")}
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
    of_jobs = [numbers_of(report.values()) for report in reports.values()]
    words: dict[str, dict[str, str]] = {}  # of conditions, which only some models may have
    for name, array in (item for of_job in of_jobs for item in of_job.data_vars.items() if "words" in item[1].attrs):
        words.setdefault(str(name), {}).update(json.loads(array.attrs["words"]))
    by_job = xr.concat(
        of_jobs,
        "job",
        data_vars="all",
        coords="minimal",
        compat="override",
        join="outer",
        combine_attrs="override",
    )
    for name, of_conditions in words.items():
        by_job[name].attrs["words"] = json.dumps(of_conditions)
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
    numbers_read = pd.Series(_tokenizations(reports), places)
    tokenization = xr.DataArray.from_series(numbers_read).reindex({dim: data[dim] for dim in _PER_JOB})
    data["finished"], data["tokenization"] = tokenization.notnull(), tokenization
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


def _tokenizations(reports: Mapping[tuple[str, ...], Report]) -> list[float]:
    """Return a number for each job: the same for those of one text that read the same tokens."""
    digests: dict[str, list[Any]] = {}
    numbers = []
    for (*_, text), report in reports.items():
        of_text, digest = digests.setdefault(text, []), report.provenance.get("tokens_sha256")
        of_text += [] if digest in of_text else [digest]
        numbers.append(float(of_text.index(digest)))
    return numbers


@dataclass(frozen=True)
class Overview(Measure):
    """Measures of many models.

    Every measure of a study over its models, revisions and texts; means over heads, and over texts where there are
    several.

    Source: ours
    """

    name = "study"
    question = "How do models compare?"
    rows = _PER_JOB
    variables = {
        "finished": Variable("finished", "", "whether the job's file is there", _PER_JOB),
        "parameters": Variable("parameters", "", "numbers in the model's weights, as loaded", ("model",)),
        "step": Variable("step", "", "the number in a revision's name, or its place", ("model", "revision")),
        "tokenization": Variable("tokenization", "", "the same number: the same tokens of a text", _PER_JOB),
    }
    figures = {
        "conditions": draw_conditions,
        "models": bars(panels_of_models, "model", title="Models side by side", subtitle=AT_LAST, columns=3),
        "revisions": lines(panels_of_revisions, "revision", title="Over revisions", subtitle=MEANS),
        "size": lines(
            partial(panels_of_models, against_size=True),
            "model",
            x="parameters",
            title="Against size",
            subtitle=AT_LAST,
            log_x=True,
        ),
    }

    def findings(self, numbers: Numbers) -> list[str]:
        """Return where each followed number is lowest and highest, beside the null models, and its correlation with the
        logarithm of the parameters, at each model's last revision.

        Conditions of a measure share a sentence. Numbers in nats per token are compared among models that read the same
        tokens, and what cannot be compared so is said last.
        """
        sentences, not_compared = [], dict[str, None]()
        alike = same_tokens(numbers.data)
        all_places = [place for group in alike for place in group]
        curves = [curve for curve in followed(numbers.dataset) if curve.sentence]
        effects = effects_in(numbers.dataset)
        for (curve_name, effect), of_effect in groupby(curves, key=lambda curve: (curve.name, curve.effect)):
            in_sentence = effects[curve_name] if effect else list(of_effect)
            is_split = len(alike) > 1 and is_per_token(in_sentence[0], numbers.dataset)
            n_before = len(sentences)
            for places in [group for group in alike if len(group) > 1] if is_split else [all_places]:
                of_tokens = " that read the same tokens" if is_split else ""
                if effect:
                    sentences += self._of_conditions(numbers, in_sentence, places, of_tokens)
                else:
                    sentences += self._of_number(numbers, in_sentence[0], places, of_tokens)
            if is_split and len(sentences) == n_before:
                not_compared[in_sentence[0].sentence if not effect else in_sentence[0].label.split(":")[0]] = None
        if not_compared:
            names = "; ".join(name[:1].lower() + name[1:] for name in not_compared)
            sentences.append(f"Not compared, as the models read a text as different tokens: {names}.")
        return sentences

    def _of_number(
        self, numbers: Numbers, curve: Followed, places: Sequence[tuple[str, str]], of_tokens: str
    ) -> list[str]:
        """Return the sentence on a followed number at some models and revisions; [] where none has it."""
        means, form = self._named(numbers, self._means_at(numbers, curve, places)), curve.form
        if not means:
            return []
        low, high = (pick(means, key=means.__getitem__) for pick in (min, max))
        what = _counted(numbers, len(means)) + of_tokens
        course = f"lies between {means[low]:{form}} ({low}) and {means[high]:{form}} ({high}) over {what}"
        if means[low] == means[high]:
            course = f"is {means[low]:{form}}" + (f" in all {what}" if len(means) > 1 else f" ({low})")
        if (n_texts := numbers.data.sizes["text"]) > 1:
            course += f", mean over {counted(n_texts, 'text')}"
        models = [*dict.fromkeys(model for model, _ in places)]
        last, sizes = at_last_revision(curve)(numbers).sel(model=models), numbers.data["parameters"].sel(model=models)
        ln_sizes: Any = np.log(sizes)
        over = mean_over(last, [dim for dim in last.dims if dim not in (*NUMBER_DIMS, "model")])
        defined = ln_sizes.where(mean_of(at_init(over, TRAINED)).notnull()).dropna("model").values
        if len(defined) >= _FEWEST and len(np.unique(defined)) > 2:
            course += f"; with ln parameters r = {numbers.correlation(ln_sizes, over, over=('model',)).plain:.2f}"
        return [f"{curve.sentence} {course}{numbers.number(last).null_in_brackets:{form}}."]

    def _of_conditions(
        self, numbers: Numbers, curves: Sequence[Followed], places: Sequence[tuple[str, str]], of_tokens: str
    ) -> list[str]:
        """Return the sentence on what conditions do at some models and revisions; [] where none has it."""
        form, is_share = curves[0].form, RECOVERED in curves[0].effect

        def size(curve: Followed) -> float:
            values = [*means[curve.condition].values()]
            return float(np.mean(values if is_share else np.abs(values)))

        means = {curve.condition: self._means_at(numbers, curve, places) for curve in curves}
        defined = [curve for curve in curves if means[curve.condition]]
        if not defined:
            return []
        chosen = few_of(sorted(defined, key=size, reverse=True))
        models, clauses = [*dict.fromkeys(model for model, _ in places)], []
        for curve in chosen:
            named = self._named(numbers, means[curve.condition])
            low, high = (pick(named, key=named.__getitem__) for pick in (min, max))
            ends = f"{named[low]:{form}}"
            if named[low] != named[high]:
                ends += f" ({low}) to {named[high]:{form}} ({high})"
            null = numbers.number(at_last_revision(curve)(numbers).sel(model=models))
            nulls = null.null_in_brackets if np.isfinite(null.nulls).any() else ""
            clauses.append(f"{curve.condition} {ends}{nulls:{form if nulls else ''}}")
        defined_at = {place: 0.0 for curve in chosen for place in means[curve.condition]}
        few = (
            f"{len(chosen)} of {len(defined)} conditions"
            if is_share
            else f"the {len(chosen)} largest of {len(defined)}"
        )
        scope = f", {few}" if len(chosen) < len(defined) else ""
        names = [*self._named(numbers, defined_at)]
        over = f"over {_counted(numbers, len(names))}" if len(names) > 1 else f"in {names[0]}"
        lacking = [model for model in models if model not in {model for model, _ in defined_at}]
        without = f" (not defined: {', '.join(lacking)})" if 0 < len(lacking) <= _MOST_NAMED else ""
        measure = curves[0].sentence.split(",")[0]
        return [f"{measure}, {curves[0].effect} {over}{of_tokens}{without}{scope}: {'; '.join(clauses)}."]

    def _means_at(
        self, numbers: Numbers, curve: Followed, places: Sequence[tuple[str, str]]
    ) -> dict[tuple[str, str], float]:
        """Return the value of a followed number by model and revision, of the places that have one."""
        array = curve.array(numbers).stack(place=("model", "revision"))
        at_places = numbers.along(array, "place")
        return {place: number.value for place, number in at_places.items() if number and place in places}

    def _named(self, numbers: Numbers, values: Mapping[tuple[str, str], float]) -> dict[str, float]:
        """Return values by the name of a model, with its revision where the model has several."""
        several = numbers.data["finished"].any("text").sum("revision") > 1
        return {
            f"{model} at {revision}" if several.sel(model=model) else model: value
            for (model, revision), value in values.items()
        }

    def table(self, numbers: Numbers) -> pd.DataFrame:
        """Return a row a finished job: every followed number, heads averaged."""
        frame = numbers.frame({curve.label: curve.array(numbers) for curve in followed(numbers.dataset)}, *_PER_JOB)
        finished = numbers.data["finished"].transpose(*_PER_JOB).values.ravel()
        return pd.DataFrame(frame[finished.astype(bool)]).reset_index(drop=True)

    def kinds(self, data: xr.Dataset) -> Sequence[str]:
        """Return no conditions where no measure has any, no models where there is one at several revisions, no
        revisions where no model has several, no sizes where all models have one."""
        several = bool((data["finished"].any("text").sum("revision") > 1).any())
        sizes = data["parameters"].values
        side_by_side = data.sizes["model"] > 1 or not several
        has = {"conditions": any(effects_in(data).values())}
        has |= {"models": side_by_side and not all(curve.effect for curve in followed(data))}
        is_unlike = len(same_tokens(data)) > 1
        can_be_against_size = any(not (is_unlike and is_per_token(curve, data)) for curve in followed(data))
        has |= {"revisions": several, "size": can_be_against_size and len(np.unique(sizes[np.isfinite(sizes)])) > 1}
        return [kind for kind, applies in has.items() if applies and followed(data)]


def _counted(numbers: Numbers, n: int) -> str:
    """Return "2 models", or "3 models and revisions" where a model has several."""
    several = numbers.data["finished"].any("text").sum("revision") > 1
    return f"{n} models and revisions" if bool(several.any()) else counted(n, "model")
