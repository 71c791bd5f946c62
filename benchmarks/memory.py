"""What a measurement takes of a machine: the peak of a process that measures a model beside its random init, and the
seconds of each step.

    python benchmarks/memory.py [--sizes 284M 135M] [--backends bridge hooked] [--length 512] [--nulls 1]

A Llama with random weights of each size is written in bfloat16 to a temporary directory, and deleted afterwards. One
process a size and backend loads it by its name, and takes three_axis, variance and mean_key of one prompt, of the model
and of its random init: the table gives its peak memory (ru_maxrss), what of that the imports take, seconds of processor
time from the load to the result, and the targets: 1.2 times the weights + .8 GB as a bridge, 2.2 times the weights as a
HookedTransformer. 135M has the shape, dtype and vocabulary (49,152) of SmolLM2, and from two prompts on the default
measures; wanted: twice the weights + 1 GB, however many prompts. Two of the other sizes give a slope, bytes of peak a
byte of weights, and what 8 and 70 billion weights would take by it. A second process times each step by itself:
loading, initialising, a forward pass, and the measures beside it; their rates, at the larger size, say what a job of
4 prompts of 512 tokens takes of models of the shape of Llama 2.
"""

import argparse
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

SIZES = {
    "42M": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8},
    "284M": {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9},
}
REAL = "135M"  # SmolLM2's shape and vocabulary, in float32: rows of their own, on some numbers of prompts
PROMPTS = (1, 2, 4, 8)
VOCABULARY = {"42M": 16_000, "284M": 16_000, "1B": 32_000, REAL: 49_152}
KEY_HEADS = {"42M": 8, "284M": 16, "1B": 8, REAL: 3}
MEASURES = ["three_axis", "variance", "mean_key"]
PASSES = 2048  # tokens of a job of the position atlas
SHAPES = {"7 B": (6.7, 32 * 32), "70 B": (69.0, 80 * 64)}  # Llama 2: billion weights, heads of 128 numbers
TARGETS = {"bridge": (1.2, 0.8), "hooked": (2.2, 0.0)}  # times the weights, plus GB
REAL_TARGET = (2.0, 1.0)


def write_model(size: str, directory: Path) -> None:
    """A Llama of this size with random weights, and the bundled tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from tl_posgen.models.conversion.files import MINI

    more = {"vocab_size": VOCABULARY[size], "num_key_value_heads": KEY_HEADS[size], "max_position_embeddings": 2048}
    torch.manual_seed(1)
    dtype = torch.float32 if size == REAL else torch.bfloat16
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES[size], **more, dtype=dtype))
    model.save_pretrained(directory)
    for file in MINI.glob("tokenizer*"):
        shutil.copy(file, directory)


def measure(directory: str, backend: str, length: int, nulls: int, prompts: int) -> None:
    """In a process of its own: peak and seconds as a line of JSON; of several prompts, the usual measures."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    import tl_posgen
    from tl_posgen.models.loading.load import Pretrained
    from tl_posgen.models.tokens import bundled_text

    tl_posgen.load_model("mini", backend)  # imports what loading needs
    imports, start = peak(), time.process_time()
    cut = {"length": length, "n_prompts": prompts, "nulls": nulls, "progress": False}
    measures = MEASURES if prompts == 1 else None
    tl_posgen.analyze(Pretrained(directory, backend), bundled_text(), measures=measures, **cut)
    print(json.dumps({"imports": imports, "peak": peak(), "seconds": time.process_time() - start}))


def time_steps(directory: str, backend: str, length: int) -> None:
    """In a process of its own: seconds of processor time a step, and what it was done on, as a line of JSON."""
    import torch

    import tl_posgen
    from tl_posgen.models.loading.load import Pretrained
    from tl_posgen.models.loading.random_init import random_like
    from tl_posgen.models.tokens import bundled_text, to_prompts

    tl_posgen.load_model("mini", backend)
    clock = [time.process_time()]
    model = Pretrained(directory, backend).load()
    clock.append(time.process_time())
    [tokens] = to_prompts(model, bundled_text(), length=length, n_prompts=1)
    with torch.inference_mode():
        model(tokens[None])
        clock.append(time.process_time())
        model(tokens[None])
        clock.append(time.process_time())
    tl_posgen.analyze(model, tokens[None], measures=MEASURES, nulls=0, progress=False)
    clock.append(time.process_time())
    random_like(model, 0)
    clock.append(time.process_time())
    load, _, forward, with_measures, init = (after - before for before, after in itertools.pairwise(clock))
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    heads = model.cfg.n_layers * model.cfg.n_heads
    seconds = {"load": load, "init": init, "forward": forward, "measures": max(0.0, with_measures - forward)}
    print(json.dumps(seconds | {"billions": size, "heads": heads}))


