"""Loss, loss at four times the length, and three-axis r of the trained runs; whichever are finished.

    python examples/encodings/measure.py --work build/encodings

writes results.csv (a row a run), curves.csv (loss by position), heads.csv (a row a head) and encodings.svg beside this
file. Runs that are there from before and whose weights are not stay. Scores are measured by the package's own `three_axis`
and `variance` on held-out windows. The null is the run's own model before its first step.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from attention import ENCODINGS, ROTATED, EncodedAttention, EncodedLlama, n_rotated, slopes
from figure import draw
from train import STEPS, new_model, recipe

from tl_posgen.core.feed import Feed
from tl_posgen.core.numbers import mean_of
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.position import ThreeAxis, Variance
from tl_posgen.rope.rotation import Rope
from tl_posgen.stats.intervals import t_975

SEEDS = (0, 1, 2)
LONG = 4 * recipe.CONTEXT
BLOCK = 64  # positions behind a point of the loss curve
N_PROMPTS = 8  # windows whose scores are measured
PLACES = (16, 128)  # windows that are compared place by place, and their tokens
RUN = ["encoding", "seed"]
LOSSES = ("loss", "loss_long", "loss_within", "loss_beyond", "rise")
SCORES = {  # column of the tables -> measure, variable, tokens
    "r": ("three_axis", "r", "all"),
    "r_without_first_token": ("three_axis", "r", "without first"),
    "r_within_rows": ("three_axis", "r_within_rows", "all"),
    "r_within_rows_without_first_token": ("three_axis", "r_within_rows", "without first"),
    "position": ("variance", "position", "without first"),
    "content": ("variance", "content", "without first"),
    "interaction": ("variance", "interaction", "without first"),
}


def finished(work: Path, steps: int, seeds: Sequence[int]) -> dict[tuple[str, int], Path]:
    """The last checkpoint of every run that has one."""
    runs = {(e, s): work / f"{e}-{s}" / "checkpoints" / f"step{steps:05d}" for e in ENCODINGS for s in seeds}
    return {run: path for run, path in runs.items() if (path / "model.safetensors").is_file()}


# One model


@torch.no_grad()
def loss_by_position(model: EncodedLlama, stream: np.ndarray, length: int, n_windows: int) -> np.ndarray:
    """Mean loss of the targets at positions 1 .. length - 1 of windows spread over the stream, in nats."""
    rows = recipe.windows(stream, np.linspace(0, len(stream) - length, n_windows).astype(np.int64), length)
    losses = [
        torch.nn.functional.cross_entropy(model(row[None, :-1]).logits[0], row[1:], reduction="none") for row in rows
    ]
    return torch.stack(losses).double().mean(0).numpy()


def loss_numbers(model: EncodedLlama, stream: np.ndarray, n_windows: int) -> dict[str, Any]:
    """Loss at the length of training, and at `LONG` tokens over all positions, those within it, and those beyond."""
    by_position = loss_by_position(model, stream, LONG, n_windows)
    within, beyond = np.split(by_position, [recipe.CONTEXT - 1])
    return {
        "loss": recipe.held_out_loss(model, stream),
        "loss_long": by_position.mean(),
        "loss_within": within.mean(),
        "loss_beyond": beyond.mean(),
        "curve": [float(block.mean()) for block in np.split(by_position, range(BLOCK - 1, LONG - 1, BLOCK))],
    }


def geometry(attention: EncodedAttention, d: int, inv_freq: torch.Tensor) -> LayerGeometry:
    config, encoding = attention.config, attention.config.encoding
    return LayerGeometry(
        layer=attention.layer_idx,
        encoding="rotary" if encoding in ROTATED else encoding,
        n_heads=config.num_attention_heads,
        n_key_value_heads=config.num_key_value_heads,
        d_head=d,
        scale=attention.scaling,
        rope=Rope(inv_freq.double().repeat(n_rotated(encoding))) if encoding in ROTATED else Rope(),
        alibi_slopes=slopes(config.num_attention_heads) if encoding == "alibi" else None,
    )


@torch.no_grad()
def captures(model: EncodedLlama, tokens: torch.Tensor, prompt: int = 0) -> list[LayerCapture]:
    """q', k' and geometry of every layer on one window, as measures of the package take them."""
    found: list[LayerCapture] = []

    def keep(attention: EncodedAttention, args: Any, kwargs: Mapping[str, Any]) -> None:
        q, k = (x[0] for x in attention.operands(kwargs["hidden_states"]))
        k = k.repeat_interleave(attention.num_key_value_groups, 0)
        described = geometry(attention, q.shape[-1], model.model.rotary_emb.inv_freq)
        found.append(LayerCapture(described, range(len(q)), prompt, tokens, q, k))

    hooks = [layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True) for layer in model.model.layers]
    try:
        model(tokens[None])
    finally:
        for hook in hooks:
            hook.remove()
    return found


def score_numbers(model: EncodedLlama, windows: torch.Tensor) -> tuple[dict[str, float], pd.DataFrame]:
    """Means over heads of three-axis r and of position, content and interaction; and a row a head."""
    feed = Feed([ThreeAxis(), Variance()], intervals=False)
    for prompt, tokens in enumerate(windows):
        for layer in captures(model, tokens, prompt):
            feed(layer)
    found = feed.datasets(model.config.encoding)
    columns = {
        column: mean_of(found[measure][variable].sel(tokens=tokens, drop=True))
        for column, (measure, variable, tokens) in SCORES.items()
    }
    heads = xr.Dataset(columns).to_dataframe(dim_order=["layer", "head"])
    return {column: float(heads[column].mean()) for column in columns}, heads.reset_index()


def place_share(model: EncodedLlama, stream: np.ndarray) -> float:
    """Share of where the key stands, which its encoding did not put there, in what softmax sees: mean over heads."""
    n, length = PLACES
    feed = Feed([Variance(absolute=True)], intervals=False)
    starts = np.linspace(0, len(stream) - length, n).astype(np.int64)
    for prompt, tokens in enumerate(recipe.windows(stream, starts, length)):
        for layer in captures(model, tokens, prompt):
            feed(layer)
    found = feed.datasets(model.config.encoding)["variance"]["absolute"]
    return float(mean_of(found.sel(tokens="without first")).mean())


# All runs


def measure(
    work: Path, runs: Mapping[tuple[str, int], Path], steps: int, n_windows: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A row a run and a row a head, each trained and at its random init (`step` 0), whose loss is left out."""
    held_out = np.load(work / "held_out.npy")
    starts = np.linspace(0, len(held_out) - recipe.CONTEXT, N_PROMPTS).astype(np.int64)
    windows = recipe.windows(held_out, starts)
    rows, heads = [], []
    for (encoding, seed), checkpoint in runs.items():
        trained = EncodedLlama.from_pretrained(checkpoint)
        for step, model in ((0, new_model(trained.config.vocab_size, encoding, seed)), (steps, trained)):
            run = {"encoding": encoding, "seed": seed, "step": step}
            numbers, by_head = score_numbers(model, windows)
            numbers["place"] = place_share(model, held_out)
            run["parameters"] = sum(parameter.numel() for parameter in model.parameters())
            rows.append(run | (loss_numbers(model, held_out, n_windows) if step else {}) | numbers)
            heads.append(by_head.assign(encoding=encoding, seed=seed, step=step))
            print(f"{encoding}, seed {seed}, step {step}", file=sys.stderr)
    return pd.DataFrame(rows), pd.concat(heads)


