"""Kinds of parts of README and docs, and how each is measured: from settings to results by name, or to JSON values."""

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from measure_pages import measured_of_models

import tl_posgen
from tl_posgen.claims import PAPERS
from tl_posgen.coupling import TokenCoupling
from tl_posgen.errors import UnsupportedModelError
from tl_posgen.frequencies.gap import Gap
from tl_posgen.position import Perturbation, PlanePerturbation, Variance
from tl_posgen.slash import slash_toy
from tl_posgen.sources import Sources
from tl_posgen.studies.emergence import emergence

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"
BUILD = ROOT / "build"  # not in the repository
KEPT = BUILD / "numbers"  # a second run goes on from it, pictures are drawn from it
EXAMPLES = ROOT / "examples"
WEIGHTS = Path(os.environ.get("TL_POSGEN_REAL_MODELS", BUILD / "real_models"))
TRAINED = BUILD / "seeds"  # examples/mini_model/train.py --work build/seeds/SEED --until 1251 --seed SEED
CUT: dict[str, Any] = {"length": 256, "n_prompts": 4, "seed": 0, "progress": False}
NULL: dict[str, Any] = {"nulls": 1}
CHECKPOINTS = sorted((EXAMPLES / "mini_model" / "checkpoints").iterdir())
REAL = ("SmolLM2-135M-Instruct", "Gemma 3 270M")
QWEN = "Qwen2.5-Coder-0.5B-Instruct"  # whose queries, keys and values have biases
LARGE = "Qwen2.5-Coder-1.5B-Instruct"
MODELS = {
    "mini": (None, None),
    "stories260K": ("models/stories260K", "text/tinystories.txt"),
    "atome_vanilla_1m": ("models/atome_vanilla_1m", "text/tinystories.txt"),
    REAL[0]: ("SmolLM2-135M-Instruct.Q4_1.gguf", "text/wikitext2.txt"),
    REAL[1]: ("gemma-3-270m-q4_k_m.gguf", "text/wikitext2.txt"),
    QWEN: ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "text/wikitext2.txt"),
    LARGE: ("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "text/wikitext2.txt"),
}
TEXTS = {
    None: "Alice's Adventures in Wonderland",
    "text/tinystories.txt": "TinyStories",
    "text/wikitext2.txt": "WikiText-2",
}
EDITS = ("shuffle_magnitudes", "shuffle_phases", "shuffle_positions", "mean_magnitude", "mean_phase", "phase_noise")
OPTIONS = {
    "cloze": Perturbation(ratios=(0.0, 0.5), reaches=("uniform",), n_draws=2, n_cloze=100, cloze_conditions=None),
    "perturbed planes": PlanePerturbation(edits=EDITS, strengths=(0.1, 0.3, 1.0)),
    "checked sources": Sources(check=True),
    "writers": Sources(by="head"),
    "places": Variance(absolute=True),
    "gap": Gap(gaps=(0, 4096, 8192, 12288), rules=("hold_planes", "quarter_turns", "lm_infinite")),
    "gap to 1.5 L": Gap(gaps=(0, 8192, 12288), rules=("hold_planes",)),
    "gap of Qwen": Gap(gaps=(0, 16384, 32768, 49152), rules=("hold_planes",)),
    "gap of Qwen to 1.5 L": Gap(gaps=(0, 49152), rules=("hold_planes",)),
}


@dataclass(frozen=True)
class Part:
    """One piece of measuring: what is asked of one model, and a function that gives the results by name.

    Attributes:
        model: of `MODELS`; "" where none is needed.
        settings: what stands in the pages beside its numbers; another setting is another part.
        make: from the settings to results by name, or to JSON values.
        more: from the results to further numbers and words.
    """

    model: str
    settings: Mapping[str, Any]
    make: Callable[["Part"], Mapping[str, Any]]
    more: Callable[[Any], Mapping[str, Any]] = lambda results: {}

    @property
    def file(self) -> str:
        """The name of what is kept of it: other settings are another file."""
        settings = json.dumps([self.model, dict(self.settings)], sort_keys=True, default=str)
        return hashlib.sha256(settings.encode()).hexdigest()[:10]

    @property
    def missing(self) -> str:
        """What lies outside the repository and is not there; "" where nothing lacks."""
        needed = [path_of(self.model)] if self.model and MODELS[self.model][0] else []
        needed += [TRAINED / str(seed) for seed in self.settings.get("training_seeds", ())]
        return ", ".join(str(path) for path in needed if not path.exists())


def path_of(name: str) -> Path:
    """Return where a model that is not bundled lies: what `make real-models` made, or the shared directory."""
    inside = str(MODELS[name][0])
    return next(WEIGHTS.rglob(inside), WEIGHTS / inside) if inside.endswith(".gguf") else SHARED / inside


@cache
def model_of(name: str) -> Any:
    return tl_posgen.load_model(str(path_of(name)) if MODELS[name][0] else name)


@cache
def text_of(name: str) -> str:
    from tl_posgen.models.tokens import bundled_text, read_text

    path = MODELS[name][1]
    return read_text(SHARED / path) if path else bundled_text()


