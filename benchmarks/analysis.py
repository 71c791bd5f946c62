"""The default analysis with its page, beside plain forward passes of the same prompts through as many models.

    python benchmarks/analysis.py [--model SmolLM2-135M-Instruct.Q4_1.gguf] [--backend bridge] [--rounds 5]

Processor seconds on one thread, in turns: passes, analysis, passes. The analysis has one random init, or `--shuffled`
a model of shuffled weights too, so it measures two models, or three.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import tl_posgen
from tl_posgen.models import bundled_text, to_prompts


def seconds(run: Callable[[], Any]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--backend", choices=["auto", "hooked", "bridge"], default="auto")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shuffled", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, text = tl_posgen.load_model(options.model, options.backend), bundled_text()
    cut = {"length": options.length, "n_prompts": 4}
    rows = to_prompts(model, text, **cut)
    nulls: Any = 1 if options.shuffled else {"random init": (0,)}

    @torch.no_grad()
    def passes() -> None:
        for row in rows:
            model(row[None])

    def analysis() -> None:
        with tempfile.TemporaryDirectory() as folder:
            tl_posgen.analyze(model, text, progress=False, **cut, nulls=nulls).write(folder + "/report")

    n_models, ratios = 3 if options.shuffled else 2, []
    for _ in range(options.rounds):
        before, of_analysis, after = seconds(passes), seconds(analysis), seconds(passes)
        of_passes = n_models * (before + after) / 2
        ratios.append(of_analysis / of_passes)
        print(f"analysis and page {of_analysis:.1f} s, passes of {n_models} models {of_passes:.1f} s: {ratios[-1]:.2f}")
    print(f"median of {options.rounds}: {median(ratios):.2f} times the passes")


if __name__ == "__main__":
    main()
