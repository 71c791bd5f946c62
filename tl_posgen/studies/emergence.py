"""Emergence of the measures during training: an analysis over checkpoints, its sentences, table and figures."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.core import registry
from tl_posgen.core.engine import Measures, analyze, drawn
from tl_posgen.core.measure import HEAD, Measure, Variable
from tl_posgen.core.null_models import NullModels, check_seeds
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import SHUFFLED, TRAINED, Numbers, intervals_of, mean_of
from tl_posgen.core.options import require
from tl_posgen.core.result import Result
from tl_posgen.core.store import Parts
from tl_posgen.errors import check_seed
from tl_posgen.models.loading.checkpoints import Checkpoints
from tl_posgen.models.loading.load import BackendChoice, Dtype, Pretrained
from tl_posgen.models.loss import prompts_of_one_length
from tl_posgen.models.memory import release
from tl_posgen.models.model import Model
from tl_posgen.models.provenance import null_label, provenance_of
from tl_posgen.models.selection import head_name
from tl_posgen.models.session import session_of
from tl_posgen.models.tokens import check_counts, check_numbers
from tl_posgen.report.figures import COLOURS, NULL_COLOUR, Panels, band, line, model_label
from tl_posgen.studies.curves import Curve, array_of, bounds_in, chance_array, followed, half_way, numbers_of

MEASURES = ("three_axis", "variance", "mean_key")
LOSS = Curve("loss", "loss")
_MOST_ROWS = 20  # of the short table


def _over_steps(kind: str, title: str) -> Callable[[Any], go.Figure]:
    """Return a figure with a panel a curve over step + 1, on a logarithmic axis: means, heads or controls."""

    def figure(result: Any) -> go.Figure:
        own, curves = result.numbers, followed(result.dataset)
        chosen = {
            "means": [LOSS, *(curve for curve in curves if not curve.control)],
            "heads": [LOSS, *(curve for curve in curves if "head" in result.dataset[curve.name].dims)],
            "controls": [curve for curve in curves if curve.control],
        }[kind]
        x = own.data["step"].values + 1
        panels = Panels([curve.label for curve in chosen], row_height=240)
        for number, curve in enumerate(chosen):
            draw = _draw_mean if kind != "heads" or curve == LOSS else _draw_every_head
            panels.add(number, *draw(result, curve, x))
            if own.inits:
                level = float(mean_of(array_of(own, curve).sel(init=own.inits[0])).isel(checkpoint=0))
                label = model_label(result.null)
                panels.add(number, line(x[[0, -1]], np.full(2, level), label, NULL_COLOUR, dash="dot"))
        panels.figure.update_xaxes(tickangle=0)
        panels.axes("step + 1", log_x=True)
        areas = "; areas: 95% intervals over prompts" if list(panels.figure.select_traces({"fill": "toself"})) else ""
        dotted = "; dotted: random init's mean" if own.inits else ""
        subtitle = f"by step + 1, on the same prompts{areas}{dotted}"
        return panels.finish(f"{title} · {model_label(result.own)}", subtitle)

    return figure


def _draw_mean(result: Any, curve: Curve, x: np.ndarray) -> list[Any]:
    """Draw the mean of a curve with its interval, and random bases where it has them."""
    own = result.numbers
    ends = intervals_of(array_of(own, curve), bounds_in(own, curve))
    shown = {"mode": "lines+markers", "showlegend": False}
    found: list[Any] = []
    if bool(ends["low"].notnull().any()):
        found.append(band(x, ends["low"].values, ends["high"].values, "interval").update(showlegend=False))
    found.append(line(x, ends["value"].values, model_label(result.own), COLOURS[0], **shown))
    if curve.chance is not None:
        chance = mean_of(own.of_side(chance_array(own, curve))).values
        found.append(line(x, chance, "random bases", COLOURS[1], mode="lines+markers"))
    return found


def _draw_every_head(result: Any, curve: Curve, x: np.ndarray) -> list[Any]:
    """Draw a line a head, coloured by layer."""
    array = mean_of(result.numbers.array(curve.name, **curve.at).sel(init=TRAINED))
    array = array.mean([dim for dim in array.dims if dim not in ("checkpoint", *HEAD)])
    found = []
    for place, layer in enumerate(array["layer"].values):
        for head in array["head"].values:
            hover = f"{head_name(layer, head)}: %{{y:.3f}}<extra></extra>"
            shown = {"width": 1.0, "hovertemplate": hover}
            y, colour = array.sel(layer=layer, head=head).values, COLOURS[place % len(COLOURS)]
            found.append(line(x, y, f"layer {layer}", colour, **shown))
    return found


@dataclass(frozen=True)
class Emergence(Measure):
    """Measures over training checkpoints.

    Every measure over training checkpoints, each on the same prompts; means over heads of what every head has. Dotted:
    a randomly initialised model, as training begins.

    Args:
        per_head: whether a measure has a number for every head, which are the rows of its frame then.

    Source: that it be followed through training: Aubry et al. 2024, and readers of Han & Ji 2025; how: ours
    """

    per_head: bool = True

    question = "When does it form?"
    variables = {
        "loss": Variable("loss", "nats", "per token", ("checkpoint", "prompt")),
        "step": Variable("step", "", "the number in a checkpoint's name, or its place", ("checkpoint",)),
    }

    @property
    def rows(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ("checkpoint", *HEAD) if self.per_head else ("checkpoint",)

    def number(self, own: Numbers, curve: Curve, checkpoint: Any) -> Number:
        """Return the number of a curve at one checkpoint."""
        return own.number(array_of(own, curve, checkpoint=checkpoint), bounds_in(own, curve))

    def at_steps(self, own: Numbers, name: str) -> dict[int, Number]:
        """Return the number of a followed variable at every step; {} where it was not measured."""
        curves = [curve for curve in followed(own.dataset) if curve.name == name][:1]
        places = zip(own.data["step"].values.tolist(), own.data["checkpoint"].values, strict=True)
        return {step: self.number(own, curve, place) for step, place in places for curve in curves}

    def findings(self, own: Numbers) -> list[str]:
        steps, names, sentences = own.data["step"].values, own.data["checkpoint"].values, []
        if len(steps) > 1:
            first, last = (own("loss", checkpoint=names[place]).plain for place in (0, -1))
            sentences.append(
                f"From step {steps[0]} to step {steps[-1]} the loss goes from {first:.3f} to {last:.3f} nats."
            )
        for curve in followed(own.dataset):
            if curve.sentence:
                sentences.append(f"{curve.sentence} {self.course(own, curve)}.")
            if curve.chance is not None:
                chance = mean_of(chance_array(own, curve).sel(init=TRAINED)).values
                sentences.append(f"Random bases with the same spectra reach {chance.min():.3f} to {chance.max():.3f}.")
        return sentences

    def course(self, own: Numbers, curve: Curve) -> str:
        """Return "goes from ... to ... (random init ...), largest at ..., lowest at ...; half of the change is there by
        step ...": lowest where both ends are a quarter of the curve's range above, the last where they are at least
        half of it apart."""
        steps, names, form = own.data["step"].values, own.data["checkpoint"].values, curve.form
        first, last = (self.number(own, curve, names[place]) for place in (0, -1))
        if len(steps) < 2:
            return f"is {last.with_interval:{form}} at step {steps[0]}{last.null_in_brackets:{form}}"
        ends = (
            f"goes from {first.with_interval:{form}} at step {steps[0]} to {last.with_interval:{form}} at step "
            f"{steps[-1]}{last.null_in_brackets:{form}}"
        )
        values = values_of(own, curve)
        if not np.isfinite(values).all():
            return ends
        (early, for_good), span = half_way(values), np.ptp(values)
        top, bottom = int(values.argmax()), int(values.argmin())
        named = [f"largest at step {steps[top]} ({values[top]:{form}})"] if 0 < top < len(steps) - 1 else []
        if min(values[0], values[-1]) - values[bottom] > span / 4:
            named.append(f"lowest at step {steps[bottom]} ({values[bottom]:{form}})")
        extremes = f", and is {' and '.join(named)}" if named else ""
        if abs(values[-1] - values[0]) <= span / 2:
            return f"{ends}{extremes}"  # a peak or a dip, and no change
        lost = f"at step {steps[early]}, is lost again, and is there for good " if early < for_good else ""
        loss = own("loss", checkpoint=names[for_good]).plain
        return f"{ends}{extremes}; half of the change is there {lost}by step {steps[for_good]}, at loss {loss:.3f}"

    def table(self, own: Numbers) -> pd.DataFrame:
        """Return a row a checkpoint: the loss and every curve. At most 20 rows, spread over all of them."""
        names = own.data["checkpoint"].values
        frame = pd.DataFrame({"checkpoint": names, "loss": [own("loss", checkpoint=name).value for name in names]})
        for curve in followed(own.dataset):
            if not curve.column:
                continue
            numbers = [self.number(own, curve, name) for name in names]
            known = any(one.low == one.low for one in numbers)
            form = curve.form if known else ""
            frame[curve.label] = [f"{one.with_interval:{form}}" if known else one.value for one in numbers]
            if curve.chance is not None:
                frame["random bases"] = mean_of(own.of_side(chance_array(own, curve))).values
        n = len(frame)
        return frame.iloc[sorted({round(i * (n - 1) / (_MOST_ROWS - 1)) for i in range(_MOST_ROWS)})]

    def kinds(self, data: xr.Dataset) -> Sequence[str]:
        """Return no heads where no measure is of heads, no controls where nothing has any."""
        drawn = {"means": True, "heads": self.per_head, "controls": any(curve.control for curve in followed(data))}
        return [kind for kind, has_data in drawn.items() if has_data]

    figures = {
        "means": _over_steps("means", "Emergence over training"),
        "heads": _over_steps("heads", "Emergence over training, head by head"),
        "controls": _over_steps("controls", "Controls over training"),
    }


def values_of(own: Numbers, curve: Curve) -> np.ndarray:
    """Return the value of a curve at every checkpoint."""
    return mean_of(array_of(own, curve).sel(init=TRAINED)).values.astype(np.float64)


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
    consecutive: bool = False,
    seed: int = 0,
    null_seeds: Sequence[int] = (0,),
    keep: str | os.PathLike | Parts | None = None,
    progress: bool = True,
) -> Result:
    """Measure every checkpoint of a training run on the same prompts, and its loss.

    The result holds the numbers of each measure as "<measure>_<variable>" over `checkpoint`, such as three_axis_r
    [checkpoint, tokens, layer, head] and coupling_coupling [checkpoint, version, bases, prompt]; the `loss` in nats per
    token; and `step`, the number in a checkpoint's name (its place where there is none).

    Args:
        checkpoints: directories that save_pretrained wrote, in order of training; or, with `model`, revisions of that
            Hub repository ("step1000" of Pythia). One model is held at a time.
        prompts: as in `analyze`, of one length.
        measures: names or measures, as in `analyze`; three_axis, variance and mean_key if left out.
        model: name on huggingface.co.
        tokenizer: a directory with the tokenizer of all checkpoints, or "mini" for the bundled one; where left out, the
            last checkpoint's.
        backend, dtype, device: as in `load_model`.
        length, n_prompts, consecutive, seed: as in `analyze`.
        null_seeds: of randomly initialised models of the last checkpoint's shape; () for none. A run's step 0 should
            measure as they do. With one, the last checkpoint's shuffled weights are a null model too.
        keep: directory for finished checkpoints, as in `analyze`.

    Raises:
        InputError: no checkpoints, two of one name, prompts that cannot be used, or what a measure refuses.
        ModelError: a checkpoint that cannot be loaded.

    Source: that coupling, linearity and exponential growth rise during training is a claim of Aubry, Meng, Sugolov and
    Papyan, arXiv 2407.07810; that the split be followed through training is asked by readers of Han & Ji 2025; the
    procedure is ours.

    Example:
        >>> from tl_posgen.models.conversion.files import MINI
        >>> from tl_posgen.models.tokens import bundled_text
        >>> cut = {"length": 16, "n_prompts": 1, "null_seeds": (), "progress": False}
        >>> found = emergence([MINI], bundled_text(), measures="three_axis", **cut)
        >>> found.sel()["three_axis_r"].dims
        ('checkpoint', 'tokens', 'layer', 'head')
    """
    require("checkpoints", checkpoints, Sequence[str | os.PathLike])
    require("model", model, str | None)
    require("tokenizer", tokenizer, str | os.PathLike | None)
    asked, null_seeds, seed = registry.requested(measures), check_seeds(null_seeds), check_seed(seed)
    check_counts(length, n_prompts)
    run = Checkpoints(checkpoints, model, tokenizer, backend, dtype, device)
    last = run.models[-1].load(precise=any(measure.precise for measure in asked))
    session = session_of(last)
    check_numbers(session, length, n_prompts)
    tokens = prompts_of_one_length(session, prompts, length, n_prompts, consecutive=consecutive)
    nulls = NullModels(last, null_seeds, None)
    provenance = provenance_of(session, list(tokens), null_seeds, nulls.shuffled, seed)
    options = {measure.name: measure.options() for measure in asked}
    provenance |= {"checkpoints": run.names, "model": run.label, "measures": options}
    provenance |= drawn(length, n_prompts, consecutive)
    with Parts.kept_in(keep) as parts:
        measured = partial(_numbers_of_model, tokens=tokens, measures=asked, seed=seed, parts=parts)
        models = nulls.models(in_place=True)
        of_null = {label: measured(model) for label, (_, model) in zip(nulls, models, strict=True)}
        nulls.free_memory()
        release(last)
        rows = [measured(one) for one in tqdm(run.models, desc="emergence", unit="checkpoint", disable=not progress)]
    own: Any = xr.concat(rows, xr.Variable("checkpoint", np.array(run.names)), combine_attrs="override")
    labels = sorted(of_null, key=lambda label: label.startswith(SHUFFLED))
    inits = [own, *(of_null[label].expand_dims(checkpoint=run.names) for label in labels)]  # alike at all steps
    data: Any = xr.concat(inits, xr.Variable("init", np.array([TRAINED, *labels])), combine_attrs="override")
    data = data.assign(step=("checkpoint", run.steps)).assign_attrs(measures=list(options))
    data = data.assign_coords(init_label=("init", [run.label, *map(null_label, labels)]))
    measure = Emergence(per_head="head" in data.dims)
    return Result(measure, measure.describe(data), provenance | {"options": measure.options()})


def _numbers_of_model(
    model: Model | Pretrained, tokens: Int[Tensor, "prompt pos"], measures: Sequence[Measure], seed: int, parts: Parts
) -> xr.Dataset:
    """Return the numbers of every measure of one model under names of their own, and its loss."""
    names = [measure.name for measure in measures]
    with_loss = measures if "loss" in names else [*measures, "loss"]
    report = analyze(model, tokens, measures=with_loss, seed=seed, null_seeds=(), keep=parts, progress=False)
    numbers = numbers_of(report[name] for name in report if name in names).sel(init=TRAINED, drop=True)
    return numbers.assign(loss=report["loss"].own["loss"].drop_vars("init_label", errors="ignore"))
