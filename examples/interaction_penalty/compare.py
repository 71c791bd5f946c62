"""Loss at the length of training and at four times it, and the interaction reached, of the runs that are finished.

    python examples/interaction_penalty/compare.py --work build/penalty

writes results.csv (a row a run) and summary.json (mean, spread and values over seeds, and losses less those of `rope`
at the same seed) beside this file; README.md shows the latter. Held-out books, windows of both lengths spread
over them. The interaction is that of the package's own `variance`, first token left out, mean over heads.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "encodings"), str(HERE.parent)]
from attention import EncodedLlama
from interaction_penalty.train import CONTEXT, STEPS, STRENGTHS, directory_of, new_model, recipe, runs_of
from measure import N_PROMPTS, loss_by_position, score_numbers, spread

TIMES = 4  # as long as in training
LOSSES = ("loss", "loss_long", "loss_beyond")
SCORES = ("position", "content", "interaction")
SETTINGS = ("steps", "context", "batch", "windows")


def loss_numbers(model: EncodedLlama, held_out: np.ndarray, context: int, n_windows: int) -> dict[str, float]:
    """Loss at the length of training, at `TIMES` it over all positions, and over those beyond it; as many tokens each."""
    long = loss_by_position(model, held_out, TIMES * context, n_windows)
    return {
        "loss": float(loss_by_position(model, held_out, context, TIMES * n_windows).mean()),
        "loss_long": float(long.mean()),
        "loss_beyond": float(long[context - 1 :].mean()),
    }


def finished(args: argparse.Namespace) -> dict[tuple[int, str, str, float], Path]:
    """The last checkpoint of every run that has one, by seed, name, encoding and strength."""
    runs = {
        (seed, name, *of): directory_of(args.work, name, seed)
        for seed in args.seeds
        for name, of in runs_of(args.strengths).items()
    }
    last = {run: directory / "checkpoints" / f"step{args.steps:05d}" for run, directory in runs.items()}
    return {run: path for run, path in last.items() if (path / "model.safetensors").is_file()}


def measure(runs: Mapping[tuple[int, str, str, float], Path], args: argparse.Namespace) -> pd.DataFrame:
    """A row a run, seed by seed."""
    held_out = np.load(args.work / "held_out.npy")
    starts = np.linspace(0, len(held_out) - args.context, N_PROMPTS).astype(np.int64)
    windows = recipe.windows(held_out, starts, args.context)
    settings, rows = {name: getattr(args, name) for name in SETTINGS}, []
    for (seed, name, encoding, strength), checkpoint in runs.items():
        model = EncodedLlama.from_pretrained(checkpoint)
        begun = score_numbers(new_model(model.config.vocab_size, encoding, seed), windows)[0]
        scores = score_numbers(model, windows)[0]
        row = {"run": name, "encoding": encoding, "strength": strength, "seed": seed, **settings}
        row |= loss_numbers(model, held_out, args.context, args.windows) | {key: scores[key] for key in SCORES}
        rows.append(row | {"interaction_at_init": begun["interaction"]})
        print(f"{name}, seed {seed}", file=sys.stderr)
    return pd.DataFrame(rows)


def summarise(rows: pd.DataFrame) -> dict[str, Any]:
    """Return settings, and by run numbers over seeds and losses less those of rope at the same seed."""
    runs: dict[str, Any] = {}
    losses: Mapping[Any, Any] = rows.set_index(["run", "seed"])[list(LOSSES)].to_dict("index")
    for name, one in rows.groupby("run", sort=False):
        numbers = {key: spread(one[key].tolist()) for key in (*LOSSES, *SCORES, "interaction_at_init")}
        runs[str(name)] = {"seeds": one["seed"].tolist(), **numbers}
        both = [seed for seed in one["seed"] if ("rope", seed) in losses]
        if name != "rope" and both:
            less = {key: [losses[name, seed][key] - losses["rope", seed][key] for seed in both] for key in LOSSES}
            runs[str(name)]["less_rope"] = {key: spread(values) for key, values in less.items()}
    return {**{name: int(rows[name].iloc[0]) for name in SETTINGS}, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the trained runs.")
    parser.add_argument("--work", type=Path, default=Path("build/penalty"), help="where train.py left them")
    parser.add_argument("--out", type=Path, default=HERE, help="where the tables go")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of the runs")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of a window in training")
    parser.add_argument("--batch", type=int, default=8, help="windows of a step in training")
    parser.add_argument("--strengths", type=float, nargs="+", default=STRENGTHS)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--windows", type=int, default=64, help=f"those {TIMES} times as long")
    args = parser.parse_args()
    if not (runs := finished(args)):
        parser.error(f"{args.work}: no run is finished; train one with examples/interaction_penalty/train.py")
    rows = measure(runs, args)
    args.out.mkdir(parents=True, exist_ok=True)
    rows.to_csv(args.out / "results.csv", index=False, float_format="%.6g")
    summary = summarise(pd.read_csv(args.out / "results.csv"))
    (args.out / "summary.json").write_text(json.dumps(summary) + "\n", encoding="utf-8")
    columns = [*LOSSES, *SCORES]
    print(rows.groupby("run", sort=False)[columns].agg(["mean", "min", "max"]).round(3).T.to_string())


if __name__ == "__main__":
    main()
