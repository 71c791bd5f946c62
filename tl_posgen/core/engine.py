"""The main job: prompts through a model once, every measure fed layer by layer, and the same for random inits."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import xarray as xr
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.arithmetic import full_precision
from tl_posgen.core import registry
from tl_posgen.core.feed import one_pass
from tl_posgen.core.inits import contiguous, result_of
from tl_posgen.core.measure import Measure
from tl_posgen.core.null_models import NullModels, Nulls, null_models_of, seeds_by_kind
from tl_posgen.core.numbers import TRAINED
from tl_posgen.core.options import require
from tl_posgen.core.report import Report
from tl_posgen.core.result import Result
from tl_posgen.core.run import Run
from tl_posgen.core.store import (
    Parts,
    check_after,
    configuration_of,
    content,
    require_options,
    require_same,
)
from tl_posgen.editing.given import Hooks, added_hooks, check_hooks, under
from tl_posgen.errors import InputError, NothingToMeasureError, UnsupportedModelError, check_seed
from tl_posgen.models import open_session
from tl_posgen.models.loading.load import AnyModel, is_ours
from tl_posgen.models.loading.null_kinds import RANDOM_INIT, kind_and_seed, null_label
from tl_posgen.models.loading.random_init import check_draws_on
from tl_posgen.models.memory import release
from tl_posgen.models.metric import as_metric
from tl_posgen.models.provenance import logits_digest, provenance_of
from tl_posgen.models.selection import Heads, Layers, head_name, select_heads
from tl_posgen.models.session import Choices, Session
from tl_posgen.models.tokens import first_id, require_context, require_one_length, text_provenance, to_prompts
from tl_posgen.progress import MAKING, steps_shown
from tl_posgen.progress import step as step_shown

Prompts: TypeAlias = str | Sequence[Any] | Int[Tensor, "batch pos"] | Int[Tensor, " pos"]
Measures: TypeAlias = str | Measure | type[Measure] | Sequence[Any] | None


@full_precision()
def analyze(
    model: AnyModel,
    prompts: Prompts | None = None,
    *,
    measures: Measures = None,
    layers: Layers = None,
    heads: Heads = None,
    length: int | None = None,
    n_prompts: int | None = None,
    consecutive: bool = False,
    first: str | int | None = None,
    seed: int = 0,
    nulls: Nulls | NullModels = 1,
    null_device: str = "cpu",
    fwd_hooks: Hooks = (),
    metric: Any = None,
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
        measures: names, or measures with options such as `ThreeAxis(ridge=1)`; variance, three_axis, mean_key and
            attention_examples if left out.
        layers: restrict the analysis; all if left out.
        heads: "L3H1", "3.1" or (3, 1), or several in a list; or a frame with columns layer and head, such as
            `report.heads("slash", top=5)`. All if left out.
        length, n_prompts: cut texts into n_prompts prompts of `length` tokens, spread evenly over the whole text; with
            length alone, into as many as the text has, which takes long for a book.
        consecutive: take them one after the other from its beginning. Neighbours depend on each other, so that
            intervals of the text's numbers are then too narrow; see docs/concepts.md.
        first: a token that every prompt begins with, as a string or an id, in the place of the tokenizer's BOS: such as
            "<|endoftext|>" of a model without one, whose first token is a word that it makes an attention sink.
        seed: of random draws.
        nulls: how many randomly initialised models of the same shape everything is repeated on (seeds 0, 1, ..), 0 for
            no null model. Beside them stands one model of shuffled weights, for the measures that share a single pass:
            it predicts nothing that an intervention could take away. Or seeds by kind of null model, such as
            `{"random init": (0, 1), "shuffled": (3,)}`: these kinds alone, everything repeated on each; see
            `tl_posgen.models.loading.null_kinds`.
        null_device: on which the weights of random inits are drawn: "cuda" is far sooner for a model of billions of
            weights, and draws other numbers than the CPU from one seed.
        fwd_hooks: hooks under which everything is measured, as TransformerLens takes them: (name of a hook point or a
            function that chooses names, hook) each; the random inits under the same. Each forward pass is then of one
            prompt, and so it is under hooks that were added to the model before. Beside the report of the intact
            model, `tl_posgen.compare` shows what they change.
        metric: in the place of the loss, in every measure that runs or judges the model: a function of logits
            [prompt, pos, vocabulary] and tokens [prompt, pos] that returns a value a prompt or a predicted token, or
            `tl_posgen.logit_difference(...)`. Titles name it; sentences, tables and axes speak of the metric, without a
            unit, but the cloze and random copies keep to the loss. Shares recovered, cost and harm take higher as
            worse: give the negative of a metric where lower is worse.
        after: finished results (a `Report`, say) of the same model, prompts, nulls, options, seed and first, without
            hooks and metric: what a measure needs of them is taken from there and not measured again.
        skip_unsupported: leave out measures that this model does not allow, with a message, instead of refusing.
        streaming: whether forward passes form no [query, key] matrix, see `tl_posgen.streaming`; if left out, those of
            prompts longer than 1,024 tokens where the model allows it.
        keep: directory for finished parts: what the measures that share a pass, and each of the others, found of the
            model and of each random init, and of one that is not finished the conditions that are (and took 0.2 s). An
            analysis that was stopped goes on from there when it is called again with the same weights, prompts, code
            and settings; a measure whose code is in no file (a notebook's), and what shares its pass, is measured anew.
        progress: show a bar of the steps, a measure (or those that share a pass) on one model each.

    Returns:
        A `Report`: a mapping of measure name to `Result`.

    Raises:
        InputError: no prompts or unusable ones, layers or heads that do not exist, unknown measures, hook points;
            `keep` with hooks or a metric; a finished part that is damaged: the message names its file.
        UnsupportedModelError: a layer whose scores cannot be recomputed from its q and k.

    Example:
        >>> import tl_posgen
        >>> report = tl_posgen.analyze("mini", "The White Rabbit put on his spectacles.", nulls=0)
        >>> report["three_axis"].frame().columns.tolist()
        ['layer', 'head', 'r', 'r_within_rows']
    """
    # refused without a model
    if prompts is None:
        raise InputError("analyze: give the text to measure on behind the model, such as tl_posgen.bundled_text()")
    seed, requested, metric = check_seed(seed), registry.requested(measures), as_metric(metric)
    finished = check_after(after)
    if not isinstance(nulls, NullModels):
        seeds_by_kind(nulls)
    check_draws_on(null_device)
    require("streaming", streaming, bool | None)
    require("consecutive", consecutive, bool)
    to_measure = [measure for measure in requested if measure.name not in finished]

    # refused before a forward pass
    in_place = is_ours(model)
    session = open_session(model, precise=any(measure.precise for measure in to_measure))
    model = session.model
    hooked = {"fwd_hooks": named} if (named := check_hooks(session, fwd_hooks)) else {}
    there_before = {"added_hooks": named} if (named := added_hooks(session)) else {}
    keeping = Parts.kept_in(keep)
    of_functions = ["fwd_hooks do"] * bool(hooked) + ["a metric does"] * (metric is not None)
    if keep is not None and of_functions:
        raise InputError(f"keep: another run cannot know what {of_functions[0]}; give one of them")
    of_functions += ["hooks on the model do"] * bool(there_before)
    if finished and of_functions:
        raise InputError(f"after: a finished result cannot know what {of_functions[0]}; leave one of them out")
    matrices = max((measure.matrices for measure in to_measure), default=0)
    one_by_one = bool(fwd_hooks or there_before)
    choices = Choices(streaming, matrices, metric, one_by_one, None if first is None else first_id(session, first))
    null_models = null_models_of(session, nulls, null_device)
    with (
        session.exclusive("analyze"),
        session.choosing(choices),
        keeping as parts,
    ):
        to_measure = supported(to_measure, session, skip_unsupported)
        cut: dict[str, Any] = {"length": length, "n_prompts": n_prompts, "consecutive": consecutive}
        rows = _rows_of_measures(to_measure, session, prompts, cut, [result.measure for result in finished.values()])
        where = {"layers": layers, "heads": heads}
        chosen_heads = select_heads(session, **where)
        prepared = [measure.prepare(session, rows[measure.name]) for measure in to_measure]
        for measure in prepared:
            measure.refuse(Run(measure, session, prompts, rows[measure.name], where, seed))
        details: dict[str, Any] = (
            {"logits": logits_digest(session)} | hooked | there_before | text_provenance(prompts, **cut)
        )
        if layers is not None or heads is not None:
            details["heads"] = [head_name(layer, head) for layer, indices in chosen_heads.items() for head in indices]
        if first is not None:
            details["first"] = choices.first
        if null_models.device != "cpu":
            details["null_device"] = null_models.device
        if null_models.by_kind.get(RANDOM_INIT):
            details["random_init"] = session.backend.drawing_rule(session.origin)
        if metric is not None:
            details["metric"] = metric.name
        lists = {id(tokens): tokens for tokens in rows.values()}  # one for all measures that share prompts
        of_rows = {key: provenance_of(session, tokens, seed=seed) for key, tokens in lists.items()}
        for name, result in finished.items():
            now = of_rows[id(rows[name])] | details | {"nulls": null_models.seeds_for(result.measure)}
            require_same(name, result, now)
            for measure in (measure for measure in requested if measure.name == name):
                require_options(measure.prepare(session, rows[name]), result)
        depends_on: dict[str, Any] = {}
        if parts.directory is not None:
            selection = {"layers": layers, "all_heads": heads is None, "heads": chosen_heads, "first": choices.first}
            depends_on = configuration_of(
                session,
                prompts,
                details["logits"],
                **cut,
                **selection,
                seed=seed,
                streaming=streaming,
                null_device=null_models.device,
            )
        analysis = _Analysis(session, prompts, rows, where, seed, null_models, fwd_hooks, in_place, parts, depends_on)
        with steps_shown(step_names(prepared, null_models), shown=progress):
            by_init = analysis.datasets(prepared, finished)
        if null_models is not nulls:
            null_models.free_memory()
        if in_place:
            release(model)
    results = dict(finished)
    for measure in prepared:
        datasets = {init: of_init[measure.name] for init, of_init in by_init.items() if measure.name in of_init}
        provenance = of_rows[id(rows[measure.name])] | details | {"nulls": null_models.seeds_for(measure)}
        results[measure.name] = result_of(measure, datasets, provenance)
    reported = {measure.name: results[measure.name] for measure in requested if measure.name in results}
    of_report = dict(next(iter(reported.values())).provenance)
    of_report["nulls"] = {
        kind: seeds for result in reported.values() for kind, seeds in result.provenance["nulls"].items()
    }
    return Report(reported, {name: value for name, value in of_report.items() if name != "options"})


