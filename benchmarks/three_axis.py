"""What a three-axis fit costs per head, beside forming the scores and beside solvers of the same least squares.

    python benchmarks/three_axis.py [--clock cpu] [--threads 1] [--repeats 7] [--lengths 256 1024 4096 16384]

Operations and bytes first, for one head of L tokens with D = d_head, chunks of C = 64 and slabs of G = 16 chunks:

    scores inside chunks             2 C D           operations per token
    second moments of q and of k     4 D^2
    pairs of chunks in a slab        2 G D^2 / C
    2 D real FFTs of length 2 L      10 D log2(2 L)
    12 steps on 2 axes               12 * 2 * 20     in float64

With D = 64 and L = 1024 that is 8,192 + 16,384 + 2,048 + 7,040 + 480, about 34 thousand operations a token, or 35
million a head. The product q k' takes 2 D L a token: 134 million in all, half of them visible. By operations the fit
is cheaper from L = 550 on, against the visible half. But most of its time goes into bytes: a pass over q or k is 4 D
a token, and there are about 15 of them before the FFTs, which write and read 2 L D complex numbers each: about 12 KB
a token in all, where the product writes 4 L. So in time the crossing is later. Memory is linear in L.
A solver of the explicit least squares has L (L + 1) / 2 rows of three entries, and passes over them twice a step.

The solvers are handed the finished scores and a design that is set up already; forming those is not counted. All of
it runs in one process, methods by turns, so that a busy machine disturbs all alike; the table gives medians of
milliseconds per head, of processor time on one thread unless told otherwise, which a busy machine disturbs least.
"q k'" forms and stores all scores, as a model does that shows them; "visible" forms only the visible half, in blocks
that are thrown away, which is the least that forming scores can cost. |dr| is the largest difference of r from ours.

A second table has weights by distance: the moments and the fit. max(8 - d, floor) and e^(-d/8) + 1e-6,
which stays what it is from d = 400 on.
"""

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

D_HEAD = 64
LONGEST_FOR_SOLVERS = 1024
WEIGHTS = {
    "none": (1.0,),
    "floor .05": (*range(8, 0, -1), 0.05),
    "floor .001": (*range(8, 0, -1), 0.001),
    "e^(-d/8)": tuple(math.exp(-d / 8) + 1e-6 for d in range(400)),
}
PEAK_LENGTH = 131_072


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clock", choices=["cpu", "wall"], default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 2048, 4096, 16_384])
    parser.add_argument("--peak", type=int, help="only fit one head of this length and print the peak memory")
    return parser.parse_args()


ARGUMENTS = parse_arguments()
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ[variable] = str(ARGUMENTS.threads)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from tl_posgen.position.decomposition.numbers.pair_moments import pair_moments  # noqa: E402
from tl_posgen.position.decomposition.numbers.three_axis_fit import fit_three_axis  # noqa: E402


def random_head(length: int, heads: int) -> tuple[Tensor, Tensor]:
    """Rotated queries and keys of scores with a distance, a query, a key part and noise."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, heads, length, D_HEAD, generator=generator)
    wave = torch.arange(length)[:, None] * 10_000 ** (-torch.arange(D_HEAD // 2) / (D_HEAD // 2))
    position = torch.cat([wave.cos(), wave.sin()], -1)
    return q + position + 0.5, k + position + 0.5


def visible_scores(q: Tensor, k: Tensor) -> np.ndarray:
    rows, keys = torch.tril_indices(q.shape[1], q.shape[1])
    return (q[0] @ k[0].T / D_HEAD**0.5)[rows, keys].double().numpy()


def solvers(q: Tensor, k: Tensor) -> dict[str, Callable[[], np.ndarray]]:
    """Each returns the residual of the same least squares."""
    import within
    from pyfixest.core.demean import demean
    from scipy.sparse import csr_array
    from scipy.sparse.linalg import lsqr

    scores, length = visible_scores(q, k), q.shape[1]
    rows, keys = np.tril_indices(length)
    axes = np.stack([rows - keys, rows, keys], 1)
    columns = axes + length * np.arange(3)
    design = csr_array((np.ones(columns.size), columns.ravel(), np.arange(0, columns.size + 1, 3)))
    solver = within.Solver(within.Design(np.asfortranarray(axes.astype(np.uint32))))
    groups, ones = axes.astype(np.uint64), np.ones(len(scores))
    centred = scores - scores.mean()

    def by_lsqr() -> np.ndarray:
        return centred - design @ lsqr(design, centred, atol=1e-10, btol=1e-10)[0]

    def by_within() -> np.ndarray:
        return np.asarray(solver.solve(scores).demeaned).ravel()

    def by_pyfixest() -> np.ndarray:
        return demean(scores[:, None], groups, ones, tol=1e-8)[0][:, 0]

    return {"lsqr": by_lsqr, "within": by_within, "pyfixest": by_pyfixest}


def visible_blocks(q: Tensor, k: Tensor, rows: int = 256) -> None:
    """Every visible score once, in blocks that are thrown away."""
    for start in range(0, q.shape[1], rows):
        stop = start + rows
        q[:, start:stop] @ k[:, :stop].mT


def measure(methods: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of every method, taken by turns."""
    now = time.process_time if ARGUMENTS.clock == "cpu" else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repeats):
        for name, method in methods.items():
            method()  # the one before left its own data in the cache and its own holes in the heap
            start = now()
            method()
            times[name].append(now() - start)
    return {name: float(np.median(values)) for name, values in times.items()}


