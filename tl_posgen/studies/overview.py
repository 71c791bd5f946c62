"""What a study shows: models side by side, measures over revisions, measures against size."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
import xarray as xr

from tl_posgen.collector import Variable
from tl_posgen.measure import Measure
from tl_posgen.report.figures import COLOURS, NULL_COLOUR, Panels, line, model_label, sides
from tl_posgen.report.sentences import null_of, said
from tl_posgen.stats.partial_correlation import correlation
from tl_posgen.studies.curves import PER_HEAD, Curve, curve_of, followed
from tl_posgen.summary import NullSummary, Summary

PER_JOB = ("model", "revision", "text")
FEWEST = 4  # models for a correlation with size


def of_jobs(data: xr.Dataset, name: str) -> xr.DataArray:
    """A number of every job: the mean over heads of one that every head has."""
    array = data[name]
    return array.mean(PER_HEAD) if "head" in array.dims else array


def at_the_end(data: xr.Dataset) -> xr.Dataset:
    """Of every model its last finished revision, texts averaged."""
    there = data["finished"].any("text")
    last = there.sizes["revision"] - 1 - there[:, ::-1].argmax("revision")
    return data.drop_vars(("finished", "step")).isel(revision=last).mean("text", keep_attrs=True)


def summarise(data: xr.Dataset) -> Summary:
    """Of every curve its mean over models, at the end, and which models at which revisions are lowest and highest."""
    end, curves = at_the_end(data), followed(data)
    models, there = [str(name) for name in data["model"].values], data["finished"].any("text")
    several = there.sum("revision") > 1
    places = [
        (one, str(at)) for one, row in zip(models, there.values, strict=True) for at in data["revision"].values[row]
    ]
    labels = [f"{one} at {at}" if several.sel(model=one) else one for one, at in places]
    numbers: dict[str, Any] = {"models": models, "curves": [curve.name for curve in curves]}
    numbers |= {"jobs": int(data["finished"].size), "finished": int(data["finished"].sum())}
    numbers |= {"has_revisions": bool(several.any())}
    sizes = torch.from_numpy(np.log(data["parameters"].values))
    for name in numbers["curves"]:
        values = of_jobs(end, name)
        known = np.flatnonzero(np.isfinite(values.values) & np.isfinite(sizes.numpy()))
        numbers |= {name: float(values.mean()), f"{name}_by_model": [float(value) for value in values.values]}
        each = of_jobs(data, name).mean("text").values[there.values]
        if len(compared := np.flatnonzero(np.isfinite(each))):
            low, high = (compared[place(each[compared])] for place in (np.argmin, np.argmax))
            numbers |= {f"{name}_lowest": float(each[low]), f"{name}_lowest_model": labels[low]}
            numbers |= {f"{name}_highest": float(each[high]), f"{name}_highest_model": labels[high]}
            numbers |= {f"{name}_compared": len(compared)}
        if len(known) >= FEWEST and len(set(sizes[known].tolist())) > 2:
            numbers[f"{name}_r_size"] = correlation(sizes[known], torch.from_numpy(values.values[known])).r
    return numbers


def findings(own: Summary, null: NullSummary | None) -> list[str]:
    sentences = []
    for curve in map(curve_of, own["curves"]):
        if not curve.told or f"{curve.name}_lowest" not in own:
            continue
        low, high = (
            f"{said(own[f'{curve.name}_{end}'], curve.form)} ({own[f'{curve.name}_{end}_model']})"
            for end in ("lowest", "highest")
        )
        random = null_of(null, curve.name, curve.form)
        size = f"; with ln parameters r = {own[f'{curve.name}_r_size']:.2f}" if f"{curve.name}_r_size" in own else ""
        n, several = own[f"{curve.name}_compared"], own["has_revisions"]
        over = (
            f"goes from {low} to {high} over {n} models{' and revisions' if several else ''}" if n > 1 else f"is {low}"
        )
        sentences.append(f"{curve.told} {over} ({random}){size}.")
    return sentences


def table(data: xr.Dataset) -> pd.DataFrame:
    """One row a finished job: every curve, heads averaged."""
    columns = {curve.label: of_jobs(data, curve.name) for curve in followed(data) if curve.column}
    frame = xr.Dataset({"finished": data["finished"], **columns}).to_dataframe(dim_order=list(PER_JOB)).reset_index()
    return pd.DataFrame(frame.loc[frame["finished"], [*PER_JOB, *columns]]).reset_index(drop=True)


def side_by_side(result: Any) -> go.Figure:
    """A panel a curve: the heads of every model as a box, or its number as a point; the random init's mean in grey."""
    return drawn_over(result, models_of, "Models side by side", "at the last revision, texts averaged; boxes: heads")