class _Step(NamedTuple):
    """One model (a null model by its label along init) under measures that share a pass, or one that runs it."""

    init: str | None
    label: str
    name: str
    measures: Sequence[Measure]
    is_shared: bool


def steps_of(measures: Sequence[Measure], nulls: NullModels) -> Iterator[_Step]:
    """Yield every step of an analysis: of the model, then of each null model."""
    for init in (None, *nulls):
        label, applicable = nulls.session.label, measures
        if init is not None:
            label, kind = null_label(init), kind_and_seed(init)[0].name
            applicable = [measure for measure in measures if kind in nulls.seeds_for(measure)]
        if fed := [measure for measure in applicable if measure.is_fed]:
            name = f"{fed[0].name} of one pass" if fed[0].runs_model else fed[0].name  # which has a step of its own
            yield _Step(init, label, name if len(fed) == 1 else f"{len(fed)} measures", fed, True)
        for measure in (measure for measure in applicable if measure.runs_model):
            yield _Step(init, label, measure.name, [measure], False)


def step_names(measures: Sequence[Measure], nulls: NullModels) -> list[str]:
    """Return the names of the steps of an analysis, with the making of each null model among them."""
    steps = [*steps_of(measures, nulls)]
    return [MAKING] * len({step.init for step in steps} - {None}) + [step.name for step in steps]


