"""What a measure that runs the model itself is told, and how what it found becomes a Result."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import xarray as xr
from jaxtyping import Int
from torch import Tensor

from tl_posgen import registry
from tl_posgen.core.result import Result as NewResult
from tl_posgen.core.result import joined
from tl_posgen.measure import Request
from tl_posgen.models.provenance import model_label, null_label, provenance_of
from tl_posgen.models.selection import select_heads
from tl_posgen.null import RandomInits
from tl_posgen.parts import Parts, content
from tl_posgen.result import Result


@dataclass(frozen=True, kw_only=True)
class Job:
    """How a measure is to be taken: what every procedure is told beside its model, prompts and options.

    Attributes:
        layers, heads, length, n_prompts, seed: as in `analyze`.
        random_inits: the null models.
        plan: (each, once=0), called before the work: how many prompts' forward passes are to come of the model and
            again of every random init, and how many of the model alone. What is known later may be added then.
        after: results of the same run, those that the measure names in `after`; without their random inits, which are
            measured when everything has been measured of the model.
        later: how what `result` was given is measured of a random init, by measure: when its turn comes.
        made: the dataset of the model, by measure.
        fed: what the shared pass gave this measure of the model, under its name.
        parts: where finished parts are kept.
        configuration: what all parts of this run depend on.
    """

    layers: Sequence[int] | None = None
    heads: Any = None
    length: int | None = None
    n_prompts: int | None = None
    seed: int = 0
    random_inits: RandomInits
    plan: Callable[..., None]
    after: Mapping[str, Result] = field(default_factory=dict)
    later: dict[str, Callable[..., xr.Dataset]] = field(default_factory=dict)
    made: dict[str, xr.Dataset] = field(default_factory=dict)
    fed: Mapping[str, xr.Dataset] = field(default_factory=dict)
    parts: Parts = field(default_factory=Parts)
    configuration: Mapping[str, Any] = field(default_factory=dict)

    def result(
        self,
        request: Request,
        model: Any,
        tokens: Sequence[Int[Tensor, " _"]],
        of_model: Callable[..., xr.Dataset],
    ) -> Result:
        """`of_model(model, label, after)` of the model as a Result; `analyze` adds that of every random init.

        `after` is what `job.after` holds of that model: dataset by name.
        """
        label, before = model_label(model), {name: one.own for name, one in self.after.items()} | self.fed
        dataset = self.made[request.name] = self.kept(
            request, tokens, label, lambda: of_model(model, label, before), after=before
        )
        self.later[request.name] = partial(self.of_random_init, request, tokens, of_model)
        chosen = references(select_heads(model, self.layers, self.heads), self.layers, self.heads)
        return as_result(request, [dataset], provenance_of(model, tokens, self.random_inits, self.seed) | chosen)

    def of_random_init(
        self,
        request: Request,
        tokens: Sequence[Int[Tensor, " _"]],
        of_model: Callable[..., xr.Dataset],
        null_seed: int,
        before: Mapping[str, xr.Dataset],
        measured: Callable[..., xr.Dataset],
    ) -> xr.Dataset:
        """`of_model` of the random init of this seed; `measured` makes it and calls a function of it and its label."""

        def of_it(other: Any, label: str) -> xr.Dataset:
            return of_model(other, label, before)

        return self.kept(
            request, tokens, null_label(null_seed), partial(measured, of_it), after=before, random_init=null_seed
        )

    def kept(
        self,
        request: Request,
        tokens: Sequence[Int[Tensor, " _"]],
        label: str,
        make: Callable[[], xr.Dataset],
        **more: Any,
    ) -> xr.Dataset:
        """The finished part of this request and model, or `make()`; `more` is what it depends on beside them."""
        if self.parts.directory is None:
            return make()
        configuration = {**self.configuration, "tokens": content(list(tokens)), **content(more)}
        found = self.parts.datasets(f"{request.name} {label}", [request], configuration, lambda: {request.name: make()})
        return found[request.name]


def as_result(request: Request, datasets: Sequence[xr.Dataset], provenance: Mapping[str, Any]):
    """A Result of a model's dataset and those of its random inits, every variable described."""
    measure = request.measure
    if measure.kind is not None:
        sides = dict(zip(["trained", *map(str, provenance.get("null_seeds") or [])], datasets, strict=False))
        labels = [str(one.attrs.get("model", name)) for name, one in sides.items()]
        with_options = {**provenance, "options": request.as_dict()} if request.as_dict() else dict(provenance)
        return NewResult(request.options, joined(request.options, sides, labels), with_options)
    own, *nulls = (measure.describe(dataset) for dataset in datasets)
    registered = registry.find(request.name) is measure
    options = {"options": request.as_dict()} if request.options else {}
    return Result(request.name, own, tuple(nulls), {**provenance, **options}, declared=None if registered else measure)


def references(selected: Mapping[int, Sequence[int]], layers: Any, heads: Any) -> dict[str, Any]:
    """What the provenance says of chosen heads: nothing of all, else their references such as "3.6"."""
    if layers is None and heads is None:
        return {}
    return {"heads": [f"{layer}.{head}" for layer, chosen in selected.items() for head in chosen]}