def over_revisions(result: Any) -> go.Figure:
    """A panel a curve: one line a model over its revisions."""
    made = drawn_over(result, revisions_of, "Over revisions", "heads and texts averaged, by step + 1")
    return made.update_xaxes(type="log", dtick=1)


def against_size(result: Any) -> go.Figure:
    """A panel a curve: a point a model over its parameters."""
    made = drawn_over(result, sizes_of, "Against size", "by parameters, at the last revision; heads and texts averaged")
    return made.update_xaxes(type="log")


def drawn_over(result: Any, draw: Callable[..., list[Any]], title: str, subtitle: str) -> go.Figure:
    curves = followed(result.own)
    panels = Panels([curve.label for curve in curves], columns=3, row_height=280)
    for number, curve in enumerate(curves):
        for label, data, colour in sides(result):
            panels.add(number, *draw(data, curve, label, colour))
    return panels.finish(f"{title} · {model_label(result.own)}", f"{subtitle}; grey: random init")


def models_of(data: xr.Dataset, curve: Curve, label: str, colour: str) -> list[Any]:
    values = at_the_end(data)[curve.name]
    models = [str(name) for name in data["model"].values]
    if "head" not in values.dims or colour == NULL_COLOUR:
        return [points(models, values.mean(PER_HEAD) if "head" in values.dims else values, label, colour)]
    heads = values.stack(unit=PER_HEAD).transpose("model", "unit")
    x = np.repeat(models, heads.sizes["unit"])
    return [go.Box(x=x, y=heads.values.ravel(), name=label, marker={"color": colour, "size": 3}, line={"width": 1})]


def revisions_of(data: xr.Dataset, curve: Curve, label: str, colour: str) -> list[Any]:
    values, found = of_jobs(data, curve.name).mean("text"), []
    for place, model in enumerate(data["model"].values):
        there = data["finished"].sel(model=model).any("text").values
        if there.sum() > 1:
            x, y = data["step"].sel(model=model).values[there] + 1, values.sel(model=model).values[there]
            is_null = colour == NULL_COLOUR
            own = NULL_COLOUR if is_null else COLOURS[place % len(COLOURS)]
            found.append(
                line(x, y, label if is_null else str(model), own, mode="lines" if is_null else "lines+markers")
            )
    return found


def sizes_of(data: xr.Dataset, curve: Curve, label: str, colour: str) -> list[Any]:
    names = [str(name) for name in data["model"].values]
    return [points(data["parameters"].values, of_jobs(at_the_end(data), curve.name), label, colour).update(text=names)]


def points(x: Any, y: Any, label: str, colour: str) -> go.Scatter:
    return go.Scatter(x=x, y=np.asarray(y), mode="markers", name=label, marker={"color": colour, "size": 8})


def drawn(data: xr.Dataset) -> list[str]:
    """No revisions where no model has several, no sizes where all models have one."""
    several = bool((data["finished"].any("text").sum("revision") > 1).any())
    sizes = data["parameters"].values
    has = {"models": True, "revisions": several, "size": len(set(sizes[np.isfinite(sizes)].tolist())) > 1}
    return [kind for kind, there in has.items() if there]


MEASURE = Measure(
    name="study",
    question="How do models compare?",
    explanation=(
        "Every measure of a study over its models, revisions and texts, heads averaged; beside the same of randomly "
        "initialised models of the same shapes."
    ),
    source="ours",
    variables={
        "finished": Variable("finished", "", "whether the job's file is there", PER_JOB),
        "parameters": Variable("parameters", "", "numbers in the model's weights, as loaded", ("model",)),
        "step": Variable("step", "", "the number in a revision's name, or its place", ("model", "revision")),
    },
    summarise=summarise,
    findings=findings,
    figures={"models": side_by_side, "revisions": over_revisions, "size": against_size},
    drawn=drawn,
    table=table,
)
