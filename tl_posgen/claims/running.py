"""All claims of the papers on one model: what they read is planned, measured and kept, then judged."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from tqdm.auto import tqdm

from tl_posgen.claims.judging import Claim, claims_result
from tl_posgen.claims.table import PAPERS
from tl_posgen.core import registry
from tl_posgen.core.engine import analyze, refusals
from tl_posgen.core.measure import Measure
from tl_posgen.core.null_models import NullModels, Nulls
from tl_posgen.core.options import Each, fits, require
from tl_posgen.core.report import Report
from tl_posgen.core.result import Result
from tl_posgen.core.steps import step_names
from tl_posgen.core.store import Parts
from tl_posgen.errors import InputError, ModelError, UnsupportedModelError, check_seed
from tl_posgen.models import open_session
from tl_posgen.models.loading.checkpoints import Checkpoints
from tl_posgen.models.loading.load import AnyModel, without_context_limit
from tl_posgen.models.session import Session
from tl_posgen.models.tokens import check_numbers, first_id
from tl_posgen.position.length.length_extrapolation import LengthExtrapolation
from tl_posgen.progress import steps_shown
from tl_posgen.slash.slash_toy import slash_toy
from tl_posgen.studies.emergence import emergence

WITH_CHECKPOINTS, OF_MANY = "emergence", "coupling_scores"
TOY, TOY_STEPS = "slash_toy", 500  # of a model of its own
CUT = ("length", "n_prompts")  # what a claim may ask for beside options of the measure


def judge_claims(
    model: AnyModel,
    prompts: str,
    *,
    papers: Sequence[str] = tuple(PAPERS),
    checkpoints: Sequence[str | os.PathLike] = (),
    length: int = 256,
    n_prompts: int = 4,
    consecutive: bool = False,
    first: str | int | None = None,
    seed: int = 0,
    nulls: Nulls = 1,
    keep: str | os.PathLike | None = "claims",
    progress: bool = True,
) -> Report:
    """Judge every claim of the papers on one model: a Report whose first result, "claims", has a row for each.

    Args:
        model: a model, or a name or directory for `load_model` (in float32, which the claims on coupling need).
        prompts: one text, long enough for four prompts of four times the training length, for the claims on length.
        papers: any of "position" (Han & Ji 2025), "slash" (Cheng et al. 2026), "coupling" (Aubry et al. 2024), and
            "frequency", claims of several papers on RoPE's planes; or single claims, such as "frequency 6".
        checkpoints: directories of the same model in training, in order; without them claims on training stay open.
        length, n_prompts, consecutive, first, seed, nulls: as in `analyze`.
        keep: directory for finished parts, None for none. A later run with the same weights, text and settings takes
            them up.

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
        >>> short = {"papers": ["coupling"], "length": 12, "n_prompts": 1, "nulls": 0, "progress": False}
        >>> with tempfile.TemporaryDirectory() as keep:
        ...     report = judge_claims("mini", bundled_text(), keep=keep, **short)
        >>> [name.removeprefix("coupling ") for name in report["claims"].frame()["claim"]]
        ['1', '2', '3', '4', '4b', '4c', '5', '6']
    """
    groups = {**PAPERS, **{claim.name: [claim] for of_paper in PAPERS.values() for claim in of_paper}}
    if not fits(papers, Annotated[Sequence[str], Each()]) or not set(papers) <= set(groups):
        raise InputError(
            f"papers {papers!r}: give a list of any of {', '.join(PAPERS)}, or of single claims, such as 'slash 3a', "
            "each once"
        )
    if not isinstance(prompts, str):
        raise InputError(f"prompts: claims need one text, which is cut in several ways, not {type(prompts).__name__}")
    require("checkpoints", checkpoints, Sequence[str | os.PathLike])
    require("keep", keep, str | os.PathLike | None)
    if checkpoints:
        Checkpoints(checkpoints)  # refused now, not after the hours that everything else takes
    session, seed = open_session(model, precise=True), check_seed(seed)
    check_numbers(session, length, n_prompts)
    claims = [*{claim.name: claim for name in papers for claim in groups[name]}.values()]
    run: dict[str, Any] = {"length": length, "n_prompts": n_prompts, "consecutive": consecutive}
    run |= {"first": None if first is None else first_id(session, first)}
    null_models = NullModels(session, nulls)
    run |= {"seed": seed, "progress": progress}
    keeping = Parts.kept_in(None if keep is None else Path(keep) / "parts")
    results: dict[str, Result] = {}
    analyses, reasons = analyses_of(claims, session)
    planned = [
        name for _, measures, _, inits in analyses for name in step_names(measures, null_models.with_inits(inits))
    ]
    with keeping as parts, steps_shown(planned, shown=progress):
        for subject, measures, cut, inits in analyses:
            before = [kind.name for measure in measures for kind in measure.after if measure.runs_model]
            if not set(before) <= set(results):
                continue
            settings = {**run, "keep": parts, "after": {name: results[name] for name in before}, **cut}
            settings["nulls"] = null_models.with_inits(inits)
            try:
                report = analyze(subject, prompts, measures=measures, **settings)
                results |= {measure.name: report[measure.name] for measure in measures}
            except ModelError as reason:
                if not measures[0].runs_model:  # the pass that many share
                    raise
                tqdm.write(f"{measures[0].name} is left out: {reason}", file=sys.stderr)
                reasons[measures[0].name] = str(reason)
        if checkpoints and any(WITH_CHECKPOINTS in claim.needs for claim in claims):
            names = {name for claim in claims for name in claim.options.get(WITH_CHECKPOINTS, {}).get("measures", ())}
            loading = {"tokenizer": session.origin.tokenizer, "dtype": session.dtype}
            of_training = {**run, "measures": sorted(names), "nulls": 0, "keep": parts, **loading}
            results[WITH_CHECKPOINTS] = emergence(checkpoints, prompts, **of_training)
        if not results:
            raise UnsupportedModelError(f"{session.label}: none of the measures of the claims can be had")
        if any(TOY in claim.needs for claim in claims):
            toy = {"steps": TOY_STEPS, "seeds": [seed + i for i in range(3)]}
            results |= parts.report(TOY, toy, lambda: _report_of(slash_toy(**toy, progress=progress)))
    provenance = next(iter(results.values())).provenance
    table = claims_result(claims, results, session.label, provenance, reasons)
    return Report({"claims": table, **results}, provenance)


def _report_of(result: Result) -> Report:
    return Report({result.name: result}, result.provenance)


def analyses_of(
    claims: Sequence[Claim], session: Session
) -> tuple[list[tuple[Any, list[Measure], dict[str, Any], int]], dict[str, str]]:
    """Return the model, measures, settings and least number of random inits of every analysis: first those of measures
    that share one forward pass, one for each such number, then one of each measure that runs the model; and why this
    model does not allow the others."""
    settings: dict[str, dict[str, Any]] = {}
    for claim in claims:
        for name in (need for need in claim.needs if need not in (WITH_CHECKPOINTS, OF_MANY, TOY)):
            settings.setdefault(name, {}).update(claim.options.get(name, {}))
    of_measures = {
        name: {key: value for key, value in options.items() if key not in CUT} for name, options in settings.items()
    }
    measures = registry.requested([registry.measure_from(name, options) for name, options in of_measures.items()])
    reasons = {name: str(refusal) for name, refusal in refusals(measures, session).items()}
    trained = int(session.model.cfg.n_ctx)
    for measure in measures:
        if isinstance(measure, LengthExtrapolation) and measure.inside_for(session) < trained and not measure.inside:
            why = f"prompts of {measure.times} x {trained:,} tokens do not fit into memory"
            reasons.setdefault(measure.name, why)
    allowed = [measure for measure in measures if measure.name not in reasons]
    inits = {
        measure.name: max((claim.inits for claim in claims if measure.name in claim.needs), default=1)
        for measure in allowed
    }
    shared = [measure for measure in allowed if not measure.runs_model]
    analyses: list[tuple[Any, list[Measure], dict[str, Any], int]] = [
        (session, [measure for measure in shared if inits[measure.name] == n], {}, n)
        for n in sorted({inits[measure.name] for measure in shared}, reverse=True)
    ]
    for measure in (measure for measure in allowed if measure.runs_model):
        subject = without_context_limit(session) if isinstance(measure, LengthExtrapolation) else session
        cut = {key: value for key, value in settings.get(measure.name, {}).items() if key in CUT}
        analyses.append((subject, [measure], cut, inits[measure.name]))
    return analyses, reasons
