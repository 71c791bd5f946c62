"""Emergence of the measures during training: an analysis over checkpoints, its sentences, table and figures."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from tqdm.auto import tqdm

from tl_posgen.core import registry
from tl_posgen.core.engine import Measures, analyze
from tl_posgen.core.measure import HEAD, Measure, Variable
from tl_posgen.core.null_models import NullModels, Nulls, seeds_by_kind
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import TRAINED, Numbers
from tl_posgen.core.options import require
from tl_posgen.core.result import Result
from tl_posgen.core.store import Parts
from tl_posgen.errors import check_seed
from tl_posgen.models.loading.checkpoints import Checkpoints
from tl_posgen.models.loading.load import BackendChoice, Dtype, Pretrained
from tl_posgen.models.loading.null_kinds import in_order, null_label
from tl_posgen.models.memory import release
from tl_posgen.models.model import Model
from tl_posgen.models.provenance import provenance_of
from tl_posgen.models.session import session_of
from tl_posgen.models.tokens import check_counts, check_numbers, first_id, prompts_of_one_length, text_provenance
from tl_posgen.report.figures import model_label
from tl_posgen.report.kinds import lines
from tl_posgen.studies.curves import Followed, followed, has_numbers, numbers_of
from tl_posgen.studies.emergence_figure import SAME, draw_heads

MEASURES = ("three_axis", "variance", "mean_key")
_MOST_ROWS = 20  # of the short table
_LOSS = Followed("loss", "loss")


def _means(result: Any) -> dict[str, list[Any]]:
    """Return a panel a number that is followed."""
    curves = [curve for curve in (_LOSS, *followed(result.dataset)) if has_numbers(curve.array(result.numbers))]
    return {curve.title: [(model_label(result.trained), curve.name, curve.at)] for curve in curves}


@dataclass(frozen=True)
class Emergence(Measure):
    """Measures over training checkpoints.

    Every measure over training checkpoints, each on the same prompts; means over heads of what every head has. Dashed:
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
    figures = {
        "means": lines(
            _means, "checkpoint", x="step", title="Emergence over training", subtitle=SAME, log_x=True, columns=4
        ),
        "heads": draw_heads,
    }

    @property
    def rows(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ("checkpoint", *HEAD) if self.per_head else ("checkpoint",)

    def at_steps(self, numbers: Numbers, name: str, condition: str | None = None) -> dict[int, Number]:
        """Return the number of a followed variable at every step, under a condition where it has some (the first that
        is followed if left out); {} where it was not measured."""
        for curve in (_LOSS, *followed(numbers.dataset)):
            if curve.name == name and condition in (None, curve.at.get("condition")):
                array = curve.array(numbers).assign_coords(checkpoint=numbers.data["step"].values)
                return numbers.along(array, "checkpoint", numbers.bounds_of(name))
        return {}

    def findings(self, numbers: Numbers) -> list[str]:
        """Return the course of the loss, and of every number that has a sentence: its ends, its largest value where
        that is neither, and where the ends are half of its range apart, the step from which half of the change is
        there, for good."""
        losses, sentences = self.at_steps(numbers, "loss"), []
        first, *_, last = losses if len(losses) > 1 else (0, 0)
        if len(losses) > 1:
            ends = f"from {losses[first].plain:.3f} to {losses[last].plain:.3f}"
            sentences.append(f"From step {first} to step {last} the loss goes {ends} nats.")
        for curve in followed(numbers.dataset):
            if not curve.sentence:
                continue
            at_steps = self.at_steps(numbers, curve.name, curve.at.get("condition"))
            form = curve.form
            if len(at_steps) < 2:
                (step, only), *_ = at_steps.items()
                sentences.append(
                    f"{curve.sentence} is {only.with_interval:{form}} at step {step}{only.null_in_brackets:{form}}."
                )
                continue
            sentence = (
                f"{curve.sentence} goes from {at_steps[first].with_interval:{form}} at step {first} to "
                f"{at_steps[last].with_interval:{form}} at step {last}{at_steps[last].null_in_brackets:{form}}"
            )
            values = np.array([number.value for number in at_steps.values()])
            top = [*at_steps][int(values.argmax())]
            if top not in (first, last) and np.isfinite(values).all():
                sentence += f", and is largest at step {top} ({values.max():{form}})"
            change = values - values[0]
            if abs(change[-1]) > np.ptp(values) / 2:  # else a peak or a dip, and no change
                before = (change / change[-1] < 0.5).nonzero()[0]
                sentence += f"; half of the change is there by step {[*at_steps][int(before[-1]) + 1]}"
            sentences.append(f"{sentence}.")
        return sentences

    def table(self, numbers: Numbers) -> pd.DataFrame:
        """Return a row a checkpoint: the loss and every followed number. At most 20 rows, spread over all of them."""
        columns = {curve.label: curve.array(numbers) for curve in (_LOSS, *followed(numbers.dataset))}
        frame = numbers.frame(columns, "checkpoint")
        return frame.iloc[np.unique(np.linspace(0, len(frame) - 1, _MOST_ROWS).round().astype(int))]

    def kinds(self, data: xr.Dataset) -> Sequence[str]:
        """Return no heads where no measure is of heads."""
        return ["means", "heads"] if self.per_head else ["means"]


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
    first: str | int | None = None,
    seed: int = 0,
    nulls: Nulls = 1,
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
        length, n_prompts, consecutive, first, seed: as in `analyze`.
        nulls: as in `analyze`: random inits of the last checkpoint's shape, and its shuffled weights. A run's step 0
            should measure as random inits do.
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
        >>> cut = {"length": 16, "n_prompts": 1, "nulls": 0, "progress": False}
        >>> found = emergence([MINI], bundled_text(), measures="three_axis", **cut)
        >>> found.sel()["three_axis_r"].dims
        ('checkpoint', 'tokens', 'layer', 'head')
    """
    require("checkpoints", checkpoints, Sequence[str | os.PathLike])
    require("model", model, str | None)
    require("tokenizer", tokenizer, str | os.PathLike | None)
    requested, seed = registry.requested(measures), check_seed(seed)
    seeds_by_kind(nulls)
    check_counts(length, n_prompts)
    run = Checkpoints(checkpoints, model, tokenizer, backend, dtype, device)
    last = run.models[-1].load(precise=any(measure.precise for measure in requested))
    session = session_of(last)
    check_numbers(session, length, n_prompts)
    begins_with = None if first is None else first_id(session, first)
    with session.choosing(replace(session.choices, first=begins_with)):
        tokens = prompts_of_one_length(session, prompts, length, n_prompts, consecutive=consecutive)
    null_models = NullModels(last, nulls)
    provenance = provenance_of(session, list(tokens), null_models.by_kind, seed)
    options = {measure.name: measure.options() for measure in requested}
    provenance |= {"checkpoints": run.names, "model": run.label, "measures": options}
    provenance |= text_provenance(prompts, length, n_prompts, consecutive)
    provenance |= {} if first is None else {"first": begins_with}
    with_loss = requested if "loss" in options else [*requested, "loss"]

    def measured(subject: Model | Pretrained) -> xr.Dataset:
        """Return the numbers of every measure of one model under names of their own, and its loss."""
        settings: dict[str, Any] = {"seed": seed, "nulls": 0, "keep": parts, "progress": False}
        report = analyze(subject, tokens, measures=with_loss, first=begins_with, **settings)
        numbers = numbers_of(report[name] for name in report if name in options).sel(init=TRAINED, drop=True)
        return numbers.assign(loss=report["loss"].trained["loss"].drop_vars("init_label", errors="ignore"))

    with Parts.kept_in(keep) as parts:
        models = null_models.models(in_place=True)
        of_null = {label: measured(model) for label, (_, model) in zip(null_models, models, strict=True)}
        null_models.free_memory()
        release(last)
        rows = [
            measured(checkpoint)
            for checkpoint in tqdm(run.models, desc="emergence", unit="checkpoint", disable=not progress)
        ]
    trained: Any = xr.concat(rows, xr.Variable("checkpoint", np.array(run.names)), combine_attrs="override")
    labels = in_order(of_null)
    inits = [trained, *(of_null[label].expand_dims(checkpoint=run.names) for label in labels)]  # alike at all steps
    data: Any = xr.concat(inits, xr.Variable("init", np.array([TRAINED, *labels])), combine_attrs="override")
    data = data.assign(step=("checkpoint", run.steps)).assign_attrs(measures=list(options))
    data = data.assign_coords(init_label=("init", [run.label, *map(null_label, labels)]))
    measure = Emergence(per_head="head" in data.dims)
    return Result(measure, measure.describe(data), provenance | {"options": measure.options()})