def rates(steps: dict, length: int) -> str:
    """What each step took, by what it grows with; and what a job takes of larger models by that."""
    billions, heads, thousands = steps["billions"], steps["heads"], length / 1000
    load, init = steps["load"] / billions, steps["init"] / billions
    forward, measures = steps["forward"] / billions / thousands, steps["measures"] / heads / thousands
    lines = [
        f"  load {load:.1f} s and initialise {init:.1f} s a billion weights; forward {forward:.1f} s a billion weights "
        f"and 1,000 tokens; measures {measures * 1000:.0f} ms a head and 1,000 tokens"
    ]
    for name, (weights, n_heads) in SHAPES.items():
        tokens = PASSES / 1000
        passes, measuring = 2 * forward * weights * tokens, 2 * measures * n_heads * tokens
        job = (load + init) * weights + passes + measuring
        lines.append(
            f"  {name}, {n_heads} heads, with its random init on {PASSES:,} tokens, here: {job / 3600:.2f} h, of which "
            f"weights {(load + init) * weights / 3600:.2f}, passes {passes / 3600:.2f}, measures {measuring / 3600:.2f}"
        )
    return "\n".join(lines)


def peak() -> float:
    """GB of memory that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["284M", REAL])
    parser.add_argument("--backends", nargs="+", choices=list(TARGETS), default=["bridge"])
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--nulls", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--measure", nargs=2, metavar=("DIRECTORY", "BACKEND"), help=argparse.SUPPRESS)
    parser.add_argument("--time", nargs=2, metavar=("DIRECTORY", "BACKEND"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        return measure(*options.measure, options.length, options.nulls, options.prompts)
    if options.time:
        return time_steps(*options.time, options.length)
    print("size  backend  prompts  weights GB  peak GB  imports GB  target GB  seconds", flush=True)
    points: dict[str, list[tuple[float, float]]] = {}
    steps: dict[str, dict[str, float]] = {}
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as directory:
            command = [sys.executable, "-c", f"import memory; memory.write_model({size!r}, memory.Path({directory!r}))"]
            subprocess.run(command, check=True, cwd=Path(__file__).parent, capture_output=True)
            weights = sum(file.stat().st_size for file in Path(directory).glob("*.safetensors")) / 1e9
            for backend in options.backends:
                cut = ["--length", str(options.length), "--nulls", str(options.nulls)]
                times, plus = REAL_TARGET if size == REAL else TARGETS[backend]
                for prompts in PROMPTS if size == REAL else (1,):
                    cost = in_a_process("--measure", directory, backend, *cut, "--prompts", str(prompts))
                    row = f"{size:5} {backend:8} {prompts:7} {weights:11.2f} {cost['peak']:8.2f}"
                    more_cells = f"{cost['imports']:11.2f} {times * weights + plus:10.2f} {cost['seconds']:8.1f}"
                    print(row, more_cells, flush=True)
                if size != REAL:
                    steps[backend] = in_a_process("--time", directory, backend, *cut)
                    points.setdefault(backend, []).append((weights, cost["peak"]))
    for backend, measured in points.items():
        if len(measured) > 1:
            (w0, p0), (w1, p1) = measured[0], measured[-1]
            slope = (p1 - p0) / (w1 - w0)
            far = ", ".join(f"{n} B {p1 + slope * (2 * n - w1):.0f} GB" for n in (8, 70))
            print(f"{backend}: {slope:.2f} bytes of peak a byte of weights; by that {far} in bfloat16")
        print(rates(steps[backend], options.length))


def in_a_process(*arguments: str) -> dict[str, float]:
    """The line of JSON that this file prints with these arguments."""
    ran = subprocess.run([sys.executable, __file__, *arguments], check=True, capture_output=True, text=True)
    return json.loads(ran.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
