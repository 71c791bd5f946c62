"""The main job: prompts through a model once, every measure fed layer by layer, and the same for random inits."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import xarray as xr
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.arithmetic import full_precision
from tl_posgen.core import registry
from tl_posgen.core.feed import one_pass
from tl_posgen.core.measure import Measure
from tl_posgen.core.null_models import NullModels, check_seeds, null_models_of
from tl_posgen.core.numbers import SHUFFLED, TRAINED
from tl_posgen.core.options import require
from tl_posgen.core.report import Report
from tl_posgen.core.result import Result, contiguous, result_of
from tl_posgen.core.run import Run
from tl_posgen.core.store import (
    Parts,
    check_after,
    configuration_of,
    content,
    refuse_hooks,
    require_options,
    require_same,
)
from tl_posgen.errors import InputError, UnsupportedModelError, check_seed
from tl_posgen.hooks.given import Hooks, check_hooks, under
from tl_posgen.models import open_model
from tl_posgen.models.loading.load import is_ours
from tl_posgen.models.loading.nulls import check_draws_on
from tl_posgen.models.loss import require_context, require_one_length
from tl_posgen.models.memory import release
from tl_posgen.models.metric import as_metric
from tl_posgen.models.provenance import null_label, provenance_of
from tl_posgen.models.selection import head_name, select_heads
from tl_posgen.models.session import Choices, Session, session_of
from tl_posgen.models.tokens import to_prompts
from tl_posgen.progress import Passes, Stage

Prompts: TypeAlias = str | Sequence[Any] | Int[Tensor, "batch pos"] | Int[Tensor, " pos"]
Measures: TypeAlias = str | Measure | type[Measure] | Sequence[Any] | None


@full_precision()
def analyze(
    model: Any,
    prompts: Prompts,
    *,
    measures: Measures = None,
    layers: Sequence[int] | None = None,
    heads: Any = None,
    length: int | None = None,
    n_prompts: int | None = None,
    consecutive: bool = False,
    seed: int = 0,
    null_seeds: Sequence[int] | NullModels = (0,),
    shuffled_seeds: Sequence[int] | None = None,
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
        heads: names or pairs, "L3H1", "3.1" or (3, 1); or indices, meant in every chosen layer; or a frame with columns
            layer and head, such as `report.heads("slash", top=5)`. All if left out.
        length, n_prompts: cut texts into n_prompts prompts of `length` tokens, spread evenly over the whole text; with
            length alone, into as many as the text has, which takes long for a book.
        consecutive: take them one after the other from its beginning. Neighbours depend on each other, so that
            intervals of the text's numbers are then too narrow; see docs/concepts.md.
        seed: of random draws.
        null_seeds: seeds of the randomly initialised models of the same shape that everything is repeated on; () for
            none.
        shuffled_seeds: seeds of the models of shuffled weights, see `tl_posgen.models.loading.nulls.shuffled_like`,
            that everything is repeated on; () for none. If left out, one beside random inits, for the measures that
            share a single pass: a model of shuffled weights predicts nothing that an intervention could take away.
        null_device: on which the weights of random inits are drawn: "cuda" is far sooner for a model of billions of
            weights, and draws other numbers than the CPU from one seed.
        fwd_hooks: hooks under which everything is measured, as TransformerLens takes them: (name of a hook point or a
            function that chooses names, hook) each; the random inits under the same. Beside the report of the intact
            model, `tl_posgen.compare` shows what they change.
        metric: in the place of the loss, in every measure that runs or judges the model: a function of logits
            [prompt, pos, vocabulary] and tokens [prompt, pos] that returns a value a prompt or a predicted token, or
            `tl_posgen.logit_difference(...)`. Titles name it; what is called the loss, in nats, is then this, but the
            cloze keeps to the loss. Shares recovered take higher as worse.
        after: finished results (a `Report`, say) of the same model, prompts and null_seeds: what a measure needs of
            them is taken from there and not measured again.
        skip_unsupported: leave out measures that this model does not allow, with a message, instead of refusing.
        streaming: whether forward passes form no [query, key] matrix, see `tl_posgen.streaming`; if left out, those of
            prompts longer than 1,024 tokens where the model allows it.
        keep: directory for finished parts: what the measures that share a pass, and each of the others, found of the
            model and of each random init, and of one that is not finished the conditions that are (and took .2 s). An
            analysis that was stopped goes on from there when it is called again with the same weights, prompts and
            settings; measures of other packages, and what shares their pass, are measured anew.
        progress: show a bar of the forward passes, and say early how long it takes if that is more than 20 s.

    Returns:
        A `Report`: a mapping of measure name to `Result`.

    Raises:
        InputError: unusable prompts, layers or heads that do not exist, unknown measures, hook points; `keep` with
            hooks or a metric; a finished part that is damaged: the message names its file.
        UnsupportedModelError: a layer whose scores cannot be recomputed from its q and k.

    Example:
        >>> import tl_posgen
        >>> report = tl_posgen.analyze("mini", "The White Rabbit put on his spectacles.", null_seeds=())
        >>> report["three_axis"].frame().columns.tolist()
        ['layer', 'head', 'r', 'r_within_rows']
    """
    # refused without a model
    seed, asked, metric = check_seed(seed), registry.requested(measures), as_metric(metric)
    known = check_after(after)
    if not isinstance(null_seeds, NullModels):
        check_seeds(null_seeds)
    if shuffled_seeds is not None:
        check_seeds(shuffled_seeds, "shuffled_seeds")
    check_draws_on(null_device)
    require("streaming", streaming, bool | None)
    require("consecutive", consecutive, bool)
    for measure in asked:
        if measure.name in known:
            require_options(measure, known[measure.name])
    to_measure = [measure for measure in asked if measure.name not in known]

    # refused before a forward pass
    in_place = is_ours(model)
    session = session_of(open_model(model, precise=any(measure.precise for measure in to_measure)))
    model = session.model
    hooked = {"fwd_hooks": named} if (named := check_hooks(session, fwd_hooks)) else {}
    keeping = Parts.kept_in(keep)
    if keep is not None:
        refuse_hooks(model, hooked)
        if metric is not None:
            raise InputError("keep: another run cannot know what a metric does; give one of them")
    choices = Choices(streaming, max((measure.matrices for measure in to_measure), default=0), metric)
    nulls = null_models_of(session, null_seeds, shuffled_seeds, null_device)
    with (
        session.exclusive("analyze"),
        session.choosing(choices),
        Passes.counted(shown=progress) as passes,
        keeping as parts,
    ):
        to_measure = supported(to_measure, model, skip_unsupported)
        cut: dict[str, Any] = {"length": length, "n_prompts": n_prompts, "consecutive": consecutive}
        rows = _rows_of_measures(to_measure, session, prompts, cut, [result.measure for result in known.values()])
        chosen_heads = select_heads(model, layers, heads)
        details: dict[str, Any] = hooked | drawn(**cut)  # what the provenance says beside
        if layers is not None or heads is not None:
            details["heads"] = [head_name(layer, head) for layer, some in chosen_heads.items() for head in some]
        if nulls.device != "cpu":
            details["null_device"] = nulls.device
        if metric is not None:
            details["metric"] = metric.name
        lists = {id(one): one for one in rows.values()}  # one for all measures that share prompts
        of_rows = {key: provenance_of(session, one, nulls.seeds, nulls.shuffled, seed) for key, one in lists.items()}
        for name, result in known.items():
            require_same(name, result, of_rows[id(rows[name])] | details)
            if nulls.for_runs and (lacking := [one for one in nulls if one not in result.numbers.nulls]):
                raise InputError(
                    f"after: {name} was measured without {null_label(lacking[0])}; leave it out to measure it anew"
                )
        depends_on: dict[str, Any] = {}
        if parts.directory is not None:
            which = {"layers": layers, "all_heads": heads is None, "heads": chosen_heads}
            depends_on = configuration_of(
                session, prompts, **cut, **which, seed=seed, streaming=streaming, null_device=nulls.device
            )
        where = {"layers": layers, "heads": heads}
        analysis = _Analysis(session, prompts, rows, where, seed, fwd_hooks, nulls, in_place, passes, parts, depends_on)
        prepared = [measure.prepare(model, rows[measure.name]) for measure in to_measure]
        if progress and not passes.stages:
            passes.plan(_stages_of(session, prepared, prompts, rows, where, seed, nulls))

        # the passes
        sides = analysis.sides(prepared, known)
        if nulls is not null_seeds:
            nulls.free_memory()
        if in_place:
            release(model)
    results = dict(known)
    for measure in prepared:
        each = {init: side[measure.name] for init, side in sides.items() if measure.name in side}
        seeds = [int(init.removeprefix(SHUFFLED)) for init in each if init.startswith(SHUFFLED)]
        provenance = of_rows[id(rows[measure.name])] | details | {"shuffled_seeds": seeds}
        results[measure.name] = result_of(measure, each, provenance)
    found = {measure.name: results[measure.name] for measure in asked if measure.name in results}
    first = dict(next(iter(found.values())).provenance)
    first["shuffled_seeds"] = max((one.provenance.get("shuffled_seeds", []) for one in found.values()), key=len)
    return Report(found, {name: value for name, value in first.items() if name != "options"})


