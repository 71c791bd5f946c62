"""Which part of an analysis takes how long, beside what its operations would take at this machine's peak.

    python benchmarks/parts.py [--model SmolLM2-135M-Instruct.Q4_1.gguf] [--backend bridge] [--length 512] [--shuffled]

Processor seconds on one thread, each counted for the innermost part alone; the first analysis, not counted, probes the
model and fills caches. The floor of the passes is 2 operations a parameter of the blocks and of the output and token,
and 4 d_model a pair of tokens and layer; that of the proof 2 d_head a pair and head; both at the speed of a large
matrix product here. The other parts have no floor worth naming: they read few numbers many times.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from functools import wraps
from pkgutil import resolve_name
from statistics import median
from typing import Any

import torch

import tl_posgen
from tl_posgen.core import registry
from tl_posgen.models import bundled_text
from tl_posgen.models.session import session_of

MEASURES = ("variance", "three_axis", "mean_key", "attention_examples")
PARTS = {  # functions -> the part that their own seconds belong to; what they call of other parts is counted there
    "tl_posgen.core.steps:one_pass": "forward passes",
    "tl_posgen.models.capture.capturing:proved_capture": "proof of each pass",
    "tl_posgen.core.null_models:NullModels.build": "null models made",
    "tl_posgen.core.null_models:fingerprint": "weights hashed",
    "tl_posgen.core.store:fingerprint": "weights hashed",
    "tl_posgen.core.sums:Sums.add_layer": "sums over prompts",
    "tl_posgen.core.engine:result_of": "results joined",
    "tl_posgen.core.report:Report.html": "page",
}


class Stopwatch:
    """Processor seconds by part, of the innermost part that runs."""

    def __init__(self) -> None:
        self.seconds, self.open = dict[str, float](), ["the rest"]
        self.since = time.process_time()

    def turn(self) -> None:
        now = time.process_time()
        part = self.open[-1]
        self.seconds[part] = self.seconds.get(part, 0) + now - self.since
        self.since = now

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its seconds counted for this part."""

        @wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            self.turn()
            self.open.append(part)
            try:
                return function(*arguments, **options)
            finally:
                self.turn()
                self.open.pop()

        return run


def watch(stopwatch: Stopwatch) -> None:
    """Count the parts, and what each measure does with a layer and at the end."""
    for place, part in PARTS.items():
        module, _, name = place.partition(":")
        owner = resolve_name(f"{module}:{name.rpartition('.')[0]}") if "." in name else resolve_name(module)
        name = name.rpartition(".")[2]
        setattr(owner, name, stopwatch.timed(part, getattr(owner, name)))
    for measure in MEASURES:
        kind: Any = registry.find(measure)
        for method in ("of_layer", "of_layers", "of_sums"):
            setattr(kind, method, stopwatch.timed(measure, getattr(kind, method)))


def operations_per_second() -> float:
    """Return the speed of a product of float32 matrices of 1,024 rows."""
    a, speeds = torch.randn(1024, 1024), []
    for _ in range(7):
        began = time.process_time()
        torch.mm(a, a)
        speeds.append(2 * 1024**3 / (time.process_time() - began))
    return median(speeds)


def floors(model: Any, n: int, n_prompts: int, n_models: int) -> Mapping[str, float]:
    """Return the operations of the passes and of their proof."""
    cfg, n_parameters = model.cfg, session_of(model).backend.n_parameters()
    pairs = n_prompts * n * n * cfg.n_layers
    passes = 2 * n_parameters * n * n_prompts + 4 * cfg.d_model * pairs
    return {"forward passes": n_models * passes, "proof of each pass": n_models * 2 * cfg.d_head * cfg.n_heads * pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--backend", choices=["auto", "hooked", "bridge"], default="auto")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--shuffled", action="store_true", help="a model of shuffled weights too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, text = tl_posgen.load_model(options.model, options.backend), bundled_text()
    settings: dict[str, Any] = {"length": options.length, "n_prompts": 4, "progress": False, "measures": MEASURES}
    settings |= {} if options.shuffled else {"nulls": {"random init": (0,)}}
    tl_posgen.analyze(model, text, **settings)
    stopwatch, speed = Stopwatch(), operations_per_second()
    watch(stopwatch)
    stopwatch.since = time.process_time()
    tl_posgen.analyze(model, text, **settings).html()
    stopwatch.turn()
    total = sum(stopwatch.seconds.values())
    least = floors(model, options.length, settings["n_prompts"], 3 if options.shuffled else 2)
    print(f"{session_of(model).label}, 4 prompts of {options.length}: {total:.2f} s, {speed / 1e9:.0f}e9 operations/s")
    for part, seconds in sorted(stopwatch.seconds.items(), key=lambda item: -item[1]):
        floor = f"{least[part] / speed:7.2f} s floor" if part in least else ""
        print(f"{part:24}{seconds:8.2f} s{seconds / total:7.0%} {floor}")


if __name__ == "__main__":
    main()
