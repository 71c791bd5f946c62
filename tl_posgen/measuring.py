"""One analysis under way: its measures of the model, then of each random init, part by part."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import xarray as xr
from torch import Tensor

from tl_posgen.feed import one_pass
from tl_posgen.hooks.given import Hooks, under
from tl_posgen.measure import Request
from tl_posgen.models.model import Model
from tl_posgen.models.provenance import model_label, null_label
from tl_posgen.null import RandomInits
from tl_posgen.parts import Parts
from tl_posgen.procedure import Job, as_result
from tl_posgen.progress import Passes
from tl_posgen.registry import request_of
from tl_posgen.result import Result


@dataclass(kw_only=True)
class Measuring:
    """What `analyze` does once everything is checked.

    Attributes:
        model, prompts, requests: to be measured; `tokens` are the prompts as the shared pass takes them.
        known: results that were finished before, by name.
        provenance: of the shared pass.
        where, cut: layers and heads; length, n_prompts and seed.
        hooks, named: under which passes run, and what they are called in the provenance.
        random_inits, in_place: the null models, and whether each may take the model's place.
        passes, parts, configuration: the bar; where finished parts are kept, and what they all depend on.
        results: what was found of the model.
        own, made: datasets of the model; those that procedures have just made.
        later: how the procedures' numbers are measured of a random init.
    """

    model: Model
    prompts: Any
    requests: Sequence[Request]
    tokens: Sequence[Tensor]
    known: Mapping[str, Result]
    provenance: Mapping[str, Any]
    where: Mapping[str, Any]
    cut: Mapping[str, Any]
    hooks: Hooks
    named: Mapping[str, Any]
    random_inits: RandomInits
    in_place: bool
    passes: Passes
    parts: Parts
    configuration: Mapping[str, Any]
    results: dict[str, Result] = field(init=False, default_factory=dict)
    later: dict[str, Callable[..., xr.Dataset]] = field(init=False, default_factory=dict)
    own: dict[str, xr.Dataset] = field(init=False, default_factory=dict)
    made: dict[str, xr.Dataset] = field(init=False, default_factory=dict)

    @cached_property
    def shared(self) -> list[Request]:
        """What one forward pass gives."""
        return [request for request in self.requests if request.measure.collector is not None]

    @cached_property
    def procedures(self) -> list[Request]:
        """What runs the model itself."""
        return [request for request in self.requests if request.measure.procedure is not None]

    @property
    def together(self) -> str:
        """What the shared pass is called."""
        return self.shared[0].name if len(self.shared) == 1 else f"{len(self.shared)} measures"

    def run(self) -> dict[str, Result]:
        """Everything, by name: those known before too."""
        self.of_model()
        repeated = [
            *(one for one in self.shared if one.measure.procedure is None),
            *(request for request in self.procedures if request.name in self.later),
        ]
        sides = [self.of_random_init(number, seed) for number, seed in enumerate(self.random_inits)] if repeated else []
        for request in repeated:
            result = self.results[request.name]
            if request.measure.kind is not None:
                nulls = [side[request.name] for side in sides]
                known = {**result.provenance, **self.named}
                self.results[request.name] = as_result(
                    request_of(result.measure), [self.own[request.name], *nulls], known
                )
                continue
            nulls = tuple(request.measure.describe(side[request.name]) for side in sides)
            self.results[request.name] = replace(result, nulls=nulls, provenance={**result.provenance, **self.named})
        self.later.clear()  # each holds the job that holds it, and the model
        return {**self.known, **self.results}

    def of_model(self) -> None:
        to_come = [request.name for request in self.procedures]
        if self.shared:
            with self.stage(self.together, to_come) as label:
                self.passes.plan(len(self.tokens))
                measure = partial(self.in_one_pass, self.model, label=label, intervals=True)
                own = self.parts.datasets(f"{self.together} {label}", self.shared, self.configuration, measure)
            alone = [one for one in self.shared if one.measure.procedure is None]
            self.results.update({one.name: as_result(one, [own[one.name]], self.provenance) for one in alone})
            self.own.update(own)
        for place, request in enumerate(self.procedures, 1):
            assert request.measure.procedure is not None
            with self.stage(request.name, to_come[place:]):
                found = request.measure.procedure(self.model, self.prompts, request, self.job(request))
            self.results[request.name] = found
            if request.measure.kind is not None:
                self.own[request.name] = self.made.pop(request.name)

    def of_random_init(self, number: int, seed: int) -> dict[str, xr.Dataset]:
        """The datasets of the random init of this seed."""
        side = {name: one.nulls[number] for name, one in self.known.items() if one.nulls}
        label, configuration = null_label(seed), {**self.configuration, "random_init": seed}
        measured = partial(self.measured_of, seed)
        if self.shared:
            with self.passes.stage(self.together, label):
                measure = partial(measured, self.in_one_pass)
                side |= self.parts.datasets(f"{self.together} {label}", self.shared, configuration, measure)
        for name, before in ((one.name, needed(one)) for one in self.procedures if one.name in self.later):
            with self.passes.stage(name, label):
                side[name] = self.later[name](seed, {earlier: side[earlier] for earlier in before}, measured)
        return side

    def measured_of(self, seed: int, measure: Callable[..., Any]) -> Any:
        """`measure(model, label=label)` of the random init of this seed, under the hooks."""
        label, model = self.random_inits.build(seed, in_place=self.in_place)
        with under(model, self.hooks):
            return measure(model, label=label)

    @contextmanager
    def stage(self, name: str, to_come: Sequence[str]):
        """While the block runs, passes are of this measure and the model, under the hooks; the model's label."""
        label = model_label(self.model)
        with self.passes.stage(name, label, to_come), under(self.model, self.hooks):
            yield label

    def in_one_pass(self, model: Model, *, label: str, intervals: bool = False) -> dict[str, xr.Dataset]:
        how = {**self.where, "seed": self.cut["seed"], "label": label, "intervals": intervals}
        return one_pass(model, self.tokens, self.shared, **how)

    def job(self, request: Request) -> Job:
        return Job(
            **self.where,
            **self.cut,
            random_inits=self.random_inits,
            plan=self.passes.plan,
            after={name: self.results.get(name) or self.known[name] for name in request.measure.after},
            fed={request.name: self.own[request.name]} if request.measure.collector else {},
            made=self.made,
            later=self.later,
            parts=self.parts,
            configuration=self.configuration,
        )


def needed(request: Request) -> tuple[str, ...]:
    """Names of the datasets that a procedure reads: its own of the shared pass, and those it comes after."""
    return (*request.measure.after, *([request.name] if request.measure.collector else []))
