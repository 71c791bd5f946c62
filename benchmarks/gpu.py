"""What share of a GPU's memory bandwidth the hot kernels reach; without a GPU it says so and ends.

    python benchmarks/gpu.py [--heads 32] [--d-head 128] [--lengths 1024 4096 16384] [--rounds 20]

Every kernel has to read its arrays once, and that is its floor: bytes over the bandwidth that a copy of a large array
reaches in the same run. A head of L tokens with D numbers holds 2 L D numbers of q and k, 4 bytes each; bf16 models
are measured in float32, with sums in float64. Times are medians of CUDA events.
"""

import argparse
from collections.abc import Callable
from statistics import median

import torch


def milliseconds(call: Callable[[], object], rounds: int) -> float:
    found = []
    for turn in range(rounds + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if turn >= 3:
            found.append(begin.elapsed_time(end))
    return median(found)


def kernels(q: torch.Tensor, k: torch.Tensor) -> dict[str, tuple[Callable[[], object], int]]:
    """name -> what is timed, and the bytes that it has to read."""
    from tl_posgen.position.decomposition.numbers.mean_key_split import mean_key_r
    from tl_posgen.position.decomposition.numbers.pair_moments import pair_moments
    from tl_posgen.position.decomposition.numbers.three_axis_fit import fit_three_axis
    from tl_posgen.position.decomposition.numbers.variance_shares import TripleMoments
    from tl_posgen.rope.rotation import Rope, inverse_frequencies, rotate

    rope = Rope(inverse_frequencies(q.shape[-1], 10_000.0).to(q.device))
    positions, scale = torch.arange(q.shape[1], device=q.device), q.shape[-1] ** -0.5
    moments, both = pair_moments(q, k, scale), 2 * q.numel() * q.element_size()
    return {
        "rotate": (lambda: rotate(q, positions, rope), both),
        "pair_moments": (lambda: pair_moments(q, k, scale), both),
        "fit_three_axis": (lambda: fit_three_axis(moments), 8 * moments.sums.numel()),
        "TripleMoments": (lambda: TripleMoments.from_qk(q, k, rope), both),
        "mean_key_r": (lambda: mean_key_r(q, k, rope, scale, [0, 64, 1000], scores=moments), both),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--d-head", type=int, default=128)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16_384])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing is measured")
        return
    large = torch.empty(2**28, device="cuda")
    copied = torch.empty_like(large)
    bandwidth = 2 * 4 * large.numel() / milliseconds(lambda: copied.copy_(large), options.rounds) * 1e3
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: a copy reaches {bandwidth / 1e9:.0f} GB/s")
    print(f"{'kernel':16} {'tokens':>7} {'ms':>8} {'floor ms':>9} {'share':>6}")
    for length in options.lengths:
        q, k = torch.randn(2, options.heads, length, options.d_head, device="cuda")
        for name, (call, size) in kernels(q, k).items():
            found, floor = milliseconds(call, options.rounds), size / bandwidth * 1e3
            print(f"{name:16} {length:7} {found:8.3f} {floor:9.4f} {floor / found:6.1%}")


if __name__ == "__main__":
    main()
