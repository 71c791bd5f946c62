"""Seconds and memory of whole models on a GPU, step by step.

    python benchmarks/gpu_models.py [--models SmolLM2-135M Llama-3.2-1B Llama-3.1-8B] [--lengths 512 8192] [--rounds 3]

Without a GPU it says so and ends. Models of these shapes with random weights in bfloat16 are written to a temporary
directory and loaded as bridges. The default measures read four prompts of each length; of more than 4,096 tokens
streamed. The table gives seconds of loading, of a random init, of the forward passes with fused attention, of the
measures beyond those, and of `analyze` from the files to the report with one random init; and the peak of GPU memory of
the last. Seconds of passes and measures are medians, the others are of one run each, after one that warmed up.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu import FORMED_UP_TO, analyse, forward, seconds

PROMPTS = 4
LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 131_072}
MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49_152,
        "max_position_embeddings": 8192,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
    },
    "Llama-3.2-1B": LLAMA | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    "Llama-3.1-8B": LLAMA | {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32},
    "tiny": LLAMA | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 2048},
}
COLUMNS = ("load", "random init", "forward", "measures", "in all", "peak GB")


def write_model(name: str, directory: Path) -> None:
    """Write a Llama of this shape with random weights, and the bundled tokenizer."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from tl_posgen.models.conversion.files import MINI

    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**MODELS[name], dtype=torch.bfloat16))
    model.save_pretrained(directory)
    for file in MINI.glob("tokenizer*"):
        shutil.copy(file, directory)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of one call, the device waited for, and what it returns."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin, result


def measured(directory: Path, length: int, rounds: int) -> dict[str, float]:
    """Return seconds by step, and the peak of GPU memory in GB."""
    from tl_posgen.models.loading.load import Pretrained
    from tl_posgen.models.loading.random_init import random_like

    pretrained, streaming = Pretrained(directory, "bridge", device="cuda"), length > FORMED_UP_TO
    tokens = torch.randint(0, 2000, (PROMPTS, length), generator=torch.Generator().manual_seed(0)).cuda()
    load, model = timed(pretrained.load)
    passes = seconds(lambda: forward(model, tokens), rounds)
    passes_and_measures = seconds(lambda: analyse(model, tokens, None, streaming), rounds)
    init, model = timed(lambda: random_like(model, 0))
    del model
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    in_all, _ = timed(lambda: analyse(pretrained, tokens, None, streaming, 1))
    peak = torch.cuda.max_memory_allocated() / 1e9
    return dict(zip(COLUMNS, (load, init, passes, passes_and_measures - passes, in_all, peak), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", choices=list(MODELS), nargs="+", default=["SmolLM2-135M", "Llama-3.2-1B", "Llama-3.1-8B"]
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing is measured")
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'model':12} {'weights GB':>10} {'tokens':>10} " + " ".join(f"{column:>11}" for column in COLUMNS))
    for name in options.models:
        with tempfile.TemporaryDirectory() as directory:
            write_model(name, Path(directory))
            weights = sum(file.stat().st_size for file in Path(directory).glob("*.safetensors")) / 1e9
            measured(Path(directory), 64, 1)  # warms up
            for length in options.lengths:
                row = " ".join(f"{value:11.2f}" for value in measured(Path(directory), length, options.rounds).values())
                print(f"{name:12} {weights:10.2f} {PROMPTS} x {length:6} {row}", flush=True)


if __name__ == "__main__":
    main()