def claims(part: Part) -> Mapping[str, Any]:
    """Judge claims; give them and every result that they read."""
    settings = {**CUT, **part.settings, "keep": KEPT / f"claims-{part.model.split()[0]}"}
    settings["checkpoints"] = CHECKPOINTS if settings.get("checkpoints") else ()
    return tl_posgen.judge_claims(model_of(part.model), text_of(part.model), **settings)


def verdicts_by_null(part: Part) -> Mapping[str, Any]:
    """Judge every claim that one pass decides, with each given kind of shuffled weights beside a random init."""
    from tl_posgen.claims.judging import claims_result
    from tl_posgen.claims.running import analyses_of
    from tl_posgen.models import open_session

    cut = {name: part.settings[name] for name in ("length", "n_prompts")}
    model, rows = open_session(model_of(part.model), precise=True), {}
    all_claims = [claim for paper in PAPERS.values() for claim in paper]
    measures = [
        measure for _, group, *_ in analyses_of(all_claims, model)[0] for measure in group if not measure.runs_model
    ]
    for kind in part.settings["kinds"]:
        nulls = {"random init": (0,), kind: (0,)}
        results = dict(tl_posgen.analyze(model, text_of(part.model), measures=measures, nulls=nulls, **cut))
        provenance = next(iter(results.values())).provenance
        for row in claims_result(all_claims, results, part.model, provenance, {}).frame().to_dict("records"):
            if row["verdict"] != "open":
                rows.setdefault(row["claim"], {"claim": row["claim"], "measured": row["measured"]})
                rows[row["claim"]] |= {kind: row["verdict"], f"null, {kind}": row["null"]}
    return {"rows": list(rows.values())}


def by_dtype(part: Part) -> Mapping[str, Any]:
    """Return, for weights of each dtype, the shares that softmax sees, additive r, size, r of three curves, the loss,
    and how far the position share of the head that moves most is from that of the first dtype."""
    import numpy as np

    cut = {**CUT, **{name: part.settings[name] for name in ("length", "n_prompts")}, "nulls": 0}
    variables = {"variance": ("position", "content", "interaction", "additive_r", "size"), "three_axis": ("r",)}
    rows, first = [], None
    for dtype in part.settings["dtypes"]:
        model = tl_posgen.load_model(str(path_of(part.model)), dtype=dtype)
        report = tl_posgen.analyze(model, text_of(part.model), measures=[*variables, "loss"], **cut)
        row = {name: report[measure].numbers(name).value for measure, names in variables.items() for name in names}
        positions = report["variance"].numbers.of_side(report["variance"].numbers.array("position"))
        first = positions if first is None else first
        largest_shift = float(np.abs(positions - first).max())
        rows.append(
            {"dtype": dtype, **row, "loss": report["loss"].numbers("loss").value, "largest_shift": largest_shift}
        )
    return {"rows": rows}


def rounded_keys(part: Part) -> Mapping[str, Any]:
    """Return the shares of chosen heads with every key of their layer as it is, and rounded to bfloat16; the largest
    entry of that layer's biases of keys."""
    import torch

    layer, heads = part.settings["layer"], part.settings["heads"]
    model, rows = model_of(part.model), []
    cut = {**CUT, **{name: part.settings[name] for name in ("length", "n_prompts")}, "nulls": 0}
    rounded = (f"blocks.{layer}.attn.hook_k", lambda keys, hook: keys.to(torch.bfloat16).to(keys.dtype))
    for keys, hooks in {"as they are": [], "in bfloat16": [rounded]}.items():
        with model.hooks(hooks):
            report = tl_posgen.analyze(model, text_of(part.model), measures=["variance"], layers=(layer,), **cut)
        frame = report["variance"].frame()
        chosen = frame[frame["head"].isin(heads)][["head", "position", "content", "interaction", "size"]]
        rows += [{"keys": keys, **row} for row in chosen.to_dict("records")]
    return {"rows": rows, "largest_bias": model.blocks[layer].attn.b_K.abs().max().item()}


def analysis(part: Part) -> Mapping[str, Any]:
    """Measure what the settings name, with the options in `OPTIONS`."""
    settings = {**CUT, **NULL, **part.settings}
    settings.pop("options", None)
    measures = [OPTIONS.get(name, name) for name in settings.pop("measures")]
    return tl_posgen.analyze(
        model_of(part.model), text_of(part.model), measures=measures, skip_unsupported=True, **settings
    )


def beyond_training(part: Part) -> Mapping[str, Any]:
    """Measure what the settings name on prompts longer than the model's context, which bridges take."""
    model = tl_posgen.load_model(part.model, backend="bridge")
    return tl_posgen.analyze(model, text_of(part.model), **{**CUT, **NULL, **part.settings})


