"""How the measures form during training: the same analysis over a sequence of checkpoints."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen import registry
from tl_posgen.analysis import Measures, analyze
from tl_posgen.collector import Variable
from tl_posgen.measure import Measure, Request
from tl_posgen.models.conversion.weights import release
from tl_posgen.models.loading.checkpoints import Checkpoints
from tl_posgen.models.loading.load import BackendChoice, Dtype
from tl_posgen.models.loss import prompts_of_one_length
from tl_posgen.models.model import Model
from tl_posgen.models.provenance import null_label, provenance_of
from tl_posgen.models.tokens import check_numbers
from tl_posgen.null import RandomInits, check_seeds
from tl_posgen.options import require
from tl_posgen.parts import Parts
from tl_posgen.report.figures import COLOURS, NULL_COLOUR, Panels, band, line, model_label
from tl_posgen.report.sentences import null_of, with_interval
from tl_posgen.result import Result
from tl_posgen.studies.curves import (
    PER_HEAD,
    Curve,
    curve_of,
    followed,
    half_way,
    interval_of,
    numbers_in,
    values_of,
)
from tl_posgen.summary import NullSummary, Summary

MEASURES = ("three_axis", "variance", "mean_key")
LOSS = Curve("loss", "loss")
MOST_ROWS = 20  # of the short table


def emergence(
    checkpoints: Sequence[str | os.PathLike],
    prompts: Any,
    *,
    measures: Measures = MEASURES,
    model: str | None = None,
    tokenizer: str | os.PathLike | None = None,
    backend: BackendChoice | str = "auto",
    dtype: Dtype = "auto",
    device: str | None = None,
    length: int | None = None,
    n_prompts: int | None = None,
    seed: int = 0,
    null_seeds: Sequence[int] = (0,),
    keep: str | os.PathLike | Parts | None = None,
    progress: bool = True,
) -> Result:
    """Measures over training: what `analyze` finds at every checkpoint on the same prompts, and the loss.

    The result holds every per-head number of each measure as "<measure>_<variable>" [checkpoint, layer, head], such as
    three_axis_r; every other number of its summary as "<measure>_<key>" [checkpoint], such as coupling_coupling; the
    `loss` in nats per token; and `step`, the number in a checkpoint's name (its place where there is none).

    Args:
        checkpoints: directories that save_pretrained wrote, in order of training; or, with `model`, revisions of that
            Hub repository ("step1000" of Pythia). One model is held at a time.
        prompts: as in `analyze`, of one length.
        measures: names, `Measure`s or options, as in `analyze`; three_axis, variance and mean_key if left out.
        model: name on huggingface.co.
        tokenizer: a directory with the tokenizer of all checkpoints, or "mini" for the bundled one; where left out, the
            last checkpoint's.
        backend, dtype, device: as in `load_model`.
        length, n_prompts, seed: as in `analyze`.
        null_seeds: of randomly initialised models of the last checkpoint's shape; () for none. A run's step 0 should
            measure as they do.
        keep: directory for finished checkpoints, as in `analyze`.

    Raises:
        InputError: no checkpoints, two of one name, prompts that cannot be used, or what a measure refuses.
        ModelError: a checkpoint that cannot be loaded.

    Source: that coupling, linearity and exponential growth rise during training is a claim of Aubry, Meng, Sugolov and
    Papyan, arXiv 2407.07810; that the split be followed through training is asked by readers of Han & Ji 2025; the
    procedure is ours.

    Example:
        >>> from tl_posgen.models.conversion.source import MINI
        >>> from tl_posgen.models.tokens import bundled_text
        >>> cut = {"length": 16, "n_prompts": 1, "null_seeds": (), "progress": False}
        >>> found = emergence([MINI], bundled_text(), measures="coupling", **cut)
        >>> found.dataset["coupling_coupling"].dims
        ('checkpoint',)
    """
    require("checkpoints", checkpoints, Sequence[str | os.PathLike])
    require("model", model, str | None)
    require("tokenizer", tokenizer, str | os.PathLike | None)
    requests, null_seeds = registry.requested(measures), check_seeds(null_seeds)
    run = Checkpoints(checkpoints, model, tokenizer, backend, dtype, device)
    precise = any(request.measure.precise for request in requests)
    last = run.load(-1, precise=precise)
    check_numbers(last, length, n_prompts)
    tokens = prompts_of_one_length(last, prompts, length, n_prompts)
    provenance = provenance_of(last, list(tokens), null_seeds, seed)
    asked = {request.name: request.as_dict() for request in requests}
    provenance |= {"checkpoints": run.names, "model": run.label, "measures": asked}
    nulls, rows, random_inits = [], [], RandomInits(last, null_seeds)
    with Parts.of(keep) as parts:
        measured = partial(numbers_of, tokens=tokens, requests=requests, seed=seed, parts=parts)
        for null_seed, (_, other) in zip(null_seeds, random_inits.models(in_place=True), strict=True):
            found = measured(other).expand_dims(checkpoint=[null_label(null_seed)])
            nulls.append(labelled(found, requests, null_label(null_seed)))
        random_inits.let_go()
        release(last)
        for place in tqdm(range(len(run)), desc="emergence", unit="checkpoint", disable=not progress):
            loaded = run.load(place, precise=precise)
            rows.append(measured(loaded))
            release(loaded)
    dataset = xr.concat(rows, pd.Index(run.names, name="checkpoint"))
    assert isinstance(dataset, xr.Dataset)
    dataset["step"] = ("checkpoint", run.steps)
    return Result("emergence", labelled(dataset, requests, run.label), tuple(nulls), provenance)


def numbers_of(
    model: Model, tokens: Int[Tensor, "prompt pos"], requests: Sequence[Request], seed: int, parts: Parts
) -> xr.Dataset:
    """What every measure says of one model, under names of their own, headlines first; and the loss."""
    with_loss = [*requests, *([] if any(one.name == "loss" for one in requests) else ["loss"])]
    report = dict(analyze(model, tokens, measures=with_loss, seed=seed, null_seeds=(), keep=parts, progress=False))
    loss = report.pop("loss").summary["loss"]
    return xr.Dataset({"loss": loss, **numbers_in(report.values())})


def labelled(found: xr.Dataset, requests: Sequence[Request], label: str) -> xr.Dataset:
    per_head = PER_HEAD if "head" in found.dims else ()
    rows = ["checkpoint", *per_head] if per_head else "checkpoint"
    return MEASURE.describe(found.assign_attrs(rows=rows, model=label, measures=[one.name for one in requests]))


# What is shown


def summarise(data: xr.Dataset) -> Summary:
    """Of every curve its last value under its name, and <name>_first, _largest, _over_steps and more."""
    steps = [int(step) for step in data["step"].values] if "step" in data else []
    losses = [float(loss) for loss in data["loss"].values]
    curves = followed(data)
    numbers: dict[str, Any] = {"steps": steps, "losses": losses, "curves": [curve.name for curve in curves]}
    for curve in curves:
        name, values = curve.name, values_of(data, curve.name)
        numbers |= {name: float(values[-1]), f"{name}_first": float(values[0])}
        numbers[f"{name}_over_steps"] = [float(value) for value in values]
        for end, bound in interval_of(data, name).items():
            numbers |= {f"{name}_{end}": float(bound[-1]), f"{name}_first_{end}": float(bound[0])}
            numbers[f"{name}_over_steps_{end}"] = [float(value) for value in bound]
        if curve.chance:
            chance = values_of(data, curve.chance)
            numbers |= {f"{name}_chance_lowest": float(chance.min()), f"{name}_chance_highest": float(chance.max())}
        if steps and np.isfinite(values).all():
            first, for_good, top = *half_way(values), int(values.argmax())
            numbers |= {f"{name}_largest": float(values[top]), f"{name}_largest_step": steps[top]}
            numbers |= {f"{name}_half_first_step": steps[first], f"{name}_half_step": steps[for_good]}
            numbers[f"{name}_half_loss"] = losses[for_good]
    return numbers


def findings(own: Summary, null: NullSummary | None) -> list[str]:
    steps, losses, sentences = own["steps"], own["losses"], []
    if len(steps) > 1:
        ends = f"from {losses[0]:.3f} to {losses[-1]:.3f}"
        sentences.append(f"From step {steps[0]} to step {steps[-1]} the loss goes {ends} nats.")
    for curve in map(curve_of, own["curves"]):
        if curve.told:
            sentences.append(f"{curve.told} {course(own, null, curve.name, curve.form)}.")
        if curve.chance:
            lowest, highest = own[f"{curve.name}_chance_lowest"], own[f"{curve.name}_chance_highest"]
            sentences.append(f"Random bases with the same spectra reach {lowest:.3f} to {highest:.3f}.")
    return sentences


def course(own: Summary, null: NullSummary | None, name: str, form: str) -> str:
    """'goes from ... to ... (random init ...), largest at ...; half of the change is there by step ...'."""
    steps, last, random = own["steps"], with_interval(own, name, form), null_of(null, name, form)
    if len(steps) < 2:
        return f"is {last} at step {steps[0]} ({random})"
    first = with_interval(own, f"{name}_first", form)
    ends = f"goes from {first} at step {steps[0]} to {last} at step {steps[-1]} ({random})"
    if f"{name}_largest" not in own:
        return ends
    early, for_good, top = (own[f"{name}_{place}_step"] for place in ("half_first", "half", "largest"))
    largest = (
        f", and is largest at step {top} ({own[f'{name}_largest']:{form}})" if top not in (steps[0], steps[-1]) else ""
    )
    lost = f"at step {early}, is lost again, and is there for good " if early < for_good else ""
    return (
        f"{ends}{largest}; half of the change is there {lost}by step {for_good}, at loss {own[f'{name}_half_loss']:.3f}"
    )


def table(data: xr.Dataset) -> pd.DataFrame:
    """One row a checkpoint: the loss and every curve, heads averaged. At most 20 rows, spread over all of them."""
    frame = pd.DataFrame({"checkpoint": data["checkpoint"].values, "loss": data["loss"].values})
    for curve in followed(data):
        values, ends = values_of(data, curve.name), interval_of(data, curve.name)
        if curve.chance:
            bounds = zip(values, ends["low"], ends["high"], strict=True)
            rows = [{"": value, "_low": low, "_high": high} for value, low, high in bounds]
            frame[curve.label] = [with_interval(row, "") for row in rows]
            frame["random bases"] = values_of(data, curve.chance)
        elif curve.column:
            frame[curve.label] = values
    n = len(frame)
    return frame.iloc[sorted({round(i * (n - 1) / (MOST_ROWS - 1)) for i in range(MOST_ROWS)})]


def means(result: Any) -> go.Figure:
    """The loss and every curve by step; heads averaged, intervals over prompts where there are any."""
    curves = [LOSS, *(curve for curve in followed(result.own) if not curve.control)]
    return over_steps(result, curves, mean_of, "Emergence over training")


def controls(result: Any) -> go.Figure:
    """The same of what a curve is held against."""
    curves = [curve for curve in followed(result.own) if curve.control]
    return over_steps(result, curves, mean_of, "Controls over training")


def heads(result: Any) -> go.Figure:
    """The loss, and one line a head, coloured by layer."""
    curves = [curve for curve in followed(result.own) if "head" in result.own[curve.name].dims]
    return over_steps(result, [LOSS, *curves], every_head, "Emergence over training, head by head")


def over_steps(
    result: Any, curves: Sequence[Curve], draw: Callable[[xr.Dataset, Curve, np.ndarray], list[go.Scatter]], title: str
) -> go.Figure:
    """A panel a curve over step + 1, on a logarithmic axis."""
    data, null = result.own, result.null
    x = data["step"].values + 1
    panels = Panels([curve.label for curve in curves], row_height=240)
    for number, curve in enumerate(curves):
        panels.add(number, *draw(data, curve, x))
        if null is not None:
            level = np.full(2, values_of(null, curve.name)[0])
            panels.add(number, line(x[[0, -1]], level, model_label(null), NULL_COLOUR, dash="dot"))
    panels.figure.update_xaxes(tickangle=0)
    panels.axes("step + 1", log_x=True)
    subtitle = "by step + 1, on the same prompts; areas: 95% intervals over prompts; dotted: random init's mean"
    return panels.finish(f"{title} · {model_label(data)}", subtitle)


def mean_of(data: xr.Dataset, curve: Curve, x: np.ndarray) -> list[go.Scatter]:
    ends = interval_of(data, curve.name)
    area = [band(x, ends["low"], ends["high"], "interval").update(showlegend=False)] if ends else []
    shown = {"mode": "lines+markers", "showlegend": False}
    curves = [line(x, values_of(data, curve.name), model_label(data), COLOURS[0], **shown)]
    if curve.chance:
        curves.append(line(x, values_of(data, curve.chance), "random bases", COLOURS[1], mode="lines+markers"))
    return [*area, *curves]


def every_head(data: xr.Dataset, curve: Curve, x: np.ndarray) -> list[go.Scatter]:
    if curve == LOSS:
        return mean_of(data, curve, x)
    return [
        line(
            x,
            data[curve.name].sel(layer=layer, head=head).values,
            f"layer {layer}",
            COLOURS[place % len(COLOURS)],
            width=1.0,
            hovertemplate=f"layer {layer}, head {head}: %{{y:.3f}}<extra></extra>",
        )
        for place, layer in enumerate(data[PER_HEAD[0]].values)
        for head in data[PER_HEAD[1]].values
    ]


def drawn(data: xr.Dataset) -> list[str]:
    """No heads where no measure is of heads, no controls where nothing has any."""
    curves = followed(data)
    with_heads = any("head" in data[curve.name].dims for curve in curves)
    has = {"means": True, "heads": with_heads, "controls": any(curve.control for curve in curves)}
    return [kind for kind, there in has.items() if there]


FIGURES = {"means": means, "heads": heads, "controls": controls}

MEASURE = Measure(
    name="emergence",
    question="When does it form?",
    explanation=(
        "Every measure over training checkpoints, from step 0, each on the same prompts; means over heads of what "
        "every head has. Dotted: a randomly initialised model, which is what step 0 should be."
    ),
    source="that it be followed through training: Aubry et al. 2024, and readers of Han & Ji 2025; how: ours",
    variables={
        "loss": Variable("loss", "nats", "per token", ("checkpoint",)),
        "step": Variable("step", "", "the number in a checkpoint's name, or its place", ("checkpoint",)),
    },
    summarise=summarise,
    findings=findings,
    figures=FIGURES,
    drawn=drawn,
    table=table,
)
