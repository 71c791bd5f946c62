"""The slash pattern: the claims of Cheng et al. 2026 (arXiv 2601.08297), and what they are read off."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xarray as xr

from tl_posgen.analysis import analyze
from tl_posgen.claims.base import Claim, Finding, Procedure, both, threshold
from tl_posgen.experiments import band_ablation, cone, slash_transfer
from tl_posgen.models.backend import Model
from tl_posgen.report.groups import in_words, of_dominant
from tl_posgen.results import Result


def procedures(
    model: Model, text: str, cut: Mapping[str, Any], checkpoints: Sequence[str | Path]
) -> dict[str, Procedure]:
    """What the claims need, by name."""
    return {
        "slash_transfer": lambda: [slash_transfer(model, text, **cut)],
        "cone": lambda: [cone(model, text, **cut)],
        "slash_planes": lambda: list(analyze(model, text, analyzers=["slash_planes"], examples=0, **cut).values()),
        "band_ablation": lambda: [band_ablation(model, text, **cut)],
    }


def dominant_means(dataset: xr.Dataset, names: Sequence[str]) -> list[float]:
    """Means over the slash-dominant heads; NaN where there are none."""
    return of_dominant(dataset, names) or [float("nan")] * len(names)


def random_tokens(slash_transfer: Result) -> Finding:
    def say(data: xr.Dataset) -> str:
        parts = []
        for at in data["at"].values[:3]:
            here = data.sel(at=at, variant="all")
            sets = f"{int(here['n_natural'])} and {int(here['n_random'])} heads"
            if here["n_natural"] + here["n_random"] > 0:
                sets += f", Jaccard {float(here['jaccard']):.2f}"
            parts.append(f"D = {int(at)}: r {float(here['pearson']):.2f}, {sets}")
        return "; ".join(parts)

    data = slash_transfer.dataset.sel(variant="all")
    some = data["at"][(data["n_natural"] > 0).values]
    least = float(data["pearson"].sel(at=some).min()) if len(some) else float("nan")
    return Finding(threshold(least, 0.9, 0.6), *both(say, slash_transfer))


def rank_one(cone: Result) -> Finding:
    def say(data: xr.Dataset) -> str:
        return f"r1 of Q and K {in_words(data, ['r1_q', 'r1_k'], form='{:.2f}')}"

    return Finding(threshold(min(dominant_means(cone.dataset, ["r1_q", "r1_k"])), 0.9, 0.7), *both(say, cone))


def axis(cone: Result) -> Finding:
    names = ["best_measured", "best_axis_only", "best_off_axis", "best_baseline"]

    def say(data: xr.Dataset) -> str:
        gains = [float(data[f"gain_{side}"].sel(variant="all").mean()) for side in "qk"]
        words = f"the axis gains {gains[0]:.1f} times in W_Q, {gains[1]:.1f} in W_K"
        measured, alone, rest, uniform = dominant_means(data, names)
        if measured != measured:
            return f"{words}; no head is slash-dominant"
        return (
            f"{words}; slash score {measured:.2f}, axis alone {alone:.2f}, the rest {rest:.2f}, uniform {uniform:.2f}"
        )

    measured, alone, _, uniform = dominant_means(cone.dataset, names)
    return Finding(threshold((alone - uniform) / (measured - uniform), 0.75, 0.4), *both(say, cone))


def frequencies(band_ablation: Result) -> Finding:
    def score(data: xr.Dataset, arm: str) -> float:
        return float(data["slash_score"].sel(arm=arm))

    def say(data: xr.Dataset) -> str:
        arms = [arm for arm in data["arm"].values if str(arm).startswith("drop") and str(arm).endswith("thirds")]
        parts = [f"{str(arm).removesuffix(', thirds')} {score(data, arm):.2f}" for arm in ("none", *arms, "no_rope")]
        losses = [f"{float(data['loss_mean'].sel(arm=arm)):.2f}" for arm in ("none", *arms, "no_rope")]
        return f"slash score in the running model: {', '.join(parts)}; loss {', '.join(losses)}"

    data = band_ablation.dataset
    whole, high, low = (score(data, arm) for arm in ("none", "drop high, thirds", "drop low, thirds"))
    verdict = "held" if high <= 0.25 * whole and low >= 0.75 * whole else "partly" if high <= 0.5 * low else "not held"
    return Finding(verdict, *both(say, band_ablation))


CLAIMS = [
    Claim(
        "slash",
        1,
        "Slash-dominant heads belong to the model: the same heads, with like scores, on random tokens.",
        "least correlation of scores over heads, at the distances where heads are dominant: .9 held, .6 partly",
        ("slash_transfer",),
        random_tokens,
    ),
    Claim(
        "slash",
        2,
        "Queries and keys of slash-dominant heads are almost of rank one before RoPE.",
        "share of the first singular direction in dominant heads, Q and K: .9 held, .7 partly",
        ("cone",),
        rank_one,
    ),
    Claim(
        "slash",
        3,
        "Inputs of the attention lie on a cone, and W_Q and W_K project onto its axis: hence rank one.",
        "share of dominant heads' slash score, above uniform, that the axis part alone makes: .75 held, .4 partly",
        ("cone",),
        axis,
    ),
    Claim(
        "slash",
        4,
        "Medium and high frequencies of RoPE make the slash, low ones do not.",
        "without the high third at most a quarter of the slash score is left, without the low third three quarters; "
        "partly: the high third costs twice as much as the low",
        ("band_ablation",),
        frequencies,
    ),
]
