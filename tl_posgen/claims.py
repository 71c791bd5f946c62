"""All claims of all papers on one model; finished parts are kept, so a stopped run goes on."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from tl_posgen.core import registry
from tl_posgen.core.claim import Claim, judged, judgement_of
from tl_posgen.core.engine import analyze, planned, refusals
from tl_posgen.core.measure import Measure
from tl_posgen.core.null_models import NullModels, check_seed
from tl_posgen.core.options import fits, require
from tl_posgen.core.report import Report
from tl_posgen.core.result import Result
from tl_posgen.core.store import Parts
from tl_posgen.coupling.claims import CLAIMS as COUPLING
from tl_posgen.errors import InputError, ModelError, UnsupportedModelError
from tl_posgen.models import open_model
from tl_posgen.models.loading.checkpoints import Checkpoints
from tl_posgen.models.loading.load import without_context_limit
from tl_posgen.models.provenance import model_label
from tl_posgen.models.tokens import check_numbers
from tl_posgen.models.wrapped import wrap
from tl_posgen.position.claims import CLAIMS as POSITION
from tl_posgen.position.length.length_extrapolation import LengthExtrapolation
from tl_posgen.progress import Passes, Stage
from tl_posgen.slash.claims import CLAIMS as SLASH
from tl_posgen.slash.slash_toy import slash_toy
from tl_posgen.studies.emergence import emergence

PAPERS: Mapping[str, Sequence[Claim]] = {"position": POSITION, "slash": SLASH, "coupling": COUPLING}
WITH_CHECKPOINTS, OF_MANY = "emergence", "coupling_scores"
TOY, TOY_STEPS = "slash_toy", 500  # of a model of its own
BEYOND = "length_extrapolation"  # prompts longer than the training context
HALF_AND_TWICE = (0.5, 2.0)  # times the prompts, where verdicts are judged again
CUT = ("length", "n_prompts")  # what a claim may ask for beside options of the measure


def judge_claims(
    model: Any,
    prompts: str,
    *,
    papers: Sequence[str] = tuple(PAPERS),
    checkpoints: Sequence[str | os.PathLike] = (),
    length: int = 256,
    n_prompts: int = 4,
    consecutive: bool = False,
    seed: int = 0,
    null_seeds: Sequence[int] = (0,),
    shuffled_seeds: Sequence[int] | None = None,
    keep: str | os.PathLike | None = "claims",
    stability: bool = False,
    progress: bool = True,
) -> Report:
    """Judge every claim of the papers on one model: a Report whose first result, "claims", has a row for each.

    Args:
        model: a model, or a name or directory for `load_model` (in float32, which the claims on coupling need).
        prompts: one text, long enough for four prompts of four times the training length, for the claims on length.
        papers: any of "position" (Han & Ji 2025), "slash" (Cheng et al. 2026), "coupling" (Aubry et al. 2024).
        checkpoints: directories of the same model in training, in order; without them claims on training stay open.
        length, n_prompts, consecutive, seed, null_seeds, shuffled_seeds: as in `analyze`.
        keep: directory for finished parts, None for none. A later run with the same weights, text and settings takes
            them up.
        stability: judge again at half and at twice the prompts: the column "again" has both verdicts. With fewer than
            four prompts what rests on intervals is open; all is where the text is too short.

    Returns:
        A Report. Verdicts follow criteria of ours, which stand in the table beside them; without a null model beside
        it a claim is open.

    Raises:
        InputError: an unknown paper, something else than one text, a text too short, or a finished part that is
            damaged: the message names its file.

    Source: the claims are the papers'; how each is measured and judged is ours.

    Example:
        >>> import tempfile
        >>> from tl_posgen.models.tokens import bundled_text
        >>> short = {"papers": ["coupling"], "length": 16, "n_prompts": 1, "progress": False}
        >>> with tempfile.TemporaryDirectory() as keep:
        ...     report = judge_claims("mini", bundled_text(), keep=keep, **short)
        >>> [name.removeprefix("coupling ") for name in report["claims"].frame()["claim"]]
        ['1', '2', '3', '4', '4b', '4c', '5', '6']
    """
    if not fits(papers, Sequence[str]) or not papers or not set(papers) <= set(PAPERS):
        raise InputError(f"papers {papers!r}: give a list of any of {', '.join(PAPERS)}")
    if not isinstance(prompts, str):
        raise InputError(f"prompts: claims need one text, which is cut in several ways, not {type(prompts).__name__}")
    require("checkpoints", checkpoints, Sequence[str | os.PathLike])
    require("keep", keep, str | os.PathLike | None)
    require("stability", stability, bool)
    if checkpoints:
        Checkpoints(checkpoints)  # refused now, not after the hours that everything else takes
    model, seed = open_model(model, precise=True), check_seed(seed)
    check_numbers(model, length, n_prompts)
    if stability and (n_prompts is None or n_prompts < 2):
        raise InputError(f"stability: half and twice the prompts need n_prompts of 2 or more, not {n_prompts}")
    claims = [claim for paper in dict.fromkeys(papers) for claim in PAPERS[paper]]
    run: dict[str, Any] = {"length": length, "n_prompts": n_prompts, "consecutive": consecutive}
    run |= {"seed": seed, "progress": progress, "null_seeds": NullModels(model, null_seeds, shuffled_seeds)}
    kept = Parts.kept_in(None if keep is None else Path(keep) / "parts")
    with kept as parts, Passes.counted(shown=progress) as passes:
        passes.plan(planned_stages(model, prompts, claims, run) if progress else ())
        for times in HALF_AND_TWICE if stability and progress else ():
            with suppress(InputError):  # which is said when its turn comes
                passes.plan(planned_stages(model, prompts, *scaled(claims, run, times)))
        judged_on = partial(results_for, model, prompts, checkpoints=checkpoints, keep=parts)
        results, reasons = judged_on(claims, run)
        again = verdicts_again(judged_on, claims, run) if stability else None
    provenance = next(iter(results.values())).provenance
    table = judged(claims, results, model_label(model), provenance, reasons, again)
    return Report({"claims": table, **results}, provenance)


def results_for(
    model: Any,
    text: str,
    claims: Sequence[Claim],
    run: Mapping[str, Any],
    *,
    checkpoints: Sequence[str | os.PathLike],
    keep: Parts,
) -> tuple[dict[str, Result], dict[str, str]]:
    """Return the results that the claims read, and why others could not be had: of the model, in training, of a toy."""
    results, reasons = measure_all(model, text, claims, {**run, "keep": keep})
    if checkpoints and any(WITH_CHECKPOINTS in claim.needs for claim in claims):
        options = [claim.options.get(WITH_CHECKPOINTS, {}) for claim in claims]
        asked = sorted({name for own in options for name in own.get("measures", ())})
        how = {"tokenizer": wrap(model).origin.tokenizer, "dtype": next(model.parameters()).dtype}
        of_training = {**run, "measures": asked, "null_seeds": (), "keep": keep, **how}
        results[WITH_CHECKPOINTS] = emergence(checkpoints, text, **of_training)
    if not results:
        raise UnsupportedModelError(f"{model_label(model)}: none of the measures that the claims need can be had")
    if any(TOY in claim.needs for claim in claims):
        seed = run["seed"]
        toy = {"steps": TOY_STEPS, "seeds": [seed, seed + 1, seed + 2]}

        def measured() -> Report:
            found = slash_toy(**toy, progress=run["progress"])
            return Report({found.name: found}, found.provenance)

        results |= keep.report(TOY, toy, measured)
    return results, reasons


def verdicts_again(judged_on: Callable[..., Any], claims: Sequence[Claim], run: Mapping[str, Any]) -> dict[str, str]:
    """Return the verdicts at half and at twice the prompts, as "open, held", of each claim that reads prompts."""
    verdicts: dict[str, list[str]] = {claim.name: [] for claim in claims if TOY not in claim.needs}
    for times in HALF_AND_TWICE:
        of_prompts, settings = scaled(claims, run, times)
        try:
            results, reasons = judged_on(of_prompts, settings)
        except InputError as reason:
            tqdm.write(f"not judged at {times:g} times the prompts: {reason}", file=sys.stderr)
            results, reasons = {}, {}
        for claim in of_prompts:
            verdicts[claim.name].append(judgement_of(claim, results, reasons).verdict)
    return {name: ", ".join(found) for name, found in verdicts.items()}


def scaled(claims: Sequence[Claim], run: Mapping[str, Any], times: float) -> tuple[list[Claim], dict[str, Any]]:
    """Return the claims that read prompts, and the settings, at so many times the prompts."""
    of_prompts = [with_prompts(claim, times) for claim in claims if TOY not in claim.needs]
    return of_prompts, {**run, "n_prompts": int(run["n_prompts"] * times)}


def with_prompts(claim: Claim, times: float) -> Claim:
    """Return a claim that asks for so many times its prompts or items, where it asks for a number of its own."""
    own = {name: dict(options) for name, options in claim.options.items()}
    for options in own.values():
        for name in {"n_prompts", "n_cloze"} & set(options):
            options[name] = max(1, int(options[name] * times))
    return replace(claim, options=own)


def measure_all(
    model: Any, text: str, claims: Sequence[Claim], run: Mapping[str, Any]
) -> tuple[dict[str, Result], dict[str, str]]:
    """Return the results that the claims read, and why others could not be had; one forward pass gives all it can."""
    reasons = {name: str(reason) for name, reason in refused(measures_of(claims)[0], model).items()}
    results: dict[str, Result] = {}
    for measures, own in analyses_of(claims, model):
        before = [kind.name for measure in measures for kind in measure.after if measure.runs_model]
        if not set(before) <= set(results):
            continue
        after = {name: results[name] for name in before}
        try:
            found = analyze(subject_of(model, measures), text, measures=measures, after=after, **{**run, **own})
            results |= {measure.name: found[measure.name] for measure in measures}
        except ModelError as reason:
            if not measures[0].runs_model:  # the pass that many share
                raise
            tqdm.write(f"{measures[0].name} is left out: {reason}", file=sys.stderr)
            reasons[measures[0].name] = str(reason)
    return results, reasons


def planned_stages(model: Any, text: str, claims: Sequence[Claim], run: Mapping[str, Any]) -> list[Stage]:
    """Return every stage of the analyses of `measure_all`; of those that the model does not allow none."""
    stages = []
    for measures, own in analyses_of(claims, model):
        with suppress(ModelError):
            stages += planned(subject_of(model, measures), text, measures, {**run, **own})
    return stages


def subject_of(model: Any, measures: Sequence[Measure]) -> Any:
    """Return the model, without the limit of its context for prompts longer than it."""
    return without_context_limit(model) if measures[0].name == BEYOND else model


def measures_of(claims: Sequence[Claim]) -> tuple[list[Measure], dict[str, dict[str, Any]]]:
    """Return the measures that claims need of one model and text, and what these ask for of each, by name."""
    asked: dict[str, dict[str, Any]] = {}
    for claim in claims:
        for name in claim.needs:
            asked.setdefault(name, {}).update(claim.options.get(name, {}))
    elsewhere = (WITH_CHECKPOINTS, OF_MANY, TOY)
    found = [measure_with(name, own) for name, own in asked.items() if name not in elsewhere]
    return registry.requested(found), asked


def refused(measures: Sequence[Measure], model: Any) -> dict[str, UnsupportedModelError]:
    """Return, by name, why measures cannot be had of this model, nor its prompts beyond the training length."""
    found, trained = refusals(measures, model), int(model.cfg.n_ctx)
    for measure in measures:
        if isinstance(measure, LengthExtrapolation) and measure.inside_for(model) < trained and not measure.inside:
            why = f"prompts of {measure.times} x {trained:,} tokens do not fit into memory"
            found.setdefault(measure.name, UnsupportedModelError(why))
    return found


def analyses_of(claims: Sequence[Claim], model: Any) -> list[tuple[list[Measure], dict[str, Any]]]:
    """Return the measures of every analysis with settings of its own: those that share one forward pass, then each that
    runs the model."""
    measures, asked = measures_of(claims)
    reasons = refused(measures, model)
    allowed = [measure for measure in measures if measure.name not in reasons]
    shared = [measure for measure in allowed if not measure.runs_model]
    found: list[tuple[list[Measure], dict[str, Any]]] = [(shared, {})] if shared else []
    for measure in (one for one in allowed if one.runs_model):
        found.append(([measure], {key: value for key, value in asked.get(measure.name, {}).items() if key in CUT}))
    return found


def measure_with(name: str, options: Mapping[str, Any]) -> Measure:
    """Return a measure with the options that its claims ask for."""
    return registry.measure_from(name, {key: value for key, value in options.items() if key not in CUT})