@dataclass
class _Analysis:
    """An analysis once everything is checked: its measures of the model, then of each null model, part by part.

    Attributes:
        session, prompts: as `analyze` was given them, the model loaded.
        rows: token ids of every prompt, by measure.
        where, seed: layers and heads; of draws.
        hooks: under which all passes run.
        null_models, in_place: the null models, and whether each may take the model's place.
        passes, parts, depends_on: the bar; where finished parts are kept, and all that they depend on.
        trained: datasets of the model itself, by measure; empty while they are made.
    """

    session: Session
    prompts: Any
    rows: Mapping[str, Sequence[Tensor]]
    where: Mapping[str, Any]
    seed: int
    hooks: Hooks
    null_models: NullModels
    in_place: bool
    passes: Passes
    parts: Parts
    depends_on: Mapping[str, Any]
    trained: Mapping[str, xr.Dataset] = field(default_factory=dict)

    def sides(self, measures: Sequence[Measure], known: Mapping[str, Result]) -> dict[str, dict[str, xr.Dataset]]:
        """Return the datasets by measure, of the model and of each null model that any is repeated on."""
        self.trained = self.datasets(measures, None, {name: one.own for name, one in known.items()})
        sides = {TRAINED: self.trained}
        for init in self.null_models:
            before = {name: one.sel(init=init) for name, one in known.items() if init in one.numbers.nulls}
            if asked := [measure for measure in measures if _is_measured(measure, init, self.null_models)]:
                sides[init] = self.datasets(asked, init, before)
        return sides

    def datasets(
        self, measures: Sequence[Measure], init: str | None, before: Mapping[str, xr.Dataset]
    ) -> dict[str, xr.Dataset]:
        """Return the dataset of every measure for one model, by name: the shared pass, then those that run it."""
        label = self.session.label if init is None else null_label(init)
        found = dict(before)
        if fed := [measure for measure in measures if measure.is_fed]:
            name = _name_of_shared(fed)
            with self.passes.stage(name, label):
                found |= self.kept(
                    f"{name} {label}", fed, self.dependencies(fed[0], init, {}), partial(self.feed, fed, init)
                )
        for measure in (one for one in measures if one.runs_model):
            names = [*(kind.name for kind in measure.after), *([measure.name] if measure.is_fed else [])]
            read = {name: found[name] for name in names}
            depends_on, name = self.dependencies(measure, init, read), f"{measure.name} {label}"
            with self.passes.stage(measure.name, label):
                make = partial(self.run, measure, init, read, partial(self.parts.condition, name, measure, depends_on))
                found |= self.kept(name, [measure], depends_on, make)
        return {measure.name: found[measure.name] for measure in measures}

    def kept(
        self,
        name: str,
        measures: Sequence[Measure],
        depends_on: Mapping[str, Any],
        make: Callable[[], Mapping[str, xr.Dataset]],
    ) -> dict[str, xr.Dataset]:
        """Return the finished part of these measures and a model, or make it: arrays as a file gives them back."""
        return self.parts.datasets(
            name, measures, depends_on, lambda: {name: contiguous(data) for name, data in make().items()}
        )

    def dependencies(self, measure: Measure, init: str | None, read: Mapping[str, xr.Dataset]) -> dict[str, Any]:
        """Return all that kept numbers of a measure and a model depend on, beside its options."""
        if self.parts.directory is None:
            return {}
        more = {"tokens": content(self.rows[measure.name]), "after": content(read)}
        return {**self.depends_on, **more, **({} if init is None else {"null_model": init})}

    def built(self, init: str | None) -> tuple[str, str, Session]:
        """Return (label, title, model) of an init: a label says where a random init has the very weights of the model,
        a title also the metric that is called the loss."""
        label, session = self.session.label, self.session
        if init is not None:
            label, session = self.null_models.build(init, in_place=self.in_place)
        metric = self.session.choices.metric
        return label, label if metric is None else f"{label}, loss = {metric.name}", session

    def feed(self, measures: Sequence[Measure], init: str | None) -> dict[str, xr.Dataset]:
        """Return the datasets of measures that share one pass."""
        _, title, session = self.built(init)
        with session.choosing(self.session.choices), under(session, self.hooks):
            how = {**self.where, "label": title, "intervals": init is None, "seed": self.seed}
            return one_pass(session, self.rows[measures[0].name], measures, **how)

    def run(
        self, measure: Measure, init: str | None, read: Mapping[str, xr.Dataset], keep: Callable[..., xr.Dataset]
    ) -> dict[str, xr.Dataset]:
        """Return the dataset of a measure that runs the model."""
        label, title, session = self.built(init)
        run = Run(
            measure=measure,
            session=session,
            prompts=self.prompts,
            rows=self.rows[measure.name],
            where=self.where,
            seed=self.seed,
            init=init,
            label=label,
            before=read,
            trained=self.trained.get(measure.name),
            keep=None if self.parts.directory is None else keep,
        )
        with session.choosing(self.session.choices), under(session, self.hooks):
            data = measure.of_model(run)
        if measure.is_fed:
            data = data.merge(read[measure.name], combine_attrs="drop_conflicts")
        return {measure.name: data.assign_attrs(model=title)}


