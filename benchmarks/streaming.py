"""What an analysis of long prompts costs, in multiples of the forward pass with fused attention and nothing else.

    python benchmarks/streaming.py [--lengths 1024 4096] [--rounds 5]

Six layers of six heads, d_model 288, random weights, one prompt, one thread. Ways: the forward pass in
`tl_posgen.streaming`, its peer; TransformerLens' own forward pass, which forms every score; the streamed pass under
hooks that hold planes, limit distances or edit rows; and the streamed pass with measures behind it. Seconds are
processor time, medians over rounds in which the ways take turns. Then the peak memory of a process that takes three
measures of the bundled model, for growing prompts: by the length it is linear.

Operations a token of a head of D = 48 numbers beside the pass, 12 d_model^2 + 4 L D a token and layer by itself:
a three-axis fit 6 D^2 and 128 D inside chunks (see three_axis.py), variance as much, mean_key with three distances
19 D^2 and 384 D inside chunks; with and without the first token together.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from slash import random_model

MEASURES = {
    "three_axis": ["three_axis"],
    "variance": ["variance"],
    "mean_key": ["mean_key"],
    "all three": ["three_axis", "variance", "mean_key"],
}


def ways(model, tokens):
    """name -> what is timed."""
    import tl_posgen
    from tl_posgen.core.feed import Feed
    from tl_posgen.core.registry import requested
    from tl_posgen.editing.replace_scores import replace_scores
    from tl_posgen.editing.score_functions import RowByRow
    from tl_posgen.hooks import hold_planes, lm_infinite
    from tl_posgen.models.capture.capturing import run_capture
    from tl_posgen.models.session import Choices, session_of

    far = tokens.shape[1] // 4
    edited = {
        "planes held": hold_planes(model, range(12, 24), at=far),
        "all planes held": hold_planes(model, "all", at=far),
        "LM-Infinite": lm_infinite(model, far),
        "rows edited": replace_scores(model, RowByRow(lambda capture: capture.scores())),
    }

    def forward(hooks: Sequence[Any] = ()) -> None:
        with torch.no_grad(), tl_posgen.streaming(model):
            model.run_with_hooks(tokens, return_type=None, fwd_hooks=list(hooks))

    def formed() -> None:
        with torch.no_grad():
            model(tokens, return_type=None)

    def measured(names: list[str]) -> None:
        feed = Feed(requested(names))
        with session_of(model).choosing(Choices(True)):
            run_capture(model, tokens, feed, needs=feed.needs)
        feed.datasets("benchmark")

    calls = {"streamed forward": forward, "formed scores": formed}
    calls |= {name: partial(forward, hooks) for name, hooks in edited.items()}
    return calls | {name: partial(measured, names) for name, names in MEASURES.items()}


def medians(length: int, rounds: int) -> dict[str, float]:
    """Seconds of every way."""
    model = random_model(length)
    tokens = torch.randint(0, 4096, (1, length), generator=torch.Generator().manual_seed(0))
    times: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        for name, way in ways(model, tokens).items():
            start = time.process_time()
            way()
            if turn:  # the first one proves the model, and warms the caches
                times.setdefault(name, []).append(time.process_time() - start)
    return {name: median(seconds) for name, seconds in times.items()}


def peak(length: int) -> None:
    """Peak memory of this process, before and after the analysis of one prompt of the bundled model, in GB."""
    import tl_posgen
    from tl_posgen.models.loading.load import without_context_limit

    model = without_context_limit(tl_posgen.load_model("mini", "bridge"))
    options = {"measures": MEASURES["all three"], "nulls": 0, "progress": False, "streaming": True}
    tokens = torch.randint(0, model.cfg.d_vocab, (1, length), generator=torch.Generator().manual_seed(0))
    tl_posgen.analyze(model, tokens[:, :64], **options)
    before, start = peak_gb(), time.process_time()
    tl_posgen.analyze(model, tokens, **options)
    print(json.dumps({"before": before, "after": peak_gb(), "seconds": time.process_time() - start}))


def peak_gb() -> float:
    """Largest resident memory so far. Linux only; ru_maxrss would count the parent's."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 4096])
    parser.add_argument("--longest", type=int, nargs="*", default=[4096, 8192, 16_384, 32_768])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        return peak(options.peak)
    print(f"6 layers, 6 heads, d_model 288, 1 thread, float32; s of processor time, medians of {options.rounds}")
    for length in options.lengths:
        by_way = medians(length, options.rounds)
        for name, seconds in by_way.items():
            print(
                f"{length:6} tokens  {name:17} {seconds:8.2f} s {seconds / by_way['streamed forward']:7.2f}", flush=True
            )
    points = []
    for length in options.longest:
        command = [sys.executable, "-W", "ignore", __file__, "--peak", str(length)]
        # every large block goes back to the system when freed, so that the peak means something
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
        answer = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        cost = json.loads(answer.splitlines()[-1])
        points.append((length, cost["after"]))
        print(
            f"{length:6} tokens  bundled model, all three: peak {cost['after']:.2f} GB, {cost['seconds']:.0f} s",
            flush=True,
        )
    if len(points) > 1:
        (n0, gb0), (n1, gb1) = points[0], points[-1]
        print(f"{(gb1 - gb0) / (n1 - n0) * 1e6:.0f} kB a token")


if __name__ == "__main__":
    main()
