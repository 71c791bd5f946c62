"""Many models side by side: sentences, table and figures of a study."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
import xarray as xr

from tl_posgen.core.measure import HEAD, Measure, Variable
from tl_posgen.core.numbers import TRAINED, Number, Numbers, mean_of
from tl_posgen.report.figures import COLOURS, NULL_COLOUR, Panels, line, model_label, plain, sides
from tl_posgen.stats.partial_correlation import correlation
from tl_posgen.studies.curves import Curve, array_of, followed

PER_JOB = ("model", "revision", "text")
FEWEST = 4  # models for a correlation with size


def of_init(array: xr.DataArray, init: str) -> xr.DataArray:
    """Return the part of one init; NaN of a random init that has no such number."""
    if "init" in array.dims:
        return array.sel(init=init, drop=True)
    return array if init == TRAINED else xr.full_like(array, np.nan, dtype=float)


def per_job(own: Numbers, curve: Curve, init: str = TRAINED) -> xr.DataArray:
    """Return the number of every job [model, revision, text]."""
    return mean_of(of_init(array_of(own, curve), init)).reset_coords(drop=True).transpose(*PER_JOB)


def at_the_end(array: xr.DataArray, own: Numbers) -> xr.DataArray:
    """Return an array over jobs at each model's last finished revision, texts averaged."""
    there = own.data["finished"].any("text").transpose("model", "revision")
    last = there.sizes["revision"] - 1 - there[:, ::-1].argmax("revision")
    return array.isel(revision=last.drop_vars("revision", errors="ignore")).mean("text")


def r_with_size(own: Numbers, curve: Curve) -> float | None:
    """Return the correlation over models of a number with ln parameters; None of fewer than four."""
    values, sizes = at_the_end(per_job(own, curve), own).values, np.log(own.data["parameters"].values)
    known = np.isfinite(values) & np.isfinite(sizes)
    if known.sum() < FEWEST or len(np.unique(sizes[known])) < 3:
        return None
    return correlation(torch.from_numpy(sizes[known]), torch.from_numpy(values[known])).r


def curve_panels(
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


def models_of(own: Numbers, curve: Curve, init: str, label: str, colour: str) -> list[Any]:
    """Draw the heads of every model as a box, or its number as a point."""
    models = [plain(name) for name in own.data["model"].values]
    array = mean_of(of_init(own.array(curve.name, **curve.at), init))
    if "head" not in array.dims or colour == NULL_COLOUR:
        return [points(models, at_the_end(per_job(own, curve, init), own), label, colour)]
    array = array.mean([dim for dim in array.dims if dim not in (*PER_JOB, *HEAD)])
    heads = at_the_end(array, own).stack(unit=HEAD).transpose("model", "unit")
    x = np.repeat(models, heads.sizes["unit"])
    return [go.Box(x=x, y=heads.values.ravel(), name=label, marker={"color": colour, "size": 3}, line={"width": 1})]


def revisions_of(own: Numbers, curve: Curve, init: str, label: str, colour: str) -> list[Any]:
    """Draw one line a model over its revisions."""
    values, found = per_job(own, curve, init).mean("text"), []
    for place, model in enumerate(own.data["model"].values):
        there = own.data["finished"].sel(model=model).any("text").values
        if there.sum() > 1:
            x, y = own.data["step"].sel(model=model).values[there] + 1, values.sel(model=model).values[there]
            is_null = colour == NULL_COLOUR
            shade = NULL_COLOUR if is_null else COLOURS[place % len(COLOURS)]
            mode = "lines" if is_null else "lines+markers"
            found.append(line(x, y, label if is_null else plain(model), shade, mode=mode))
    return found


def sizes_of(own: Numbers, curve: Curve, init: str, label: str, colour: str) -> list[Any]:
    """Draw a point a model over its parameters."""
    names = [plain(name) for name in own.data["model"].values]
    values = at_the_end(per_job(own, curve, init), own)
    return [points(own.data["parameters"].values, values, label, colour).update(text=names)]


def points(x: Any, y: Any, label: str, colour: str) -> go.Scatter:
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
        each = per_job(own, curve).mean("text").where(there).stack(place=("model", "revision")).dropna("place")
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
        inits = tuple(float(at_the_end(per_job(own, curve, init), own).mean()) for init in own.inits)
        size = r_with_size(own, curve)
        with_size = "" if size is None else f"; with ln parameters r = {size:.2f}"
        return f"{curve.sentence} {course}{Number(0.0, inits=inits).null_in_brackets:{form}}{with_size}."

    def table(self, own: Numbers) -> pd.DataFrame:
        """Return a row a finished job: every curve, heads averaged."""
        inits = own.inits if own.is_null else [TRAINED]
        columns = {
            curve.label: sum(per_job(own, curve, init) for init in inits) / len(inits)
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
        "models": curve_panels(models_of, "Models side by side", "at the last revision, texts averaged; boxes: heads"),
        "revisions": curve_panels(
            revisions_of, "Over revisions", "heads and texts averaged, by step + 1", type="log", dtick=1
        ),
        "size": curve_panels(
            sizes_of, "Against size", "by parameters, at the last revision; heads and texts averaged", type="log"
        ),
    }
