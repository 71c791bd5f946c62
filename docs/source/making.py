"""How each kind of part is measured: from its settings to results by name, or to JSON values."""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xarray as xr
from measure_pages import measured_of_models
from part import (
    BUILD,
    CHECKPOINTS,
    CUT,
    EXAMPLES,
    KEPT,
    MODELS,
    NULL,
    OTHERS,
    ROOT,
    SHARED,
    TEXTS,
    TRAINED,
    Part,
    model_of,
    path_of,
    text_of,
)

import tl_posgen
from tl_posgen.coupling import TokenCoupling
from tl_posgen.frequencies import WhatIfRope
from tl_posgen.joining import Profiles
from tl_posgen.position import Perturbation, PlanePerturbation, Substitution, Variance
from tl_posgen.position.planes.numbers.plane_edits import EDITS
from tl_posgen.slash import slash_toy
from tl_posgen.sources import Sources
from tl_posgen.studies.emergence import emergence

OPTIONS = {
    "cloze": Perturbation(ratios=(0.0, 0.5), reaches=("uniform",), n_draws=2, n_cloze=100, cloze_conditions=None),
    "perturbed planes": PlanePerturbation(edits=EDITS, strengths=(0.1, 0.3, 1.0)),
    "profiles": Profiles(cost_prompts=4),
    "literature": Profiles(cost_prompts=4, metrics="literature"),
    "checked sources": Sources(check=True),
    "writers": Sources(sides=("k", "q"), by="head"),
    "places": Variance(absolute=True),
    "forecast": WhatIfRope(factors=(2,), check=True),
}
FOLLOWED = (  # over training, and over training seeds
    {"measure": "plane_interaction", "name": "interaction"},
    *({"measure": "plane_interaction", "name": "rho", "statistic": one} for one in ("diagonal", "estimate", "key_r1")),
    {"measure": "plane_interaction", "name": "rho_within_layers", "statistic": "key_r1"},
    {"measure": "profiles", "name": "slash_score"},
    {"measure": "profiles", "name": "rho", "scope": "over heads"},
    {"measure": "profiles", "name": "highest", "of": "induction"},
    *({"measure": "key_cut", "name": one, "share": 0} for one in ("rise", "rise_less_control", "interaction")),
    {"measure": "key_cut", "name": "slash_score"},
)


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
    from tl_posgen.claims import PAPERS, judged, results_for
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


