"""A measure of core/ as the present engine and its collectors take it."""

from functools import cache, partial
from typing import Any

import xarray as xr

from tl_posgen.collector import Collector
from tl_posgen.core.measure import Measure
from tl_posgen.core.run import Run
from tl_posgen.core.sums import Sums
from tl_posgen.measure import Measure as Declaration
from tl_posgen.measure import Request
from tl_posgen.models.provenance import null_label


class SumsCollector(Collector):
    """Adds up what `of_layer` of a measure gives."""

    def __init__(self, measure: Measure):
        self.measure = measure
        self.sums = Sums(measure.variables, measure.labels())
        self.prompt = 0

    def update(self, layer: Any) -> None:
        if type(self.measure).of_layer is not Measure.of_layer:
            self.sums.add_layer(layer, self.measure.of_layer(layer))

    def finish(self, tokens: Any, logits: Any) -> None:
        self.sums.add(self.prompt, len(tokens), self.measure.of_logits(tokens, logits))

    def joined(self, other: Any) -> Any:
        both = SumsCollector(self.measure)
        both.sums = self.sums + other.sums
        return both

    def dataset(self) -> xr.Dataset:
        return self.measure.finish(self.sums)


@cache
def declaration_of(kind: type[Measure]) -> Declaration:
    """Return the declaration of a measure for registries and the engine."""
    return Declaration(
        name=kind.name,
        question=kind.question,
        explanation=kind.explanation,
        source=kind.source,
        variables=kind.variables,
        summarise=lambda data: {},
        options=kind,
        collector=SumsCollector if kind.is_fed else None,
        procedure=partial(run_measure, kind) if kind.runs_model else None,
        needs=kind.needs,
        after=tuple(one.name for one in kind.after),
        matrices=kind.matrices,
        min_prompts=kind.min_prompts,
        precise=kind.precise,
        figures=kind.figures,
        caveats=kind.caveats,
        without_meaning=kind.without_meaning,
        kind=kind,
    )


def run_measure(kind: type[Measure], model: Any, prompts: Any, request: Request, job: Any) -> Any:
    """Run a measure's `of_model` on the model; on the random inits when their turn comes."""
    measure: Any = request.options
    rows = measure.prompt_tokens(model, prompts, job.length, job.n_prompts)
    if not kind.is_fed:
        measure = measure.prepare(model, rows)
    where = {"layers": job.layers, "heads": job.heads}
    seeds = list(job.random_inits)
    trained: list[xr.Dataset] = []

    def of_model(one: Any, label: str, before: Any) -> xr.Dataset:
        init = next((seed for seed in seeds if label.startswith(null_label(seed))), None)
        run = Run(measure, one, prompts, rows, where, job.seed, init, len(seeds), label, before, job.plan, *trained)
        data = measure.of_model(run)
        fed = before.get(kind.name)
        whole = data if fed is None else data.merge(fed, combine_attrs="drop_conflicts")
        return whole.assign_attrs(model=label)

    found = job.result(Request(request.measure, measure), model, rows, of_model)
    trained.append(found.own)
    if not kind.has_null:
        del job.later[kind.name]
    return found
