"""What the slash analysis of one prompt costs, beside the forward pass it rides on and beside caching every pattern.

    python benchmarks/slash.py --tokens 1024

Each way runs in a process of its own, so that its peak memory is its own. Ways: the bare forward pass; the same with
the capture hooks and nothing behind them; with the whole measure `slash` behind them (all distances, entropies,
attention distance, with and without the first token, and the spectra of Q and K); and run_with_cache of all patterns
followed by numpy diagonals (means). Ratios are medians over rounds of the way over the forward pass beside it.
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from statistics import median

import numpy as np
import torch

from tl_posgen.core.feed import Feed
from tl_posgen.core.registry import requested
from tl_posgen.models.capture.capturing import run_capture

WAYS = ("forward", "capture", "slash", "cached patterns")


def random_model(n_tokens: int):
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(
        n_layers=6,
        d_model=288,
        n_heads=6,
        d_head=48,
        n_ctx=n_tokens,
        d_vocab=4096,
        act_fn="silu",
        gated_mlp=True,
        d_mlp=768,
        normalization_type="RMS",
        positional_embedding_type="rotary",
        rotary_dim=48,
        seed=0,
    )
    return HookedTransformer(config).eval()


def slash_scores(model, tokens) -> np.ndarray:
    feed = Feed(requested("slash"))
    run_capture(model, tokens, feed, needs=feed.needs)
    return feed.datasets("benchmark")["slash"]["score"].values


def cached_diagonals(model, tokens) -> np.ndarray:
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens, names_filter=lambda name: name.endswith("hook_pattern"))
    patterns = np.stack([cache["pattern", layer][0].numpy() for layer in range(model.cfg.n_layers)])
    n = patterns.shape[-1]
    return np.stack([np.diagonal(patterns, -d, -2, -1).mean(-1) for d in range(n)], axis=-1)


def forward(model, tokens) -> None:
    with torch.no_grad():
        model(tokens, return_type=None)


def run(way: str, model, tokens):
    if way == "forward":
        return forward(model, tokens)
    if way == "capture":
        return run_capture(model, tokens, lambda capture: None, needs=frozenset({"pattern"}))
    return slash_scores(model, tokens) if way == "slash" else cached_diagonals(model, tokens)


def measure(way: str, n_tokens: int, rounds: int, threads: int) -> tuple[float, float, float, float]:
    """Median seconds of the way and ratio to the forward pass beside it; MiB of peak memory of forward pass and way."""
    torch.set_num_threads(threads)
    model = random_model(n_tokens)
    tokens = torch.randint(0, 4096, (1, n_tokens), generator=torch.Generator().manual_seed(0))
    run_capture(model, tokens[:, :8], lambda capture: None)  # probes the model, once
    before = peak_memory()
    forward(model, tokens)
    of_forward = peak_memory()
    run(way, model, tokens)
    extra = peak_memory()
    bare, times = [], []
    for _ in range(rounds):
        bare.append(timed(lambda: forward(model, tokens)))
        times.append(timed(lambda: run(way, model, tokens)))
    ratio = median(way / forward for way, forward in zip(times, bare, strict=True))
    return median(times), ratio, of_forward - before, extra - before


def timed(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def peak_memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(*measure(options.way, options.tokens, options.rounds, options.threads))
        return
    # every large block goes back to the system when freed, so that the peak means something
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    print(f"6 layers, 6 heads, d_model 288, {options.tokens} tokens, {options.threads} thread(s), float32")
    print(f"{'way':16} {'s':>7} {'/ forward':>10} {'peak MiB':>9} {'over forward':>13}")
    for way in WAYS:
        command = [sys.executable, "-W", "ignore", __file__, "--way", way]
        for name in ("tokens", "rounds", "threads"):
            command += [f"--{name}", str(getattr(options, name))]
        answer = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        seconds, ratio, of_forward, peak = map(float, answer.split("\n")[-2].split())
        print(f"{way:16} {seconds:7.3f} {ratio:10.2f} {peak:9.0f} {peak - of_forward:13.0f}")


if __name__ == "__main__":
    main()
