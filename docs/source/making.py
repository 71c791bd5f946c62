"""How each kind of part is measured: from its settings to results by name, or to JSON values."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from measure_pages import measured_of_models
from part import (
    BUILD,
    CHECKPOINTS,
    CUT,
    KEPT,
    NULL,
    ROOT,
    TRAINED,
    Part,
    model_of,
    path_of,
    text_of,
)

import tl_posgen
from tl_posgen.coupling import TokenCoupling
from tl_posgen.position import Perturbation, PlanePerturbation, Variance
from tl_posgen.position.planes.numbers.plane_edits import EDITS
from tl_posgen.slash import slash_toy
from tl_posgen.sources import Sources
from tl_posgen.studies.emergence import emergence

OPTIONS = {
    "cloze": Perturbation(ratios=(0.0, 0.5), reaches=("uniform",), n_draws=2, n_cloze=100, cloze_conditions=None),
    "perturbed planes": PlanePerturbation(edits=EDITS, strengths=(0.1, 0.3, 1.0)),
    "checked sources": Sources(check=True),
    "writers": Sources(sides=("k", "q"), by="head"),
    "places": Variance(absolute=True),
}


def claims(part: Part) -> Mapping[str, Any]:
    """Judge every claim; give the claims and every result that they read."""
    checkpoints = CHECKPOINTS if part.settings.get("checkpoints") else ()
    return tl_posgen.judge_claims(
        model_of(part.model),
        text_of(part.model),
        checkpoints=checkpoints,
        keep=KEPT / f"claims-{part.model}",
        null_seeds=part.settings["null_seeds"],
        stability=part.settings.get("stability", False),
        **CUT,
    )


def some_claims(part: Part) -> Mapping[str, Any]:
    """Judge the claims that the settings name; give them and every result that they read."""
    from tl_posgen.claims import PAPERS, results_for
    from tl_posgen.core.claim import judged
    from tl_posgen.core.null_models import NullModels
    from tl_posgen.core.store import Parts
    from tl_posgen.models.loading.load import Pretrained
    from tl_posgen.models.provenance import model_label

    model, named = Pretrained(path_of(part.model), dtype="float32").load(), part.settings["claims"]
    claims = [claim for paper in PAPERS.values() for claim in paper if claim.name in named]
    run = {**CUT, **{name: part.settings[name] for name in ("length", "n_prompts")}, "consecutive": False}
    run["null_seeds"] = NullModels(model, part.settings["null_seeds"], None)
    with Parts.kept_in(KEPT / f"claims-{part.model.split()[0]}") as parts:
        results, reasons = results_for(model, text_of(part.model), claims, run, checkpoints=(), keep=parts)
    provenance = next(iter(results.values())).provenance
    table = judged(claims, results, model_label(model), provenance, reasons)
    return tl_posgen.Report({"claims": table, **results}, provenance)


def analysis(part: Part) -> Mapping[str, Any]:
    """Measure what the settings name, with the options in `OPTIONS`."""
    settings = {**CUT, **NULL, **part.settings}
    settings.pop("options", None)
    measures = [OPTIONS.get(one, one) for one in settings.pop("measures")]
    return tl_posgen.analyze(
        model_of(part.model), text_of(part.model), measures=measures, skip_unsupported=True, **settings
    )


def one_by_one(part: Part) -> Mapping[str, Any]:
    """Run every measure alone, and time it and the forward passes of the same prompts."""
    import torch

    from tl_posgen.models.loading.load import without_context_limit
    from tl_posgen.models.loss import prompts_of_one_length

    model, text, settings = model_of(part.model), text_of(part.model), {**CUT, **NULL, **part.settings}
    prompts = prompts_of_one_length(model, text, settings["length"], settings["n_prompts"])
    with torch.no_grad():
        passes = seconds_of(lambda: [model(one[None]) for one in prompts])[1]
    found = {}
    for measure in measured_of_models():
        beyond = measure.name == "length_extrapolation"  # which has a length of its own
        subject, own = (without_context_limit(model), {**settings, "length": None}) if beyond else (model, settings)
        report, seconds = seconds_of(partial(tl_posgen.analyze, subject, text, measures=measure.name, **own))
        times = {"seconds": seconds, "passes": (1 + len(own["null_seeds"])) * passes}
        found[measure.name] = replace(report[measure.name], provenance={**report[measure.name].provenance, **times})
        print(f"{measure.name}: {seconds:.1f} s", file=sys.stderr, flush=True)
    return found


def seconds_of(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return what a function gives, and the processor time that it took."""
    began = time.process_time()
    return work(), time.process_time() - began


def found_by_each(results: Any) -> dict[str, Any]:
    """Return, by measure, its findings, the kind of its first picture, its prompts' length, and how long it took."""
    return {
        name: {
            "findings": result.findings(),
            "picture": next(iter(result.kinds), ""),
            "length": result.provenance["length"],
            "seconds": result.provenance["seconds"],
            "passes": result.provenance["passes"],
        }
        for name, result in results.items()
    }


def training(part: Part) -> Mapping[str, Any]:
    """Measure every checkpoint of the mini model."""
    settings = {**CUT, **NULL, **part.settings}
    return {"emergence": emergence(CHECKPOINTS, text_of("mini"), tokenizer="mini", **settings)}


def training_of_seeds(part: Part) -> Mapping[str, Any]:
    """Measure the checkpoints of the mini recipe begun from other seeds."""
    from measuring import entry_of

    found = {}
    for seed in part.settings["training_seeds"]:
        checkpoints = sorted((TRAINED / str(seed) / "checkpoints").iterdir())
        measures = ("three_axis", "coupling")
        result = emergence(checkpoints, text_of("mini"), measures=measures, tokenizer="mini", **CUT, null_seeds=())
        found[f"seed {seed}"] = entry_of(result)
    return {"results": found}


def token_wise(part: Part) -> Mapping[str, Any]:
    tokens = TokenCoupling(tokens=tuple(range(25, 256, 25)))
    return {"token_coupling": tokens(model_of(part.model), text_of(part.model), **CUT, **NULL)}


def toy(part: Part) -> Mapping[str, Any]:
    return {"slash_toy": slash_toy(**part.settings)}


def width(part: Part) -> Mapping[str, Any]:
    from tl_posgen.coupling.coupling_scores import WIDTHS
    from tl_posgen.coupling.numbers.overlap import NORMS, width_alone

    found = width_alone(WIDTHS)
    by_norm = dict(zip(NORMS, found.coupling.tolist(), strict=True))
    return {
        "widths": list(WIDTHS),
        "k": found.k.tolist(),
        **by_norm,
        "r2": dict(zip(NORMS, found.r2.tolist(), strict=True)),
    }


def demo(part: Part) -> Mapping[str, Any]:
    """Return what `make demo` prints."""
    words = printed("-m", "tl_posgen.cli", "analyze", "--out", str(BUILD / "demo"), "--force")
    return {"printed": words.replace(f"{ROOT}{os.sep}", "")}


def printed(*arguments: str) -> str:
    """Return what a Python command writes to its standard output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", "NO_COLOR": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr}")
    return "\n".join(line.rstrip() for line in done.stdout.splitlines())


def greedy(part: Part) -> Mapping[str, Any]:
    """Take the likeliest next token, again and again."""
    import torch

    model = model_of("mini")
    tokens = model.to_tokens(part.settings["prompt"])
    with torch.no_grad():
        for _ in range(part.settings["tokens"]):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    return {"text": model.tokenizer.decode(tokens[0, 1:])}