@dataclass
class _Analysis:
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
        for step in steps_of(measures, self.nulls):
            init, measure = step.init or TRAINED, step.measures[0]
            if init not in by_init:
                results = {
                    name: result for name, result in finished.items() if init in (TRAINED, *result.numbers.nulls)
                }
                by_init[init] = {name: result.sel(init=init) for name, result in results.items()}
            after = [kind.name for kind in measure.after] + ([measure.name] if measure.is_fed else [])
            before = {} if step.is_shared else {name: by_init[init][name] for name in after}
            depends_on: dict[str, Any] = {}
            if self.parts.directory is not None:
                depends_on = {**self.depends_on, "tokens": content(self.rows[measure.name]), "after": content(before)}
                depends_on |= {} if step.init is None else {"null_model": step.init}
            name = f"{step.name} {step.label}"
            keep = partial(self.parts.condition, name, measure, depends_on)
            trained = None if step.init is None else by_init[TRAINED].get(measure.name)
            with step_shown(step.name, step.label):
                make = partial(self._made, step, before, trained, None if self.parts.directory is None else keep)
                measured = self.parts.datasets(name, step.measures, depends_on, make)
            if depends_on and step.init is None:  # kept when the model had another name, perhaps
                measured = {name: data.assign_attrs(model=step.label) for name, data in measured.items()}
            by_init[init] |= measured
        return by_init

    def _made(
        self, step: _Step, before: Mapping[str, xr.Dataset], trained: xr.Dataset | None, keep: Any
    ) -> dict[str, xr.Dataset]:
        """Return the datasets of a step: its label says where a random init has the very weights of the model, its
        title also the metric that is called the loss; arrays as a file gives them back."""
        label, session = step.label, self.session
        if step.init is not None:
            with nullcontext() if self.nulls.holds(step.init) else step_shown(MAKING, step.label):
                label, session = self.nulls.build(step.init, in_place=self.in_place)
        metric = self.session.choices.metric
        title = label if metric is None else f"{label}, loss = {metric.name}"
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