def _stages_of(
    session: Session,
    measures: Sequence[Measure],
    prompts: Any,
    rows: Mapping[str, Sequence[Tensor]],
    where: Mapping[str, Any],
    seed: int,
    nulls: NullModels,
) -> list[Stage]:
    """Return every stage of an analysis of prepared measures, with the forward passes that it will make."""
    found = []
    for init in (None, *nulls):
        label = session.label if init is None else null_label(init)
        some = [one for one in measures if init is None or _is_measured(one, init, nulls)]
        if fed := [one for one in some if one.is_fed]:
            found.append(Stage(_name_of_shared(fed), label, len(rows[fed[0].name])))
        for measure in (one for one in some if one.runs_model):
            run = Run(measure, session, prompts, rows[measure.name], where, seed, init)
            found.append(Stage(measure.name, label, measure.passes(run), measure.fewer_with))
    return found


def planned(model: Any, prompts: Prompts, measures: Sequence[Measure], settings: Mapping[str, Any]) -> list[Stage]:
    """Return the stages of `analyze(model, prompts, measures=measures, **settings)` of a loaded model, or refuse it."""
    session, cut = session_of(model), {name: settings[name] for name in ("length", "n_prompts", "consecutive")}
    rows = _rows_of_measures(measures, session, prompts, cut)
    prepared = [measure.prepare(session.model, rows[measure.name]) for measure in measures]
    where, nulls = {"layers": None, "heads": None}, null_models_of(session, settings["null_seeds"], None)
    return _stages_of(session, prepared, prompts, rows, where, settings["seed"], nulls)


