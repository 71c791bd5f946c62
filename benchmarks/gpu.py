"""Time and memory of analyses on a GPU, beside a forward pass; hot kernels beside the memory's bandwidth.

    python benchmarks/gpu.py [--lengths 1024 4096 16384 131072] [--rounds 5] [--heads 32] [--d-head 128]

Without a GPU it says so and ends. One layer of the shape of an 8 B model (32 heads of 128, 8 of keys, d_model 4096,
random weights, bfloat16; float32 for coupling) reads prompts: its forward pass with fused attention, which is the peer;
then three_axis, the default measures and, streamed, both again; coupling. A pass that forms scores holds several
[head, query, key] arrays, so such passes end at 4,096 tokens, and coupling with them. "a prompt" is what a further
prompt takes, (five prompts - one) / 4, and "once" what an analysis takes whatever it reads, one prompt - a prompt.
Seconds are medians of synchronised calls, and peaks are of one prompt beyond the weights.

Every kernel has to read its arrays once, and that is its floor: bytes over the bandwidth that a copy of a large array
reaches in the same run. A head of L tokens with D numbers holds 2 L D numbers of q and k, 4 bytes each, as sums of
bfloat16 numbers are made from float32 on.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

FORMED_UP_TO = 4096  # tokens
PROMPTS = 5


def seconds(call: Callable[[], object], rounds: int) -> float:
    """Return the median of so many calls, the device waited for; a first call warms up."""
    times = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return median(times[1:])


def peak(call: Callable[[], object]) -> int:
    """Return the bytes that a call holds at most, beyond those held before."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def layer_of_8b(heads: int, d_head: int, n_tokens: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(
        n_layers=1,
        d_model=heads * d_head,
        n_heads=heads,
        n_key_value_heads=max(1, heads // 4),
        d_head=d_head,
        d_mlp=heads * d_head * 7 // 2,
        n_ctx=n_tokens,
        d_vocab=4096,
        act_fn="silu",
        gated_mlp=True,
        normalization_type="RMS",
        positional_embedding_type="rotary",
        rotary_dim=d_head,
        dtype=dtype,
        device="cuda",
        seed=0,
    )
    return HookedTransformer(config).eval()


def forward(model: Any, tokens: torch.Tensor) -> None:
    """Run each prompt by itself, as an analysis does, with fused attention."""
    import tl_posgen

    with torch.no_grad(), tl_posgen.streaming(model):
        for prompt in tokens:
            model(prompt[None], return_type=None)


def analyse(model: Any, tokens: torch.Tensor, measures: Any, streaming: bool, nulls: int = 0) -> None:
    import tl_posgen

    tl_posgen.analyze(model, tokens, measures=measures, streaming=streaming, nulls=nulls, progress=False)


def analyses(model: Any, tokens: torch.Tensor) -> dict[str, Callable[[], object]]:
    """name -> what is timed: the streamed forward pass, and analyses of these prompts without a random init."""
    calls: dict[str, Callable[[], object]] = {"forward pass": lambda: forward(model, tokens)}
    for streaming in (False, True) if tokens.shape[1] <= FORMED_UP_TO else (True,):
        way = "streamed" if streaming else "formed"
        calls |= {f"three_axis, {way}": lambda streaming=streaming: analyse(model, tokens, "three_axis", streaming)}
        calls |= {f"default measures, {way}": lambda streaming=streaming: analyse(model, tokens, None, streaming)}
    return calls


def table_of_analyses(heads: int, d_head: int, lengths: list[int], rounds: int) -> None:
    columns = f"{'tokens':>7} {'a prompt, s':>11} {'/ forward':>9} {'once, s':>8} {'peak MiB':>9}"
    print(f"{'one layer of an 8 B model':26} {columns}")
    model = layer_of_8b(heads, d_head, max(lengths))
    for length in lengths:
        rows_of(lambda tokens: analyses(model, tokens), length, rounds)
    precise = layer_of_8b(heads, d_head, max(lengths), torch.float32)
    for length in lengths:
        if length <= FORMED_UP_TO:
            rows_of(lambda tokens: analyses_in_float32(precise, tokens), length, rounds)


