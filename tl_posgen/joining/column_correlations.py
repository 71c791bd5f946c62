"""Which columns of the head profiles go together over heads, within layers, and more than at random init."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import torch
import xarray as xr

from tl_posgen.report.intervals import ENDS
from tl_posgen.stats.rank_correlation import rank_correlation
from tl_posgen.summary import NullSummary, Summary

RHO = ("rho", "rho_within_layers")
COLUMNS = {
    "r1_q": "r1 of Q",
    "r1_k": "r1 of K",
    "rank95_q": "rank of Q at 95%",
    "rank95_k": "rank of K at 95%",
    "mean_energy_q": "energy share of the mean query",
    "mean_energy_k": "energy share of the mean key",
    "interaction": "interaction share",
    "position": "position share",
    "additive_r": "additive r",
    "slash_score": "slash score",
    "slash_distance": "slash distance",
    "first_token": "first token",
    "previous_token": "previous token",
    "duplicate_token": "duplicate token",
    "induction": "induction",
    "cost_interaction": "cost of the interaction",
    "cost_slash": "cost of the slash",
    "cost_head": "cost of the head",
}
PAIRS = (
    ("r1_k", "interaction"),
    ("mean_energy_k", "interaction"),
    ("r1_k", "slash_score"),
    ("mean_energy_k", "slash_score"),
    ("r1_q", "slash_score"),
    ("interaction", "slash_score"),
    ("slash_score", "previous_token"),
    ("interaction", "previous_token"),
    ("interaction", "induction"),
    ("interaction", "cost_interaction"),
    ("slash_score", "cost_slash"),
    ("r1_k", "cost_head"),
    ("interaction", "cost_head"),
    ("slash_score", "cost_head"),
)


def correlations(data: xr.Dataset) -> xr.Dataset:
    """Spearman's rho of every two columns over heads, and of their ranks within layers, with intervals."""
    columns = [name for name in COLUMNS if name in data]
    heads = data[columns].stack(unit=("layer", "head"))
    values = {name: torch.from_numpy(heads[name].values.astype(float)) for name in columns}
    layer = torch.from_numpy(heads["layer"].values.copy())
    found: dict[str, Any] = {}
    for name, group in (("rho", None), ("rho_within_layers", layer)):
        ends = np.full((len(ENDS), len(columns), len(columns)), np.nan)
        for i, j in combinations(range(len(columns)), 2):
            one = rank_correlation(values[columns[i]], values[columns[j]], group)
            ends[:, i, j] = ends[:, j, i] = one.r, one.low, one.high
        found |= {f"{name}{end}": (("column", "column_2"), part) for end, part in zip(ENDS, ends, strict=True)}
    return xr.Dataset(found, {"column": columns, "column_2": columns})


def pairs_of(data: xr.Dataset) -> Iterator[tuple[str, str]]:
    columns = set(data["column"].values)
    return (pair for pair in PAIRS if set(pair) <= columns)


def beyond_null(own: Summary, null: NullSummary, rho: str, words: str, most: int = 8) -> str:
    """Which pairs of columns have an interval that holds neither zero nor any random init's value."""
    pairs = list(combinations(own["columns"], 2))
    found: list[tuple[float, str]] = []
    for place, (a, b) in enumerate(pairs):
        low, high, value = (own[f"all_{rho}{end}"][place] for end in ("_low", "_high", ""))
        others = (0.0, *(seed[f"all_{rho}"][place] for seed in null.seeds))
        if all(one < low for one in others) or all(one > high for one in others):
            found.append((value, f"{COLUMNS[a]} with {COLUMNS[b]} {value:.2f}"))
    strongest = [text for _, text in sorted(found, key=lambda one: -abs(one[0]))[:most]]
    listed = f", strongest: {', '.join(strongest)}" if strongest else ""
    n = len(null.seeds)
    return (
        f"{words} {len(found)} of {len(pairs)} pairs of columns go together more strongly than in any of {n} random "
        f"init{'s' if n > 1 else ''}, their intervals holding neither zero nor these{listed}."
    )