def other_end(part: Part) -> Mapping[str, Any]:
    """Search splits on the first half of the text, and report them on the second."""
    text = text_of(part.model)
    turned = text[len(text) // 2 :] + text[: len(text) // 2]
    options = {"dummy_distances": (), "widths": (8,), "head_costs": False}
    return tl_posgen.analyze(model_of(part.model), turned, measures=Substitution(**options), **{**CUT, **part.settings})


def weighted(part: Part) -> Mapping[str, Any]:
    """Replace scores by three-axis fits under several weightings and by splits of the mean query; widths are chosen on
    other prompts."""
    from tl_posgen.models.loss import prompts_of_one_length
    from tl_posgen.position.substitution.optimise_split import best_width
    from tl_posgen.position.substitution.substitution import other_prompts

    model, text = model_of(part.model), text_of(part.model)
    rows = prompts_of_one_length(model, text, CUT["length"], CUT["n_prompts"])
    others = other_prompts(model, text, list(rows), part.settings["others"])
    chosen = [best_width(model, others, family, {}) for family in ("three_axis", "mean_query")]
    near, first = ((8, *({int(width)} - {8})) for width in chosen)
    options = Substitution(near_widths=near, mean_query_distances=first, widths=(8,), search=False)
    return tl_posgen.analyze(
        model, text, measures=[options, "three_axis"], **CUT, null_seeds=part.settings["null_seeds"]
    )


def widths_chosen(results: Any) -> dict[str, Any]:
    """Return the widths that were chosen on other prompts, and what they recover."""
    own = results["substitution"].numbers
    families = {"near": "three_axis_near", "without_query": "mean_query"}
    conditions = [str(name) for name in own.data["condition"].values]
    last = {key: [name for name in conditions if name.startswith(f"{family}_")][-1] for key, family in families.items()}
    return {"others": OTHERS} | {
        key: {"width": int(name.rpartition("_")[2]), "recovered": own("recovered", condition=name).value}
        for key, name in last.items()
    }


def places_compared(results: Any) -> dict[str, Any]:
    """Return the correlation over heads of the share of places alone with the position across prompts."""
    out = {"tokens": "without first"}
    both = results["variance"].sel(**out)["places_alone"], results["across_prompts"].sel(**out)["position"]
    return {"r": float(xr.corr(*both))}


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


def joining_over_training(part: Part) -> Mapping[str, Any]:
    """Follow numbers of several measures over the mini model's checkpoints; random inits are those of the last."""
    reports = {step_of(one): followed_report(one, part, ()) for one in CHECKPOINTS[:-1]}
    reports[step_of(CHECKPOINTS[-1])] = last = followed_report(CHECKPOINTS[-1], part, part.settings["null_seeds"])
    numbers = [one for step, report in reports.items() for one in followed(report, step=step)]
    settings = {key: last.provenance[key] for key in ("model", "length", "prompts", "seed", "null_seeds")}
    return {"results": {"training": {"text": TEXTS[None], **settings, "usual": {}, "numbers": numbers}}}


def joining_of_seeds(part: Part) -> Mapping[str, Any]:
    """Follow the same numbers over what examples/encodings/as_qwen2.py wrote: rope runs as trained and as begun."""
    numbers = []
    for seed in part.settings["rope_seeds"]:
        for step in sorted((BUILD / "encodings" / f"rope-{seed}" / "qwen2").iterdir()):
            numbers += followed(followed_report(step, part, ()), step=step_of(step), run=seed)
    return {"results": {"runs": {"usual": {}, "numbers": numbers}}}


def step_of(directory: Path) -> int:
    """Return 200 of .../step00200."""
    return int(directory.name.removeprefix("step"))


def followed_report(directory: Path, part: Part, null_seeds: Sequence[int]) -> Any:
    """Return the report of the measures that `FOLLOWED` names, of one checkpoint."""
    measures = [OPTIONS.get(one, one) if part.settings["options"] else one for one in part.settings["measures"]]
    cut = {**CUT, "n_prompts": part.settings["n_prompts"], "null_seeds": null_seeds}
    model = tl_posgen.load_model(str(directory), tokenizer="mini")
    return tl_posgen.analyze(model, text_of("mini"), measures=[*measures, "loss"], **cut)


def followed(report: Any, **labels: Any) -> Iterator[dict[str, Any]]:
    """Yield the numbers that `FOLLOWED` names as entries of docs/numbers.json, under these further labels."""
    from measuring import entry_of

    for name in report:
        for one in entry_of(report[name])["numbers"]:
            named = {"measure": name, **{key: one[key] for key in one if key not in ("value", "low", "high", "inits")}}
            wanted = [want for want in FOLLOWED if all(named.get(key) == label for key, label in want.items())]
            if name == "loss" and one["name"] == "loss":
                yield {**one, **labels}
            elif wanted:
                yield {**one, "measure": name, **labels}


def encodings(part: Part) -> Mapping[str, Any]:
    """Measure the runs of examples/encodings/train.py in build/encodings, add those of before, the task and what
    examples/in_distribution measured, copy the figures."""
    example, length = EXAMPLES / "encodings", ("--windows", str(part.settings["windows"]))
    found = json.loads(printed(str(example / "measure.py"), "--work", str(BUILD / "encodings"), *length, "--json"))
    in_distribution = json.loads(printed(str(EXAMPLES / "in_distribution" / "draw.py"), "--json"))
    for figure in (example / "encodings.svg", EXAMPLES / "in_distribution" / "in_distribution.svg"):
        shutil.copy(figure, ROOT / "docs")
    task = json.loads((example / "task.json").read_text(encoding="utf-8"))
    return found | {"task": task, "in_distribution": in_distribution}


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


def benchmark(part: Part) -> Mapping[str, Any]:
    """Return what a file of benchmarks/ prints, and on which machine with which versions."""
    names = {line.split(":")[1].strip() for line in cpu_lines() if line.startswith("model name")}
    machine = f"{', '.join(names) or platform.machine()}, {os.cpu_count()} cores, {platform.system()}"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformer-lens", "transformers", "numpy"))
    arguments = part.settings.get("arguments", ())
    place = {"machine": machine, "versions": f"Python {platform.python_version()}, {versions}"}
    return place | {"printed": printed(str(ROOT / part.settings["file"]), *arguments)}


def findings(part: Part) -> Mapping[str, Any]:
    """Return the table of findings by models that an example prints."""
    stories = [str(SHARED / MODELS[name][0]) for name in ("stories260K", "babyllama105")]
    text = str(SHARED / MODELS["stories260K"][1])
    return {"printed": printed(str(ROOT / part.settings["file"]), "--text", text, "--stories", *stories)}


def cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


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