def row(length: int, repeats: int) -> dict[str, float]:
    heads = 8 if length <= 4096 else 1
    q, k = random_head(length, heads)
    methods: dict[str, Callable[[], object]] = {
        "ours": lambda: fit_three_axis(pair_moments(q, k, D_HEAD**-0.5)),
        "both fits": lambda: fit_both(q, k),
        "q k'": lambda: q @ k.mT,
        "visible": lambda: visible_blocks(q, k),
    }
    peers = solvers(q, k) if length <= LONGEST_FOR_SOLVERS else {}
    seconds = measure(methods | peers, repeats)
    columns = {name: 1000 * time / (heads if name in methods else 1) for name, time in seconds.items()}
    if peers:
        scores, r = visible_scores(q, k), float(fit_three_axis(pair_moments(q[:1], k[:1], D_HEAD**-0.5)).r)
        columns["|dr|"] = max(abs(r - np.sqrt(1 - solve().var() / scores.var())) for solve in peers.values())
    return columns


def fit_both(q: Tensor, k: Tensor) -> None:
    """With and without the first token."""
    moments = pair_moments(q, k, D_HEAD**-0.5)
    fit_three_axis(moments)
    assert moments.without_first_token is not None
    fit_three_axis(moments.without_first_token)


def print_table(lengths: list[int], repeats: int) -> None:
    times = ["ours", "both fits", "q k'", "visible", "lsqr", "within", "pyfixest"]
    ratios = ["q k'", "visible", "lsqr", "within", "pyfixest"]
    setting = f"{ARGUMENTS.clock} ms per head, d_head {D_HEAD}, {ARGUMENTS.threads} thread(s), medians of {repeats}"
    print(f"{setting}; then each over ours")
    print("".join(f"{name:>11}" for name in ["L", *times, *(f"{name} /" for name in ratios), "|dr|"]))
    for length in lengths:
        columns = row(length, repeats)
        cells = [f"{columns[name]:.2f}" if name in columns else "-" for name in times]
        cells += [f"{columns[name] / columns['ours']:.1f}" if name in columns else "-" for name in ratios]
        cells.append(f"{columns['|dr|']:.0e}" if "|dr|" in columns else "-")
        print(f"{length:>11}" + "".join(f"{cell:>11}" for cell in cells), flush=True)


def print_weights(lengths: list[int], repeats: int, heads: int = 8) -> None:
    print(f"\nweights by distance, {heads} heads at once: {ARGUMENTS.clock} ms per head")
    print("".join(f"{name:>11}" for name in ["L", "weights", "moments", "fit"]))
    for length in lengths:
        q, k = random_head(length, heads)
        for name, weights in WEIGHTS.items():
            moments = pair_moments(q, k, D_HEAD**-0.5, distance_weights=weights)
            methods: dict[str, Callable[[], object]] = {
                "moments": lambda q=q, k=k, w=weights: pair_moments(q, k, D_HEAD**-0.5, distance_weights=w),
                "fit": lambda m=moments: fit_three_axis(m),
            }
            seconds = measure(methods, repeats)
            cells = [f"{1000 * time / heads:.2f}" for time in seconds.values()]
            cells = [length, name, *cells]
            print("".join(f"{cell:>11}" for cell in cells), flush=True)


def print_peak(length: int) -> None:
    """Peak memory of this process before and after one fit of one head, and the seconds it took."""
    q, k = random_head(length, 1)
    before = peak_gib()
    start = time.perf_counter()
    fit = fit_three_axis(pair_moments(q, k, D_HEAD**-0.5))
    seconds = time.perf_counter() - start
    print(
        f"L = {length}, one head, d_head {D_HEAD}: peak {peak_gib():.2f} GiB, of which {before:.2f} before the fit; "
        f"{seconds:.1f} s, r = {float(fit.r):.4f}"
    )


def peak_gib() -> float:
    """Largest resident memory so far. Linux only; ru_maxrss would count the parent's."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 2**20


if __name__ == "__main__":
    torch.set_num_threads(ARGUMENTS.threads)
    if ARGUMENTS.peak:
        print_peak(ARGUMENTS.peak)
    else:
        print_table(ARGUMENTS.lengths, ARGUMENTS.repeats)
        print_weights([256, 1024, 4096], ARGUMENTS.repeats)
        again = [sys.executable, __file__, "--peak", str(PEAK_LENGTH), "--threads", str(ARGUMENTS.threads)]
        subprocess.run(again, check=True)
