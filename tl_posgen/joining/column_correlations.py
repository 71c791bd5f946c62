"""Correlate the columns of the head profiles over heads and within layers, and tell what random inits do not show."""

from itertools import combinations

import numpy as np
import torch
import xarray as xr

from tl_posgen.core.measure import ENDS, HEAD
from tl_posgen.core.numbers import TRAINED
from tl_posgen.stats.rank_correlation import rank_correlation

SCOPES = ("over heads", "within layers")
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
    "first_token": "attention to the first token",
    "previous_token": "previous token",
    "duplicate_token": "duplicate token",
    "induction": "induction",
    "cost_interaction": "cost of the interaction",
    "cost_slash": "cost of the slash",
    "cost_head": "cost of the head",
}
LABELS = {"r1": "side", "rank95": "side", "mean_energy": "side", "cost": "edit"}  # variable -> its dim of columns
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


def columns_of(data: xr.Dataset) -> dict[str, xr.DataArray]:
    """Return every column [layer, head] that a dataset has: "r1_q" is r1 at side "q", costs are means over prompts."""
    found = {}
    for name in COLUMNS:
        variable, _, label = name.rpartition("_")
        labels = {LABELS[variable]: label} if variable in LABELS else {}
        if (source := variable if labels else name) in data:
            array = data[source].sel(labels, drop=True)
            found[name] = array.mean("prompt") if "prompt" in array.dims else array
    return found


def correlations(data: xr.Dataset) -> xr.DataArray:
    """Return Spearman's rho of every two columns over heads, and of their ranks within layers, with intervals."""
    columns = columns_of(data)
    heads = xr.Dataset(columns).stack(unit=HEAD)
    values = [torch.from_numpy(heads[name].values.astype(float)) for name in columns]
    layers, found = torch.from_numpy(heads["layer"].values.copy()), []
    for group in (None, layers):
        rho = np.full((len(ENDS), len(columns), len(columns)), np.nan)
        for i, j in combinations(range(len(columns)), 2):
            one = rank_correlation(values[i], values[j], group)
            rho[:, i, j] = rho[:, j, i] = one.r, one.low, one.high
        found.append(rho)
    labels = {"scope": list(SCOPES), "end": list(ENDS), "column": list(columns), "column_2": list(columns)}
    return xr.DataArray(np.stack(found), labels, list(labels))


def pairs_of(data: xr.Dataset) -> list[tuple[str, str]]:
    """Return the pairs of `PAIRS` whose columns were measured."""
    columns = set(data["column"].values)
    return [pair for pair in PAIRS if set(pair) <= columns]


def beyond_null(rho: xr.DataArray, scope: str, most: int = 8) -> str:
    """Return in words which pairs of columns have an interval that holds neither zero nor any random init's value."""
    rho = rho.sel(scope=scope)
    value, low, high = (rho.sel(init=TRAINED, end=end).values for end in ENDS)
    inits = rho.sel(end="value").drop_sel(init=TRAINED).transpose("init", "column", "column_2").values
    others = np.concatenate([np.zeros((1, *value.shape)), inits])
    beyond = (others < low).all(0) | (others > high).all(0)
    columns = [str(name) for name in rho["column"].values]
    pairs = list(combinations(range(len(columns)), 2))
    found = [(value[i, j], i, j) for i, j in pairs if beyond[i, j]]
    strongest = [
        f"{COLUMNS[columns[i]]} with {COLUMNS[columns[j]]} {one:.2f}"
        for one, i, j in sorted(found, key=lambda one: -abs(one[0]))[:most]
    ]
    listed = f", strongest: {', '.join(strongest)}" if strongest else ""
    inits_in_words = f"{len(inits)} random init{'s' if len(inits) > 1 else ''}"
    return (
        f"{scope.capitalize()} {len(found)} of {len(pairs)} pairs of columns go together more strongly than in any of "
        f"{inits_in_words}, their intervals holding neither zero nor these{listed}."
    )