def _is_measured(measure: Measure, init: str, nulls: NullModels) -> bool:
    """Return whether a measure is repeated on this null model."""
    by_default = measure.is_fed and not measure.runs_model
    return measure.has_null and (by_default or nulls.for_runs or not init.startswith(SHUFFLED))


def _name_of_shared(measures: Sequence[Measure]) -> str:
    """Return the name of the pass that these measures share."""
    first = measures[0]
    name = f"{first.name} of one pass" if first.runs_model else first.name  # which has a stage of its own, too
    return name if len(measures) == 1 else f"{len(measures)} measures"


def drawn(length: int | None, n_prompts: int | None, consecutive: bool) -> dict[str, str]:
    """Return what the provenance holds of prompts that were cut from a longer text: where in it they lie."""
    if length is None or n_prompts is None:
        return {}
    return {"drawn": "consecutive" if consecutive else "spread over the text"}


def _rows_of_measures(
    measures: Sequence[Measure], session: Session, prompts: Any, cut: Mapping[str, Any], known: Sequence[Measure] = ()
) -> dict[str, list[Tensor]]:
    """Return the token ids of every prompt by measure, one list for all that take them alike; of measures known before
    too, as their provenance is compared. Prompts that a measure cannot take are refused."""
    found: dict[str, list[Tensor]] = {}
    shared: list[Tensor] | None = None
    if any(measure.one_length for measure in measures) and isinstance(cut["length"], int):
        require_context(session, cut["length"])
    for measure in [*measures, *known]:
        if type(measure).prompt_tokens is not Measure.prompt_tokens:
            found[measure.name] = list(measure.prompt_tokens(session.model, prompts, **cut))
        else:
            shared = to_prompts(session, prompts, **cut) if shared is None else shared
            found[measure.name] = shared
        if measure not in known:
            require_prompts(measure, session, found[measure.name])
    return found


def require_prompts(measure: Measure, session: Session, rows: Sequence[Tensor]) -> None:
    """Refuse prompts that a measure cannot take."""
    if short := [n for n, row in enumerate(rows) if len(row) < 2]:
        raise InputError(f"prompt {short[0]} has only {len(rows[short[0]])} token; two are needed at least")
    if measure.one_length:
        require_one_length(rows)
        require_context(session, len(rows[0]))


def supported(measures: Sequence[Measure], model: Any, skip: bool) -> list[Measure]:
    """Return the measures that this model allows; others are refused, or with `skip` left out with a message.

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
    """Return, by name, why this model does not allow measures, or others that they come after."""
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
