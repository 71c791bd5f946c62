"""What a report costs on machines that people have, computed from the rates that benchmarks/memory.py measured."""

import re
from collections.abc import Iterator
from types import SimpleNamespace

from tl_posgen.models.memory import IMPORTS, PEAK

TOKENS = 4 * 512  # of a report
BYTES = 2  # of a weight in bfloat16 or float16
LOAD = r"load ([\d.]+) s and initialise ([\d.]+) s a billion weights; "
PASS = r"forward ([\d.]+) s a billion weights and 1,000 tokens; measures ([\d.]+) ms a head and 1,000 tokens"
MACHINES = {  # bytes free; operations a second of the passes, None as measured; an example, its billion weights, heads
    "laptop, 8 GB": (5e9, None, "Llama-3.2-1B", 1.24, 16 * 32),
    "Colab with a T4": (12.7e9, 1e13, "Llama-3.2-3B", 3.21, 28 * 24),  # memory of the host; a sixth of the T4's peak
    "one GPU of 80 GB": (78e9, 1e14, "Llama-3.1-8B", 8.03, 32 * 32),  # a tenth to a third of an A100's or H100's peak
}


def costs(printed: str) -> Iterator[SimpleNamespace]:
    """Yield by machine: the largest model, and memory and seconds of an example beside a random init, from the
    benchmark's lines on a bridge."""
    found = re.search(LOAD + PASS, printed[printed.index("bridge: ") :])
    if found is None:
        raise ValueError("benchmarks/memory.py no longer prints its rates as docs/source/machines.py reads them")
    load, initialise, forward, measures = map(float, found.groups())
    for machine, (free, speed, example, billions, heads) in MACHINES.items():
        weights = billions * (load + initialise)
        passes = 2 * billions * (forward * TOKENS / 1e3 if speed is None else 2e9 * TOKENS / speed)
        counted = 2 * heads * measures / 1e3 * TOKENS / 1e3 if speed is None else None
        yield SimpleNamespace(
            machine=machine,
            largest=(free - IMPORTS) / PEAK / BYTES / 1e9,
            example=example,
            gigabytes=(billions * 1e9 * BYTES * PEAK + IMPORTS) / 1e9,
            weights=weights,
            passes=passes,
            measures=counted,
        )
