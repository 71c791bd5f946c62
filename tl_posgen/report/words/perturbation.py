"""What is said of a result named perturbation."""

import math

import pandas as pd
import xarray as xr

from tl_posgen.results import Result

TITLE = "How much order does the model need?"
QUESTION = (
    "Loss after moving tokens in the text (T), positions of q and k (P), and rotated features (F), by the share of "
    "tokens moved; 95 % bootstrap intervals over prompts, each the mean over draws."
)
NAMES = {
    "tokens": "swapping tokens",
    "words": "swapping words",
    "positions": "swapping positions of queries and keys",
    "key_positions": "swapping positions of keys alone (P and F are the same there)",
    "jitter": "seeing pairs at jittered distances",
    "position_part": "swapping positions in the position part alone",
}
FEW, MANY = 0.05, 0.1  # the claim: up to 5 % hardly matters, more than 10 % does


def found(result: Result) -> list[str]:
    data = widest(result.dataset)
    lines = [how_it_rises(result, str(arm)) for arm in data["arm"].values if arm in ("words", "tokens", "positions")]
    if "gap" not in data:
        return lines
    ratio = nearest(data, MANY)
    base = float(data["change"].sel(arm="positions", ratio=ratio))
    gaps = [
        f"{NAMES[str(arm)]} {with_interval(data.sel(arm=arm, ratio=ratio), 'gap', '+.3f')}"
        for arm in data["arm"].values
        if arm not in ("positions", "tokens", "words")
    ]
    null = "" if result.null is None else f" (random init {value(widest(result.null), 'positions', ratio):+.3f})"
    if gaps:
        lines.append(
            f"Index against features, {ratio:.0%} moved: positions {base:+.3f}{null} nats, and against that "
            f"{'; '.join(gaps)}. An interval that holds 0 means that nothing sets them apart."
        )
    return lines


def how_it_rises(result: Result, arm: str) -> str:
    data = widest(result.dataset)
    ratios = sorted({nearest(data, FEW), nearest(data, MANY), float(data["ratio"].max())})
    parts = []
    for ratio in ratios:
        null = "" if result.null is None else f"; random init {factor(widest(result.null), arm, ratio)}"
        interval = with_interval(data.sel(arm=arm, ratio=ratio), "change", "+.3f")
        parts.append(f"{factor(data, arm, ratio)} at {ratio:.0%} moved ({interval} nats{null})")
    low, high = nearest(data, FEW), nearest(data, MANY)
    few, many = value(data, arm, low), value(data, arm, high)
    words = f"{NAMES[arm].capitalize()} multiplies perplexity by {', '.join(parts)}."
    if low == high or few <= 0:
        return words
    fold = f"{many / few:.1f}-fold (proportional: {high / low:.1f})"
    return f"{words} From {low:.0%} to {high:.0%} the rise in nats grows {fold}."


def widest(dataset: xr.Dataset) -> xr.Dataset:
    """All targets, and swaps over any distance where those were run."""
    reaches = [str(reach) for reach in dataset["reach"].values]
    return dataset.sel(target="all", reach="uniform" if "uniform" in reaches else reaches[-1])


def nearest(dataset: xr.Dataset, ratio: float) -> float:
    """The ratio that was run and is nearest, other than 0 if there is one."""
    moved = dataset["ratio"].where(dataset["ratio"] > 0, drop=True)
    return float((moved if moved.size else dataset["ratio"]).sel(ratio=ratio, method="nearest"))


def value(dataset: xr.Dataset, arm: str, ratio: float) -> float:
    return float(dataset["change"].sel(arm=arm, ratio=ratio))


def factor(dataset: xr.Dataset, arm: str, ratio: float) -> str:
    return f"{math.exp(value(dataset, arm, ratio)):.2f}"


def with_interval(dataset: xr.Dataset, name: str, form: str) -> str:
    mean, low, high = (format(float(dataset[f"{name}{end}"]), form) for end in ("", "_low", "_high"))
    return f"{mean} [{low}, {high}]"


def table(dataset: xr.Dataset) -> pd.DataFrame:
    """One row per arm and ratio (few, many, most), widest reach, all targets: the rise in nats, and P's taken off."""
    data = widest(dataset)
    ratios = sorted({nearest(data, FEW), nearest(data, MANY), float(data["ratio"].max())})
    names = [name for name in ("moved", "change", "change_low", "change_high", "gap", "gap_low") if name in data]
    names += ["gap_high"] if "gap" in data else []
    chosen = data[[name for name in names if name != "moved"]].sel(ratio=ratios)
    rows = [
        (arm, f"{ratio:.0%}", *(float(chosen[name].sel(arm=arm, ratio=ratio)) for name in chosen))
        for arm in data["arm"].values
        for ratio in ratios
    ]
    return pd.DataFrame(rows, columns=["arm", "moved", *chosen]).rename(columns={"change": "rise", "gap": "less_P"})
