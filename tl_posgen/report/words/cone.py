"""What is said of a result named cone."""

import pandas as pd
import xarray as xr

from tl_posgen.report.groups import by_group, in_words, of_dominant, short
from tl_posgen.results import Result

TITLE = "Why are queries and keys of slash heads nearly of rank one?"
QUESTION = (
    "r1 is the share of the first singular value in the energy of Q or K before RoPE, nothing centred; 1 is rank one. "
    "The axis is the top right-singular vector of what enters W_Q and W_K; gain compares it with a random direction. "
    "The slash score is then made anew from the axis part alone, and from the rest."
)


def found(result: Result) -> list[str]:
    data, null = result.dataset, result.null
    lines = [_ranks(data, null), _cone(data, null), _counterfactual(data)]
    biased = max(float(data[f"bias_share_{side}"].mean()) for side in "qk")
    if biased > 0:
        parts = in_words(data, ["r1_input_q", "r1_input_k"])
        lines.append(f"Biases hold up to {biased:.0%} of the energy of Q or K; without them r1 is {parts}.")
    return lines


def table(dataset: xr.Dataset) -> pd.DataFrame:
    names = {"r1_q": "r1 Q", "r1_k": "r1 K", "gain_q": "gain Q", "gain_k": "gain K"}
    names |= {"best_measured": "slash", "best_axis_only": "axis only", "best_off_axis": "off axis"}
    return short(by_group(dataset, list(names))).rename(columns=names)


def _ranks(data: xr.Dataset, null: xr.Dataset | None) -> str:
    pair = ["r1_q", "r1_k"]
    beside = "no null measured" if null is None else f"random init {in_words(null, pair)}"
    rank = " and ".join(f"{float(data[f'score_r1_spearman_{side}'].sel(variant='all')):.2f}" for side in "qk")
    return (
        f"r1 of Q and K is {in_words(data, pair)} ({beside}); without the first token "
        f"{in_words(data, pair, tokens='without_first')}. Rank correlation of slash score and r1 over heads: "
        f"{rank}."
    )


def _cone(data: xr.Dataset, null: xr.Dataset | None) -> str:
    def numbers(one: xr.Dataset, form: str) -> list[str]:
        names = ("cosine_mean", "axis_agreement", "r1_h", "gain_q", "gain_k")
        return [form.format(float(one[name].sel(variant="all").mean())) for name in names]

    said = numbers(data, "{:.2f}")
    if null is not None:
        said = [f"{one} (random init {other})" for one, other in zip(said, numbers(null, "{:.2f}"), strict=True)]
    cosine, agreement, r1, gain_q, gain_k = said
    shared = "" if "nan" in agreement else f"; prompts agree on it to {agreement}"
    return (
        f"Attention inputs have mean cosine {cosine} with their axis{shared}. r1 of the inputs is {r1}; W_Q amplifies "
        f"the axis {gain_q} times, W_K {gain_k} times."
    )


def _counterfactual(data: xr.Dataset) -> str:
    names = [f"best_{name}" for name in ("measured", "axis_only", "off_axis", "baseline")]
    means = of_dominant(data, names)
    if means is None:
        return "No head is slash-dominant, so nothing can be asked of the axis alone."
    measured, axis, off, uniform = means
    return (
        f"With only the axis part entering W_Q and W_K, slash-dominant heads score {axis:.3f} at their best distance "
        f"(measured {measured:.3f}); with all but the axis {off:.3f} (uniform attention {uniform:.3f})."
    )
