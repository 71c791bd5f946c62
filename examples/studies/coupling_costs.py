"""Memory, operations and hours of coupling over the models of published_models.csv: counted, at a rate measured here.

    python examples/studies/coupling_costs.py           # prints; seconds
    python examples/studies/coupling_costs.py --write   # into published_models.csv too

A job is a model and a random init on 8 prompts of 64 tokens, one after the other in float32. Operations of a prompt, in
multiplications and additions, with 12 d^2 weights a block, d columns of its Jacobian, its singular vectors and all pairs:

    two passes                  4 P n
    d <= 2048, a layer          24 d^3 for the Jacobian + 21 d^3 for its singular vectors + 2 (2 L + 10) K d^2 for pairs
    above, a layer, at most     96 d^3 for d columns times J and J', 29 d^3 for bases, + 72 (2 L + 10) K d^2 for pairs

Block Lanczos mostly stops before its basis has d columns, so that hours above d = 2048 are upper ends. The rate is that
of the widest model timed here, whose operations take whole matrices; narrow models do fewer a second, as their time goes
into calls. Sizes were counted from the models' configurations and are rounded: `coupling_scores` counts its own.
"""

import argparse
import sys
import time
from pathlib import Path

import pandas as pd
import torch

from tl_posgen import analyze, load_model
from tl_posgen.coupling import Coupling
from tl_posgen.coupling.jacobians import DENSE_UP_TO
from tl_posgen.models.memory import need_of_pass

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from coupling import random_llama  # pyright: ignore[reportMissingImports]

IMPORTS = 0.8e9  # bytes that Python, torch and TransformerLens take themselves
PEAK = 1.12  # bytes a byte of weights while a model is loaded
MODELS = Path(__file__).with_name("published_models.csv")
LENGTH, PROMPTS, K, INITS = 64, 8, 10, 1  # of coupling_published.toml; random inits
WIDTHS = {512: 4, 1024: 2}  # d -> layers, of the random models that are timed beside mini


def operations(d: int, layers: int, parameters: float) -> float:
    """Return multiplications and additions of one prompt."""
    members = 2 * layers + 10  # bases of every layer, left and right, and random ones
    cubes, squares = (45, 2) if d <= DENSE_UP_TO else (125, 72)
    return 4 * parameters * LENGTH + layers * (cubes * d**3 + squares * members * K * d**2)


def bytes_needed(d: int, layers: int, parameters: float) -> int:
    """Return the memory of a job: float32 weights, a pass, and the Jacobians that are kept whole."""
    _, each, power = need_of_pass(d // 64, d, 4, is_streamed=False, matrices=Coupling.matrices)
    jacobians = layers * 4 * d**2 if d <= DENSE_UP_TO else 0
    return int(IMPORTS + PEAK * 4 * parameters + each * LENGTH**power) + jacobians


def rate(model, tokens: torch.Tensor) -> float:
    """Return operations a second of processor time, one prompt; the second of two runs."""
    clock = [time.process_time()]
    for _ in range(2):
        analyze(model, tokens, measures=[Coupling(k=K)], nulls=0, progress=False)
        clock.append(time.process_time())
    parameters = sum(one.numel() for one in model.parameters())
    return operations(model.cfg.d_model, model.cfg.n_layers, parameters) / (clock[2] - clock[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    tokens = torch.randint(512, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    models = {"mini": load_model("mini")} | {f"width {d}": random_llama(d, n, LENGTH) for d, n in WIDTHS.items()}
    rates = {name: rate(model, tokens) for name, model in models.items()}
    print("; ".join(f"{name}: {one / 1e9:.1f} billion operations a second" for name, one in rates.items()))
    table = pd.read_csv(MODELS)[["model", "width", "depth", "billions"]]
    sizes = [(int(row.width), int(row.depth), row.billions * 1e9) for row in table.itertuples()]
    table["memory_gb"] = [round(bytes_needed(*size) / 1e9, 1) for size in sizes]
    whole = pd.Series([PROMPTS * (1 + INITS) * operations(*size) for size in sizes])
    table["operations"] = [f"{one:.1e}" for one in whole]
    table["hours"] = [float(f"{one / max(rates.values()) / 3600:.2g}") for one in whole]
    print(table.to_string(index=False))
    print(f"together {table['hours'].sum():.0f} hours, {whole.sum():.1e} operations")
    if write:
        table.to_csv(MODELS, index=False)


if __name__ == "__main__":
    main()
