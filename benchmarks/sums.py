"""Errors and times of sums on devices without float64, against float64.

    python benchmarks/sums.py [--lengths 512 8192 131072] [--d-head 64] [--rounds 5]

Second moments of keys about their mean, of which the measures consist: k' k / n of k = mean + deviation, where the mean
is 1, 100 or 10,000 times as large as the deviations. Float32 keys, rounded once; float64 of the same numbers is the
truth. Ways: float64 itself; float32 as it comes, mean of squares less square of the mean; float32 about a mean of
float32; blocks of 256 keys in float32 about the first key, whose sums are added in float64 on the host; compensated
float32, whose products are split into two numbers and whose sums carry their rounding error (Dekker, Neumaier).
Errors are largest ones over the largest moment. Operations a product and sum: 2, compensated 25. The copy to the host
that float64 sums need on such a device is 4 n d_head bytes, against 2 n d_head^2 operations.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

BLOCK = 256


def float64(k: Tensor) -> Tensor:
    return of_centred(k.double())


def of_centred(k: Tensor) -> Tensor:
    k = k - k.mean(0)
    return k.T @ k / len(k)


def as_it_comes(k: Tensor) -> Tensor:
    mean = k.mean(0)
    return k.T @ k / len(k) - torch.outer(mean, mean)


def in_blocks(k: Tensor) -> Tensor:
    """Sums of blocks in float32, about the first key; sums of these in float64."""
    shifted = k - k[:1]
    blocks = shifted.split(BLOCK)
    products = sum((block.T @ block).double() for block in blocks)
    mean = sum(block.sum(0).double() for block in blocks) / len(k)
    return products / len(k) - torch.outer(mean, mean)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """x = high + low, each of at most 12 bits (Dekker)."""
    scaled = 4097 * x
    high = scaled - (scaled - x)
    return high, x - high


def compensated(k: Tensor) -> Tensor:
    """Every product as two float32 numbers, every sum with its rounding error, over the keys one after the other."""
    mean = k.mean(0)
    k = k - mean
    total, error = (torch.zeros(k.shape[1], k.shape[1]) for _ in range(2))
    high, low = split(k)
    for row, hi, lo in zip(k, high, low, strict=True):
        product = torch.outer(row, row)
        of_product = torch.outer(hi, hi) - product + torch.outer(hi, lo) + torch.outer(lo, hi) + torch.outer(lo, lo)
        new = total + product
        part = new - total
        error += (total - (new - part)) + (product - part) + of_product
        total = new
    left = k.mean(0)
    return (total + error) / len(k) - torch.outer(left, left)


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "float64": float64,
    "float32 as it comes": as_it_comes,
    "float32 about the mean": of_centred,
    "blocks, summed on the host": in_blocks,
    "compensated float32": compensated,
}


def seconds(way: Callable[[Tensor], Tensor], k: Tensor, rounds: int) -> float:
    times = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        way(k)
        times.append(time.perf_counter() - begin)
    return median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 8192, 131_072])
    parser.add_argument("--d-head", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    print(f"second moments of keys, d_head {options.d_head}, 1 thread; error over the largest moment, medians of time")
    print(f"{'way':28} {'tokens':>7} {'mean 1':>9} {'mean 100':>9} {'mean 1e4':>9} {'ms':>9} {'/ float64':>9}")
    for length in options.lengths:
        deviations = torch.randn(length, options.d_head, generator=generator)
        keys = [deviations + mean for mean in (1.0, 100.0, 10_000.0)]
        truth = [float64(k) for k in keys]
        of_float64 = None
        for name, way in WAYS.items():
            slow = way is compensated and length > 8192  # a loop in Python: its time is that of a fused kernel nowhere
            errors = [
                float((way(k).double() - exact).abs().max() / exact.abs().max())
                for k, exact in zip(keys, truth, strict=True)
            ]
            duration = seconds(way, keys[0], 1 if slow else options.rounds)
            of_float64 = of_float64 or duration
            cells = " ".join(f"{error:9.0e}" for error in errors)
            print(f"{name:28} {length:7} {cells} {1e3 * duration:9.2f} {duration / of_float64:9.1f}")


if __name__ == "__main__":
    main()