def one_by_one(part: Part) -> Mapping[str, Any]:
    """Run every measure alone."""
    from tl_posgen.position import LengthExtrapolation

    model, text, settings = model_of(part.model), text_of(part.model), {**CUT, **NULL, **part.settings}
    results = {}
    for measure in measured_of_models():
        instance, run_settings = measure(), settings
        if measure is LengthExtrapolation:  # which has a length of its own
            instance, run_settings = LengthExtrapolation(inside=settings["length"]), {**settings, "length": None}
        try:
            results[measure.name] = tl_posgen.analyze(model, text, measures=[instance], **run_settings)[measure.name]
        except UnsupportedModelError:  # biases, which this model has not
            continue
    return results


def found_by_each(results: Any) -> dict[str, Any]:
    """Return, by measure, its findings, the kind of its first picture, and its prompts' length."""
    return {
        name: {
            "findings": result.findings(),
            "picture": next(iter(result.kinds), ""),
            "length": result.provenance["length"],
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

    results = {}
    for seed in part.settings["training_seeds"]:
        checkpoints = sorted((TRAINED / str(seed) / "checkpoints").iterdir())
        measures = ("three_axis", "coupling")
        result = emergence(checkpoints, text_of("mini"), measures=measures, tokenizer="mini", **CUT, nulls=0)
        results[f"seed {seed}"] = entry_of(result)
    return {"results": results}


def token_wise(part: Part) -> Mapping[str, Any]:
    tokens = TokenCoupling(tokens=tuple(range(25, 256, 25)))
    return {"token_coupling": tokens(model_of(part.model), text_of(part.model), **CUT, **NULL)}


def toy(part: Part) -> Mapping[str, Any]:
    return {"slash_toy": slash_toy(**part.settings)}


def width(part: Part) -> Mapping[str, Any]:
    from tl_posgen.coupling.coupling_scores import WIDTHS
    from tl_posgen.coupling.numbers.overlap import NORMS, width_alone

    by_width = width_alone(WIDTHS)
    by_norm = dict(zip(NORMS, by_width.coupling.tolist(), strict=True))
    return {
        "widths": list(WIDTHS),
        "k": by_width.k.tolist(),
        **by_norm,
        "r2": dict(zip(NORMS, by_width.r2.tolist(), strict=True)),
    }


def demo(part: Part) -> Mapping[str, Any]:
    """Return what `make demo` prints."""
    output = printed("-m", "tl_posgen", "analyze", "--out", str(BUILD / "demo"), "--force")
    return {"printed": output.replace(f"{ROOT}{os.sep}", "")}


def commands(part: Part) -> Mapping[str, Any]:
    """Return what these command lines print, without the path of the page."""
    outputs = {}
    for line in part.settings["lines"]:
        arguments = [*line.split()[1:], *(["--force"] if "--out" in line else [])]
        outputs[line] = printed("-m", "tl_posgen", *arguments).split("\n\nNot shown:")[0].rstrip()
    return {"printed": outputs}


def timed(part: Part) -> Mapping[str, Any]:
    """Return processor seconds, peak memory and the first sentence of each command. Each is kept when it is done, until
    all are."""
    files = {}
    for line in part.settings["lines"]:
        name = f"{part.model} {line}".encode()
        files[line] = KEPT / "commands" / f"{line.split()[0]}-{hashlib.sha256(name).hexdigest()[:10]}.json"
        if not files[line].is_file():
            files[line].parent.mkdir(parents=True, exist_ok=True)
            files[line].write_text(json.dumps(time_of(line, part.model)), encoding="utf-8")
    rows = [json.loads(file.read_text(encoding="utf-8")) for file in files.values()]
    for file in files.values():
        file.unlink()
    return {"rows": rows}


def time_of(line: str, name: str) -> dict[str, Any]:
    """Return the processor seconds, peak memory and first sentence of a command on a model."""
    options = ["--model", path_of(name), "--text", SHARED / str(MODELS[name][1])]
    options += ["--out", BUILD / "timed", "--force", "--full"]
    with tempfile.TemporaryFile("w+") as out:
        command = [sys.executable, "-m", "tl_posgen", *shlex.split(line), *options]
        began = subprocess.Popen(command, env=environment(), stdout=out, stderr=subprocess.DEVNULL)
        _, status, used = os.wait4(began.pid, 0)
        if os.waitstatus_to_exitcode(status):
            raise SystemExit(f"{line} failed on {name}")
        out.seek(0)
        says = first_sentence(out.read())
    seconds, peak = used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20
    print(f"{line.split()[0]}: {seconds:.0f} s, {peak:.1f} GB", file=sys.stderr, flush=True)
    return {"line": line, "seconds": seconds, "peak_gb": peak, "says": says}


def first_sentence(text: str) -> str:
    """Return the first sentence that a command prints behind a bullet; "" without one."""
    behind = " ".join(text.partition("•")[2].partition("•")[0].split())
    return re.split(r"(?<=[a-z0-9)\]%])\. (?=[A-Z])", behind)[0].removesuffix(".")


def environment() -> dict[str, str]:
    """Return the environment of a command whose output is shown."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", "NO_COLOR": "1", "TQDM_DISABLE": "1"}


def printed(*arguments: str) -> str:
    """Return what a Python command writes to its standard output."""
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment(), capture_output=True, text=True)
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