def with_those_before(path: Path, measured: pd.DataFrame | None, digits: int) -> pd.DataFrame:
    """The table as it is in the file now: what was measured, and those runs of the file that were not."""
    if measured is not None:
        if path.is_file():
            before = pd.read_csv(path)
            again = pd.MultiIndex.from_frame(before[RUN]).isin(pd.MultiIndex.from_frame(measured[RUN]))
            measured = pd.concat([before[~again], measured])
        order = measured["encoding"].map(ENCODINGS.index)
        measured = measured.assign(order=order).sort_values(["order", "seed", "step"], kind="stable")
        measured.drop(columns="order").to_csv(path, index=False, float_format=f"%.{digits}g")
    return pd.read_csv(path)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation and 95 % interval (Student's) over seeds; the latter from two seeds on."""
    x = np.asarray(values, dtype=float)
    found: dict[str, Any] = {"mean": float(x.mean()), "of_seeds": x.tolist()}
    if len(x) > 1:
        half = float(t_975(len(x) - 1)) * x.std(ddof=1) / len(x) ** 0.5
        found |= {"sd": float(x.std(ddof=1)), "low": float(x.mean() - half), "high": float(x.mean() + half)}
    return found


def summarise(rows: pd.DataFrame, curves: pd.DataFrame) -> dict[str, Any]:
    """Of every encoding: numbers over seeds, trained and random init, and losses less those of rope at the same seed."""
    found: dict[str, Any] = {}
    rows = rows.assign(rise=rows["loss_beyond"] - rows["loss_within"])
    for encoding, one in rows.groupby("encoding", sort=False):
        trained, init = (one[(one["step"] > 0) == after] for after in (True, False))
        found[str(encoding)] = {
            "seeds": trained["seed"].tolist(),
            "parameters": int(trained["parameters"].iloc[0]),
            "trained": {name: spread(trained[name]) for name in (*LOSSES, *SCORES)},
            "random_init": {name: spread(init[name]) for name in SCORES},
            "place": {
                when: spread(places)
                for when, one in (("trained", trained), ("random_init", init))
                if len(places := one["place"].dropna() if "place" in one else ())
            },
            "curve": curves[curves["encoding"] == encoding].groupby("block")["loss"].mean().tolist(),
        }
    by_run = rows[rows["step"] > 0].set_index(["encoding", "seed"])
    for encoding in set(found) - {"rope"}:
        both = [seed for seed in found[encoding]["seeds"] if ("rope", seed) in by_run.index]
        if both:
            less = {name: [by_run[name][encoding, s] - by_run[name]["rope", s] for s in both] for name in LOSSES}
            found[encoding]["less_rope"] = {name: spread(values) for name, values in less.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the trained runs.")
    parser.add_argument("--work", type=Path, default=Path("build/encodings"), help="where train.py left them")
    parser.add_argument("--out", type=Path, default=HERE, help="where tables and figure go")
    parser.add_argument("--json", action="store_true", help="print means, spreads and differences as JSON")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="those to measure")
    parser.add_argument("--windows", type=int, default=32, help=f"windows of {LONG} tokens")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    paths = [args.out / f"{name}.csv" for name in ("results", "curves", "heads")]
    rows, curves, heads = None, None, None
    if runs := finished(args.work, args.steps, args.seeds):
        rows, heads = measure(args.work, runs, args.steps, args.windows)
        curves = rows[[*RUN, "step", "curve"]].dropna().explode("curve").rename(columns={"curve": "loss"})
        curves["block"] = curves.groupby(RUN).cumcount()
        rows = rows.drop(columns="curve")
    elif not paths[0].is_file():
        parser.error(f"{args.work}: no run is finished; train one with examples/encodings/train.py")
    tables = zip(paths, (rows, curves, heads), (6, 6, 4), strict=True)
    rows, curves, _ = (with_those_before(*table) for table in tables)
    summary = summarise(rows, curves)
    (args.out / "encodings.svg").write_text(draw(summary, BLOCK, recipe.CONTEXT), encoding="utf-8")
    known = set(rows[RUN].itertuples(index=False, name=None))
    missing = [
        f"{encoding} seed {seed}" for encoding in ENCODINGS for seed in args.seeds if (encoding, seed) not in known
    ]
    print(json.dumps({"encodings": summary, "missing": missing}) if args.json else rows.round(4).to_string(index=False))
    print(f"missing: {', '.join(missing) or 'none'}", file=sys.stderr)


if __name__ == "__main__":
    main()
