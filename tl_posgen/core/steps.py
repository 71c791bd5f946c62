"""The steps of an analysis: the model, then each null model, under measures that share a pass or run the model."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import xarray as xr
from torch import Tensor

from tl_posgen.core.feed import one_pass
from tl_posgen.core.inits import contiguous
from tl_posgen.core.measure import Measure
from tl_posgen.core.null_models import NullModels
from tl_posgen.core.numbers import TRAINED
from tl_posgen.core.result import Result
from tl_posgen.core.run import Run
from tl_posgen.core.store import Parts, content
from tl_posgen.editing.given import Hooks, under
from tl_posgen.models.loading.null_kinds import kind_and_seed, null_label
from tl_posgen.models.session import Session
from tl_posgen.progress import MAKING
from tl_posgen.progress import step as step_shown


class Step(NamedTuple):
    """One model (a null model by its label along init) under measures that share a pass, or one that runs it."""

    init: str | None
    label: str
    name: str
    measures: Sequence[Measure]
    is_shared: bool


def _analysis_steps(measures: Sequence[Measure], nulls: NullModels) -> Iterator[Step]:
    """Yield every step of an analysis: of the model, then of each null model."""
    for init in (None, *nulls):
        label, applicable = nulls.session.label, measures
        if init is not None:
            label, kind = null_label(init), kind_and_seed(init)[0].name
            applicable = [measure for measure in measures if kind in nulls.seeds_for(measure)]
        if fed := [measure for measure in applicable if measure.is_fed]:
            name = f"{fed[0].name} of one pass" if fed[0].runs_model else fed[0].name  # which has a step of its own
            yield Step(init, label, name if len(fed) == 1 else f"{len(fed)} measures", fed, True)
        for measure in (measure for measure in applicable if measure.runs_model):
            yield Step(init, label, measure.name, [measure], False)


def step_names(measures: Sequence[Measure], nulls: NullModels) -> list[str]:
    """Return the names of the steps of an analysis, with the making of each null model among them."""
    steps = [*_analysis_steps(measures, nulls)]
    return [MAKING] * len({step.init for step in steps} - {None}) + [step.name for step in steps]


@dataclass
class Analysis:
    """An analysis once everything is checked: measures of the model, then of each null model, step by step.

    Attributes:
        rows: token ids of every prompt, by measure.
        hooks: under which all passes run.
        in_place: whether each null model may take the model's place.
        depends_on: all that the finished parts depend on.
    """

    session: Session
    prompts: Any
    rows: Mapping[str, Sequence[Tensor]]
    where: Mapping[str, Any]
    seed: int
    nulls: NullModels
    hooks: Hooks = ()
    in_place: bool = False
    parts: Parts = field(default_factory=Parts)
    depends_on: Mapping[str, Any] = field(default_factory=dict)

    def datasets(self, measures: Sequence[Measure], finished: Mapping[str, Result]) -> dict[str, dict[str, xr.Dataset]]:
        """Return the datasets by measure, of the model and of each null model that any is repeated on."""
        by_init: dict[str, dict[str, xr.Dataset]] = {}
        for step in _analysis_steps(measures, self.nulls):
            init, measure = step.init or TRAINED, step.measures[0]
            if init not in by_init:
                results = {
                    name: result for name, result in finished.items() if init in (TRAINED, *result.numbers.nulls)
                }
                by_init[init] = {name: result.sel(init=init) for name, result in results.items()}
            after = [kind.name for kind in measure.after] + ([measure.name] if measure.is_fed else [])
            before = {} if step.is_shared else {name: by_init[init][name] for name in after}
            name = f"{step.name} {step.label}"
            depends_on = self._configuration(step, before)
            keep = partial(self.parts.condition, name, measure, depends_on)
            trained = None if step.init is None else by_init[TRAINED].get(measure.name)
            with step_shown(step.name, step.label):
                make = partial(self._made, step, before, trained, keep)
                measured = self.parts.datasets(name, step.measures, depends_on, make)
            if step.init is None:  # kept when the model had another name, perhaps
                measured = {name: data.assign_attrs(model=self._title(step.label)) for name, data in measured.items()}
            by_init[init] |= measured
        return by_init

    def _configuration(self, step: Step, before: Mapping[str, xr.Dataset]) -> dict[str, Any]:
        """Return all that a finished part of this step depends on; nothing where no parts are kept."""
        if self.parts.directory is None:
            return {}
        of_step = {"tokens": content(self.rows[step.measures[0].name]), "after": content(before)}
        return {**self.depends_on, **of_step, **({} if step.init is None else {"null_model": step.init})}

    def _title(self, label: str) -> str:
        """Return what a model is called in a dataset: with the metric that is called the loss there."""
        metric = self.session.choices.metric
        return label if metric is None else f"{label}, loss = {metric.name}"

    def _made(
        self, step: Step, before: Mapping[str, xr.Dataset], trained: xr.Dataset | None, keep: Any
    ) -> dict[str, xr.Dataset]:
        """Return the datasets of a step: its title says where a random init has the very weights of the model; arrays
        as a file gives them back."""
        label, session = step.label, self.session
        if step.init is not None:
            with nullcontext() if self.nulls.holds(step.init) else step_shown(MAKING, step.label):
                label, session = self.nulls.build(step.init, in_place=self.in_place)
        title = self._title(label)
        measure, rows = step.measures[0], self.rows[step.measures[0].name]
        with session.choosing(self.session.choices), under(session, self.hooks):
            if step.is_shared:
                options = {**self.where, "label": title, "intervals": step.init is None, "seed": self.seed}
                datasets = one_pass(session, rows, step.measures, **options)
            else:
                model = (session, self.prompts, rows, self.where, self.seed, step.init)
                data = measure.of_model(Run(measure, *model, before=before, trained=trained, keep=keep))
                if measure.is_fed:
                    data = data.merge(before[measure.name], combine_attrs="drop_conflicts")
                datasets = {measure.name: data.assign_attrs(model=title)}
        return {name: contiguous(data) for name, data in datasets.items()}