def analyses_in_float32(model: Any, tokens: torch.Tensor) -> dict[str, Callable[[], object]]:
    """name -> what is timed of a model in float32: the streamed forward pass, and coupling."""
    return {
        "forward pass, float32": lambda: forward(model, tokens),
        "coupling, float32": lambda: analyse(model, tokens, "coupling", False),
    }


def rows_of(timed: Callable[[torch.Tensor], dict[str, Callable[[], object]]], length: int, rounds: int) -> None:
    """Print a row of each call; the first one is the peer of the others."""
    tokens = torch.randint(0, 4096, (PROMPTS, length), generator=torch.Generator().manual_seed(0)).cuda()
    of_one, of_all = timed(tokens[:1]), timed(tokens)
    first = None
    for name, call in of_one.items():
        single = seconds(call, rounds)
        a_prompt = (seconds(of_all[name], rounds) - single) / (PROMPTS - 1)
        first = first or a_prompt
        row = f"{length:7} {a_prompt:11.4f} {a_prompt / first:9.1f} {single - a_prompt:8.3f} {peak(call) / 2**20:9.0f}"
        print(f"{name:26} {row}", flush=True)


def table_of_kernels(heads: int, d_head: int, lengths: list[int], rounds: int, copied: int) -> None:
    large = torch.empty(copied, device="cuda")
    copy = torch.empty_like(large)
    bandwidth = 2 * 4 * large.numel() / seconds(lambda: copy.copy_(large), rounds)
    print(f"a copy reaches {bandwidth / 1e9:.0f} GB/s")
    print(f"{'kernel':26} {'tokens':>7} {'ms':>8} {'floor ms':>9} {'share':>9}")
    for length in lengths:
        q, k = torch.randn(2, heads, length, d_head, device="cuda")
        for name, (call, size) in kernels(q, k).items():
            duration, floor = seconds(call, rounds), size / bandwidth
            print(f"{name:26} {length:7} {1e3 * duration:8.3f} {1e3 * floor:9.4f} {floor / duration:9.1%}")


def kernels(q: torch.Tensor, k: torch.Tensor) -> dict[str, tuple[Callable[[], object], int]]:
    """name -> what is timed, and the bytes that it has to read."""
    from tl_posgen.position.decomposition.numbers.mean_key_split import mean_key_products
    from tl_posgen.position.decomposition.numbers.pair_moments import pair_moments
    from tl_posgen.position.decomposition.numbers.three_axis_fit import fit_three_axis
    from tl_posgen.position.decomposition.numbers.variance_shares import TripleMoments
    from tl_posgen.rope.rotation import Rope, inverse_frequencies, rotate

    rope = Rope(inverse_frequencies(q.shape[-1], 10_000.0).to(q.device))
    positions, scale = torch.arange(q.shape[1], device=q.device), q.shape[-1] ** -0.5
    moments, qk_bytes = pair_moments(q, k, scale), 2 * q.numel() * q.element_size()
    return {
        "rotate": (lambda: rotate(q, positions, rope), qk_bytes),
        "pair_moments": (lambda: pair_moments(q, k, scale), qk_bytes),
        "fit_three_axis": (lambda: fit_three_axis(moments), 8 * moments.sums.numel()),
        "TripleMoments": (lambda: TripleMoments.from_qk(q, k, rope), qk_bytes),
        "mean_key_r": (
            lambda: mean_key_products(q, k, rope, scale, [0, 64, 1000], scores=moments).correlation(),
            qk_bytes,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--d-head", type=int, default=128)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16_384, 131_072])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--copied", type=int, default=2**28, help="float32 numbers of the copy that gives the bandwidth"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing is measured")
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    table_of_analyses(options.heads, options.d_head, options.lengths, options.rounds)
    table_of_kernels(options.heads, options.d_head, options.lengths, options.rounds, options.copied)


if __name__ == "__main__":
    main()
