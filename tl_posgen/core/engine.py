"""The main job: prompts through a model once, every measure fed layer by layer, and the same for random inits."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.arithmetic import full_precision
from tl_posgen.core import registry
from tl_posgen.core.inits import result_of
from tl_posgen.core.measure import Measure
from tl_posgen.core.null_models import NullModels, Nulls, null_models_of, seeds_by_kind
from tl_posgen.core.options import require
from tl_posgen.core.report import Report
from tl_posgen.core.result import Result
from tl_posgen.core.run import Run
from tl_posgen.core.steps import Analysis, step_names
from tl_posgen.core.store import Parts, check_after, configuration_of, require_options, require_same
from tl_posgen.editing.given import Hooks, added_hooks, check_hooks
from tl_posgen.errors import InputError, NothingToMeasureError, UnsupportedModelError, check_seed
from tl_posgen.models import open_session
from tl_posgen.models.loading.load import AnyModel, is_ours
from tl_posgen.models.loading.null_kinds import RANDOM_INIT
from tl_posgen.models.loading.random_init import check_draws_on
from tl_posgen.models.memory import release
from tl_posgen.models.metric import Metric, as_metric
from tl_posgen.models.provenance import logits_digest, provenance_of
from tl_posgen.models.selection import Heads, Layers, head_name, select_heads
from tl_posgen.models.session import Choices, Session
from tl_posgen.models.tokens import first_id, require_context, require_one_length, text_provenance, to_prompts
from tl_posgen.progress import steps_shown

Prompts: TypeAlias = str | Sequence[Any] | Int[Tensor, "batch pos"] | Int[Tensor, " pos"]
Measures: TypeAlias = str | Measure | type[Measure] | Sequence[Any] | None

_HOOKS = ("fwd_hooks", "added_hooks")
_FUNCTIONS = {  # by name in provenance: as refusals say what is not known, and what to do about it
    "fwd_hooks": ("fwd_hooks do", "give none"),
    "added_hooks": ("the hooks on this model do", "remove them"),
    "metric": ("a metric does", "give none"),
}


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
    functions = _names_of_functions(session, fwd_hooks, metric)
    _require_no_functions(functions, keep, finished)
    keeping = Parts.kept_in(keep)
    matrices = max((measure.matrices for measure in to_measure), default=0)
    one_by_one = not functions.keys().isdisjoint(_HOOKS)
    choices = Choices(streaming, matrices, metric, one_by_one, None if first is None else first_id(session, first))
    null_models = null_models_of(session, nulls, null_device)
    with session.exclusive("analyze"), session.choosing(choices), keeping as parts:
        cut: dict[str, Any] = {"length": length, "n_prompts": n_prompts, "consecutive": consecutive}
        where = {"layers": layers, "heads": heads}
        heads_by_layer = select_heads(session, **where)
        to_measure = supported(to_measure, session, skip_unsupported)
        measured_before = [result.measure for result in finished.values()]
        rows = _rows_of_measures(to_measure, session, prompts, cut, measured_before)
        prepared = [measure.prepare(session, rows[measure.name]) for measure in to_measure]
        for measure in prepared:
            measure.refuse(Run(measure, session, prompts, rows[measure.name], where, seed))

        of_all: dict[str, Any] = {"logits": logits_digest(session)} | functions | text_provenance(prompts, **cut)
        if layers is not None or heads is not None:
            of_all["heads"] = [head_name(layer, head) for layer, indices in heads_by_layer.items() for head in indices]
        if first is not None:
            of_all["first"] = choices.first
        if null_models.device != "cpu":
            of_all["null_device"] = null_models.device
        if null_models.by_kind.get(RANDOM_INIT):
            of_all["random_init"] = session.backend.drawing_rule(session.origin)
        provenance = _provenance_by_measure([*prepared, *measured_before], session, rows, of_all, null_models, seed)
        for measure in (measure for measure in requested if measure.name in finished):
            require_same(measure.name, finished[measure.name], provenance[measure.name])
            require_options(measure.prepare(session, rows[measure.name]), finished[measure.name])

        depends_on: dict[str, Any] = {}
        if parts.directory is not None:
            chosen = {"layers": layers, "all_heads": heads is None, "heads": heads_by_layer, "first": choices.first}
            settings = {**cut, **chosen, "seed": seed, "streaming": streaming, "null_device": null_models.device}
            depends_on = configuration_of(session, prompts, of_all["logits"], **settings)
        analysis = Analysis(session, prompts, rows, where, seed, null_models, fwd_hooks, in_place, parts, depends_on)
        with steps_shown(step_names(prepared, null_models), shown=progress):
            by_init = analysis.datasets(prepared, finished)
        if null_models is not nulls:
            null_models.free_memory()
        if in_place:
            release(session.model)

    results = dict(finished)
    for measure in prepared:
        datasets = {init: of_init[measure.name] for init, of_init in by_init.items() if measure.name in of_init}
        results[measure.name] = result_of(measure, datasets, provenance[measure.name])
    return _report_of({measure.name: results[measure.name] for measure in requested if measure.name in results})


def _names_of_functions(session: Session, fwd_hooks: Hooks, metric: Metric | None) -> dict[str, Any]:
    """Return, as provenance says them, the names of the functions under which a model is measured: hooks that were
    given, hooks that are on the model, a metric. Their names are all that another run can know of them."""
    names = {
        "fwd_hooks": check_hooks(session, fwd_hooks),
        "added_hooks": added_hooks(session),
        "metric": None if metric is None else metric.name,
    }
    return {name: value for name, value in names.items() if value}


def _require_no_functions(functions: Mapping[str, Any], keep: Any, finished: Mapping[str, Result]) -> None:
    """Refuse to take up what another run measured, or to keep anything for one, under functions."""
    unknown = [(words, remedy) for name, (words, remedy) in _FUNCTIONS.items() if name in functions]
    for what, is_asked in (("keep: another run", keep is not None), ("after: a finished result", bool(finished))):
        if is_asked and unknown:
            words, remedy = unknown[0]
            raise InputError(f"{what} cannot know what {words}; {remedy}, or leave {what.partition(':')[0]} out")


def _provenance_by_measure(
    measures: Sequence[Measure],
    session: Session,
    rows: Mapping[str, Sequence[Tensor]],
    of_all: dict[str, Any],
    nulls: NullModels,
    seed: int,
) -> dict[str, dict[str, Any]]:
    """Return the provenance of the result of each measure, by name: of its prompts, of all, and its null models."""
    lists = {id(tokens): tokens for tokens in rows.values()}  # one for all measures that share prompts
    of_rows = {key: provenance_of(session, tokens, seed=seed) for key, tokens in lists.items()}
    return {
        measure.name: of_rows[id(rows[measure.name])] | of_all | {"nulls": nulls.seeds_for(measure)}
        for measure in measures
    }


def _report_of(results: Mapping[str, Result]) -> Report:
    """Return a report of results, whose provenance is that of the first, with the null models of all."""
    of_report = {name: value for name, value in next(iter(results.values())).provenance.items() if name != "options"}
    of_report["nulls"] = {
        kind: seeds for result in results.values() for kind, seeds in result.provenance["nulls"].items()
    }
    return Report(results, of_report)


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
