"""The main job: prompts through a model once, every measure fed layer by layer, and the same for random inits."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import xarray as xr
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.core import registry
from tl_posgen.core.feed import one_pass
from tl_posgen.core.measure import Measure
from tl_posgen.core.numbers import TRAINED
from tl_posgen.core.options import require
from tl_posgen.core.random_inits import RandomInits, check_seed, check_seeds, random_inits_of
from tl_posgen.core.report import Report
from tl_posgen.core.result import Result, contiguous, joined
from tl_posgen.core.run import Run
from tl_posgen.core.store import Parts, configuration_of, content, refuse_hooks
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.hooks.given import Hooks, check_hooks, under
from tl_posgen.models import open_model
from tl_posgen.models.conversion.weights import release
from tl_posgen.models.loading.load import is_ours
from tl_posgen.models.loss import require_context, require_one_length
from tl_posgen.models.model import Model
from tl_posgen.models.provenance import model_label, null_label, provenance_of
from tl_posgen.models.selection import select_heads
from tl_posgen.models.streaming.stream import chosen
from tl_posgen.models.tokens import to_prompts
from tl_posgen.models.wrapped import wrap
from tl_posgen.progress import Passes

Prompts: TypeAlias = str | Sequence[Any] | Int[Tensor, "batch pos"] | Int[Tensor, " pos"]
Measures: TypeAlias = str | Measure | type[Measure] | Sequence[Any] | None


def analyze(
    model: Any,
    prompts: Prompts,
    *,
    measures: Measures = None,
    layers: Sequence[int] | None = None,
    heads: Any = None,
    length: int | None = None,
    n_prompts: int | None = None,
    seed: int = 0,
    null_seeds: Sequence[int] = (0,),
    fwd_hooks: Hooks = (),
    after: Mapping[str, Result] | None = None,
    skip_unsupported: bool = False,
    streaming: bool | None = None,
    keep: str | os.PathLike | Parts | None = None,
    progress: bool = True,
) -> Report:
    """Measure how a model's attention uses position: one forward pass per prompt, shared by all that one pass can give.

    Args:
        model: a HookedTransformer or TransformerBridge; or a name or directory for `load_model`, or a `Pretrained`:
            what is loaded here makes room for its random inits when it has been measured.
        prompts: a text, texts, token ids [batch, pos], or what a Hugging Face tokenizer returns. A text is tokenised
            with the tokenizer's own special tokens. Padding is left out, see `tl_posgen.models.tokens.to_prompts`.
        measures: names, or measures with options such as `ThreeAxis(ridge=1)`; three_axis, variance, mean_key and
            attention_examples if left out.
        layers: restrict the analysis; all if left out.
        heads: indices, meant in every chosen layer; or (layer, head) pairs; or a frame with columns layer and head,
            such as `report.heads("slash", top=5)`. All if left out.
        length, n_prompts: cut texts into n_prompts consecutive prompts of `length` tokens.
        seed: of random draws.
        null_seeds: seeds of the randomly initialised models of the same shape that everything is repeated on; () for
            none.
        fwd_hooks: hooks under which everything is measured, as TransformerLens takes them: (name of a hook point or a
            function that chooses names, hook) each; the random inits under the same. Beside the report of the intact
            model, `tl_posgen.compare` shows what they change.
        after: finished results (a `Report`, say) of the same model, prompts and null_seeds: what a measure needs of
            them is taken from there and not measured again.
        skip_unsupported: leave out measures that cannot be had of this model, with a word, instead of refusing.
        streaming: whether forward passes form no [query, key] matrix, see `tl_posgen.streaming`; if left out, those of
            prompts longer than 1,024 tokens where the model allows it.
        keep: directory for finished parts: what the measures that share a pass, and each of the others, found of the
            model and of each random init. An analysis that was stopped goes on from there when it is called again with
            the same weights, prompts and settings; measures of other packages, and what shares their pass, are
            measured anew.
        progress: show a bar of the forward passes, and say early how long it takes if that is more than 20 s.

    Returns:
        A `Report`: a mapping of measure name to `Result`.

    Raises:
        InputError: unusable prompts, layers or heads that do not exist, unknown measures, hook points; `keep` with
            hooks; a finished part that is damaged: the message names its file.
        UnsupportedModelError: a layer whose scores cannot be recomputed from its q and k.

    Example:
        >>> import tl_posgen
        >>> report = tl_posgen.analyze("mini", "The White Rabbit put on his spectacles.", null_seeds=())
        >>> report["three_axis"].frame().columns.tolist()
        ['layer', 'head', 'r', 'r_within_rows']
    """
    seed = check_seed(seed)
    if not isinstance(null_seeds, RandomInits):
        check_seeds(null_seeds)
    require("streaming", streaming, bool | None)
    known, asked = check_after(after), registry.requested(measures)
    for measure in asked:
        require_options(measure, known.get(measure.name))
    to_measure = [measure for measure in asked if measure.name not in known]
    ours = is_ours(model)
    model = open_model(model, precise=any(measure.precise for measure in to_measure))
    hooked = {"fwd_hooks": named} if (named := check_hooks(model, fwd_hooks)) else {}
    keeping = Parts.kept_in(keep)
    if keep is not None:
        refuse_hooks(model, hooked)
    matrices = max((measure.matrices for measure in to_measure), default=0)
    passes = Passes(shown=progress, models=1 + len(null_seeds))
    with wrap(model).exclusive("analyze"), chosen(streaming, matrices), passes, keeping as parts:
        to_measure = supported(to_measure, model, skip_unsupported)
        cut: dict[str, Any] = {"length": length, "n_prompts": n_prompts}
        rows = rows_of_measures(to_measure, known, model, prompts, cut)
        random_inits = random_inits_of(model, null_seeds)
        where = {"layers": layers, "heads": heads}
        selected = select_heads(model, layers, heads)
        configuration: dict[str, Any] = {}
        if parts.directory is not None:
            listed = layers if layers is None or isinstance(layers, int) else list(layers)
            which = {"layers": listed, "all_heads": heads is None, "heads": selected}
            configuration = configuration_of(model, prompts, **cut, seed=seed, **which, streaming=streaming)
        analysis = Analysis(
            model, prompts, rows, where, seed, fwd_hooks, random_inits, ours, passes, parts, configuration
        )
        details = references(selected, layers, heads) | hooked
        for name, result in known.items():
            require_same(name, result, analysis.provenance(rows[name]) | details)
        results = analysis.results([prepared(one, model, rows[one.name]) for one in to_measure], known, details)
        if random_inits is not null_seeds:
            random_inits.let_go()
        if ours:
            release(model)
        found = {measure.name: results[measure.name] for measure in asked if measure.name in results}
        first = next(iter(found.values())).provenance
        return Report(found, {name: value for name, value in first.items() if name != "options"})


@dataclass
class Analysis:
    """An analysis once everything is checked: its measures of the model, then of each random init, part by part.

    Attributes:
        model, prompts: as `analyze` was given them, the model loaded.
        rows: token ids of every prompt, by measure.
        where, seed: layers and heads; of draws.
        hooks: under which all passes run.
        random_inits, in_place: the null models, and whether each may take the model's place.
        passes, parts, configuration: the bar; where finished parts are kept, and all that they depend on.
        trained: datasets of the model itself, by measure; empty while they are made.
    """

    model: Model
    prompts: Any
    rows: Mapping[str, Sequence[Tensor]]
    where: Mapping[str, Any]
    seed: int
    hooks: Hooks
    random_inits: RandomInits
    in_place: bool
    passes: Passes
    parts: Parts
    configuration: Mapping[str, Any]
    trained: dict[str, xr.Dataset] = field(default_factory=dict)
    _provenances: dict[int, dict[str, Any]] = field(default_factory=dict)

    def results(
        self, measures: Sequence[Measure], known: Mapping[str, Result], details: Mapping[str, Any]
    ) -> dict[str, Result]:
        """Return the result of every measure by name, those known before too."""
        provenances = {one.name: self.provenance(self.rows[one.name]) for one in measures}
        self.trained = self.datasets(measures, None, {name: one.own for name, one in known.items()})
        sides = {TRAINED: self.trained}
        for number, seed in enumerate(self.random_inits):
            before = {name: one.nulls[number] for name, one in known.items() if one.nulls}
            sides[str(seed)] = self.datasets([one for one in measures if one.has_null], seed, before)
        found = dict(known)
        for measure in measures:
            each = {init: side[measure.name] for init, side in sides.items() if measure.name in side}
            labels = [str(data.attrs["model"]) for data in each.values()]
            options = {"options": measure.options()} if measure.options() else {}
            provenance = {**provenances[measure.name], **details, **options}
            found[measure.name] = Result(measure, joined(measure, each, labels), provenance)
        return found

    def provenance(self, rows: Sequence[Tensor]) -> dict[str, Any]:
        """Return what is needed to run the same analysis again, of these prompts."""
        if id(rows) not in self._provenances:
            self._provenances[id(rows)] = provenance_of(self.model, rows, self.random_inits, self.seed)
        return self._provenances[id(rows)]

    def datasets(
        self, measures: Sequence[Measure], init: int | None, before: Mapping[str, xr.Dataset]
    ) -> dict[str, xr.Dataset]:
        """Return the dataset of every measure for one model, by name: the shared pass, then those that run it."""
        label = model_label(self.model) if init is None else null_label(init)
        fed = [measure for measure in measures if measure.is_fed]
        running = [measure for measure in measures if measure.runs_model]
        to_come = [measure.name for measure in running]
        found = dict(before)
        if fed:
            name = fed[0].name if len(fed) == 1 else f"{len(fed)} measures"
            with self.passes.stage(name, label, to_come if init is None else ()):
                found |= self.kept(name, fed, init, label, lambda: self.fed(fed, init, label), {})
        for place, measure in enumerate(running, 1):
            read = {kind.name: found[kind.name] for kind in measure.after}
            read |= {measure.name: found[measure.name]} if measure.is_fed else {}
            with self.passes.stage(measure.name, label, to_come[place:] if init is None else ()):
                found |= self.kept(
                    *(measure.name, [measure], init, label),
                    lambda measure=measure, read=read: {measure.name: self.run(measure, init, label, read)},
                    read,
                )
        return {measure.name: found[measure.name] for measure in measures}

    def kept(self, name: str, measures: Sequence[Measure], init: int | None, label: str, make: Any, read: Any) -> Any:
        """Return the finished part of these measures and this model, or make it: arrays as a file gives them back."""
        if self.parts.directory is None:
            return stored_alike(make())
        more = {"tokens": content(list(self.rows[measures[0].name])), "after": content(dict(read))}
        more |= {} if init is None else {"random_init": init}
        configuration = {**self.configuration, **more}
        return self.parts.datasets(f"{name} {label}", measures, configuration, lambda: stored_alike(make()))

    def built(self, init: int | None, label: str) -> tuple[str, Model]:
        """Return (label, model) of an init; a label says where a random init has the very weights of the model."""
        return (label, self.model) if init is None else self.random_inits.build(init, in_place=self.in_place)

    def fed(self, measures: Sequence[Measure], init: int | None, label: str) -> dict[str, xr.Dataset]:
        """Return the datasets of measures that share one pass."""
        rows = self.rows[measures[0].name]
        if init is None:
            self.passes.plan(len(rows))
        label, model = self.built(init, label)
        with under(model, self.hooks):
            return one_pass(model, rows, measures, **self.where, label=label, intervals=init is None)

    def run(self, measure: Measure, init: int | None, label: str, read: Mapping[str, xr.Dataset]) -> xr.Dataset:
        """Return the dataset of a measure that runs the model."""
        label, model = self.built(init, label)
        run = Run(
            measure,
            model,
            self.prompts,
            self.rows[measure.name],
            self.where,
            self.seed,
            init,
            len(self.random_inits),
            label,
            read,
            self.passes.plan,
            self.trained.get(measure.name),
        )
        with under(model, self.hooks):
            data = measure.of_model(run)
        if measure.is_fed:
            data = data.merge(read[measure.name], combine_attrs="drop_conflicts")
        return data.assign_attrs(model=label)


def stored_alike(datasets: Mapping[str, xr.Dataset]) -> dict[str, xr.Dataset]:
    """Return datasets as a file gives them back."""
    return {name: contiguous(data) for name, data in datasets.items()}


def rows_of_measures(
    measures: Sequence[Measure], known: Mapping[str, Result], model: Model, prompts: Any, cut: Mapping[str, Any]
) -> dict[str, list[Tensor]]:
    """Return the token ids of every prompt by measure, the same list for all that take them alike; refuse prompts that
    a measure cannot be had of. Of measures known before, too: their provenance is compared."""
    found: dict[str, list[Tensor]] = {}
    shared: list[Tensor] = []
    if any(type(one).prompt_tokens is Measure.prompt_tokens for one in measures) or known:
        one_length = any(measure.one_length for measure in measures)
        if one_length and isinstance(cut["length"], int):
            require_context(model, cut["length"])
        shared = to_prompts(model, prompts, **cut)
    for measure in [*measures, *(result.measure for result in known.values())]:
        own = (
            shared
            if type(measure).prompt_tokens is Measure.prompt_tokens
            else list(measure.prompt_tokens(model, prompts, **cut))
        )
        if measure.name not in known:
            require_prompts(measure, model, own)
        found[measure.name] = own
    return found


def require_prompts(measure: Measure, model: Model, rows: Sequence[Tensor]) -> None:
    """Refuse prompts that a measure cannot be had of."""
    if short := [n for n, row in enumerate(rows) if len(row) < 2]:
        raise InputError(f"prompt {short[0]} has only {len(rows[short[0]])} token; two are needed at least")
    if measure.one_length:
        require_one_length("", rows)
        require_context(model, len(rows[0]))
    if len(rows) < measure.min_prompts:
        least = measure.min_prompts
        raise InputError(f"{measure.name} compares prompts: {least} at least, not {len(rows)}; give n_prompts={least}")


def prepared(measure: Measure, model: Model, rows: Sequence[Tensor]) -> Measure:
    """Return a measure with options that were left out filled in."""
    return measure.prepare(model, rows)


def check_after(after: Any) -> dict[str, Result]:
    """Return finished results by name; InputError for anything else."""
    known = dict(after) if isinstance(after, Mapping) else {} if after is None else None
    if known is None or not all(isinstance(one, Result) and one.name == name for name, one in known.items()):
        raise InputError("after: give a Report, or a mapping of measure name to its Result")
    return known


def require_options(measure: Measure, known: Result | None) -> None:
    """Refuse a finished result of other options than are asked for."""
    if known is None:
        return
    then, now = known.provenance.get("options", {}), measure.options()
    if any(then.get(name) != value for name, value in now.items() if value is not None):
        raise InputError(f"after: {measure.name} was measured with {then}, and is asked for with {now}; leave it out")


def require_same(name: str, result: Result, provenance: Mapping[str, Any]) -> None:
    """Refuse a finished result of another model, other prompts or other random inits."""
    for key in ("weights", "backend", "dtype", "tokens_sha256", "null_seeds", "heads", "fwd_hooks"):
        then, now = (one.get(key, "all" if key == "heads" else "none") for one in (result.provenance, provenance))
        if then != now:
            raise InputError(
                f"after: {name} was measured with another {key} ({then}, now {now}); leave it out to measure it anew"
            )


def supported(measures: Sequence[Measure], model: Any, skip: bool) -> list[Measure]:
    """Return the measures that can be had of this model; others are refused, or with `skip` left out with a message.

    Raises:
        UnsupportedModelError: such a measure; with `skip`, where it leaves none of them.
    """
    refused = refusals(measures, model)
    if refused and not skip:
        raise next(iter(refused.values()))
    if refused and len(refused) == len(measures):
        raise UnsupportedModelError("; ".join(f"{name} cannot be had: {reason}" for name, reason in refused.items()))
    for name, reason in refused.items():
        tqdm.write(f"{name} is left out: {reason}", file=sys.stderr)
    return [measure for measure in measures if measure.name not in refused]


def refusals(measures: Sequence[Measure], model: Any) -> dict[str, UnsupportedModelError]:
    """Return why measures cannot be had of this model, or of those that they come after, by name."""
    refused: dict[str, UnsupportedModelError] = {}
    for measure in measures:
        try:
            measure.requires(model)
        except UnsupportedModelError as reason:
            refused[measure.name] = reason
        for kind in measure.after:
            if kind.name in refused:
                refused.setdefault(measure.name, refused[kind.name])
    return refused


def references(selected: Mapping[int, Sequence[int]], layers: Any, heads: Any) -> dict[str, Any]:
    """Return what the provenance holds of chosen heads: nothing of all, else their references such as "3.6"."""
    if layers is None and heads is None:
        return {}
    return {"heads": [f"{layer}.{head}" for layer, chosen in selected.items() for head in chosen]}