def _rows_of_measures(
    measures: Sequence[Measure], session: Session, prompts: Any, cut: Mapping[str, Any], done: Sequence[Measure] = ()
) -> dict[str, list[Tensor]]:
    """Return the token ids of every prompt by measure, one list for all that take them alike; of measures known before
    too, as their provenance is compared. Prompts that a measure cannot take are refused."""
    rows: dict[str, list[Tensor]] = {}
    shared: list[Tensor] | None = None
    if any(measure.one_length for measure in measures) and isinstance(cut["length"], int):
        require_context(session, cut["length"])
    for measure in [*measures, *done]:
        if type(measure).prompt_tokens is not Measure.prompt_tokens:
            rows[measure.name] = list(measure.prompt_tokens(session, prompts, **cut))
        else:
            shared = to_prompts(session, prompts, **cut) if shared is None else shared
            rows[measure.name] = shared
        if measure not in done:
            require_prompts(measure, session, rows[measure.name])
    return rows


def require_prompts(measure: Measure, session: Session, rows: Sequence[Tensor]) -> None:
    """Refuse prompts that a measure cannot take."""
    if short := [n for n, row in enumerate(rows) if len(row) < 2]:
        raise InputError(f"prompt {short[0]} has only {len(rows[short[0]])} token; two are needed at least")
    if measure.one_length:
        require_one_length(rows)
        require_context(session, len(rows[0]))


def supported(measures: Sequence[Measure], session: Session, skip: bool) -> list[Measure]:
    """Return the measures that this model allows; others are refused, or with `skip` left out, with a message unless
    the model lacks what they are of.

    Raises:
        UnsupportedModelError: such a measure; with `skip`, where it leaves none of them.
    """
    refused = refusals(measures, session)
    if refused and not skip:
        raise next(iter(refused.values()))
    if refused and len(refused) == len(measures):
        raise UnsupportedModelError("; ".join(f"{name} cannot be had: {reason}" for name, reason in refused.items()))
    for name, reason in refused.items():
        if not isinstance(reason, NothingToMeasureError):
            tqdm.write(f"{name} is left out: {reason}", file=sys.stderr)
    return [measure for measure in measures if measure.name not in refused]


def refusals(measures: Sequence[Measure], session: Session) -> dict[str, UnsupportedModelError]:
    """Return, by name, why this model does not allow measures, or others that they come after."""
    refused: dict[str, UnsupportedModelError] = {}
    for measure in measures:
        try:
            measure.requires(session)
        except UnsupportedModelError as reason:
            refused[measure.name] = reason
        for kind in measure.after:
            if kind.name in refused:
                refused.setdefault(measure.name, refused[kind.name])
    return refused
