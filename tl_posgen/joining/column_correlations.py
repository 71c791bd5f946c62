"""Correlate the columns of the head profiles over heads and within layers, and tell what random inits do not show."""

from collections.abc import Collection
from itertools import combinations, product

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float

from tl_posgen.core.measure import ENDS, HEAD
from tl_posgen.core.numbers import TRAINED
from tl_posgen.stats.beyond_inits import CHANCE, FEWEST_INITS, beyond_inits
from tl_posgen.stats.rank_correlation import rank_correlation

SCOPES = ("over heads", "within layers")
MOST_PAIRS = 8  # that a sentence lists
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
    "cost_elsewhere": "cost of as much attention elsewhere, at most all of it",
    "cost_head": "cost of the head",
    "massive_q": "massive values of Q",
    "massive_k": "massive values of K",
    "concentration_q": "concentration of Q",
    "concentration_k": "concentration of K",
    "slow_mean_q": "slow mean of Q",
    "slow_mean_k": "slow mean of K",
    "frequency_entropy": "entropy over frequencies",
    "sink_rate": "sink rate",
    "positional": "positional",
    "symbolic": "symbolic",
    "absolute": "share of the key's place",
}
SIDED = ("r1", "rank95", "mean_energy", "massive", "concentration", "slow_mean")
LABELS: dict[str, str] = {**{name: "side" for name in SIDED}, "cost": "edit"}  # variable -> its dim of columns
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
    ("slash_score", "cost_elsewhere"),
    ("r1_k", "cost_head"),
    ("interaction", "cost_head"),
    ("slash_score", "cost_head"),
)
LITERATURE_PAIRS = (  # with columns of other papers: what goes with what position costs, first
    *product(
        ("concentration_k", "massive_k", "slow_mean_k", "frequency_entropy", "sink_rate", "positional", "symbolic"),
        ("cost_slash", "cost_interaction"),
    ),
    ("slash_score", "concentration_k"),
    ("interaction", "concentration_k"),
    ("slash_score", "positional"),
    ("interaction", "positional"),
    ("induction", "symbolic"),
    ("massive_k", "cost_head"),
)

IDENTITIES = frozenset(  # pairs that measure nearly one thing, trained or not
    {("r1_q", "mean_energy_q"), ("r1_k", "mean_energy_k"), ("interaction", "additive_r")}
    | {("first_token", "sink_rate"), ("mean_energy_q", "concentration_q"), ("mean_energy_k", "concentration_k")}
    | {("r1_q", "rank95_q"), ("r1_k", "rank95_k"), ("rank95_q", "mean_energy_q"), ("rank95_k", "mean_energy_k")}
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
    values = [torch.from_numpy(without_rounding(name, heads[name].values.astype(float))) for name in columns]
    layers, found = torch.from_numpy(heads["layer"].values.copy()), []
    for group in (None, layers):
        rho = np.full((len(ENDS), len(columns), len(columns)), np.nan)
        for i, j in combinations(range(len(columns)), 2):
            rho[:, i, j] = rho[:, j, i] = rank_correlation(values[i], values[j], group).ends
        found.append(rho)
    labels = {"scope": list(SCOPES), "end": list(ENDS), "column": list(columns), "column_2": list(columns)}
    return xr.DataArray(np.stack(found), labels, list(labels))


def without_rounding(name: str, values: Float[np.ndarray, " head"]) -> Float[np.ndarray, " head"]:
    """Return a column, NaN where it differs over heads by rounding alone, which has no ranks: by no more than the
    rounding of mean losses in float32 for costs, in nats, and of sums in float64 for others."""
    spread = np.nanmax(values) - np.nanmin(values) if np.isfinite(values).any() else 0.0
    return values if spread > (1e-6 if name.startswith("cost_") else 1e-9) else np.full_like(values, np.nan)


def pairs_of(data: xr.Dataset) -> list[tuple[str, str]]:
    """Return the pairs of `LITERATURE_PAIRS` and `PAIRS` whose columns were measured."""
    columns = set(data["column"].values)
    return [pair for pair in (*LITERATURE_PAIRS, *PAIRS) if set(pair) <= columns]


def beyond_null(rho: xr.DataArray, scope: str, without: Collection[str] = ()) -> str:
    """Return in words which pairs of columns go together as in no random init; from FEWEST_INITS inits on.

    Args:
        without: columns that are left out.
    """
    n_inits = rho.sizes["init"] - 1
    if n_inits < FEWEST_INITS:
        return (
            f"{scope.capitalize()}, which pairs go beyond random init is told from {FEWEST_INITS} random inits on, "
            f"here {n_inits}: null_seeds=range({FEWEST_INITS}), with Profiles(costs=False) where that takes too long."
        )
    rho = rho.sel(scope=scope).transpose("init", "end", "column", "column_2")
    columns = [str(name) for name in rho["column"].values]
    defined = np.isfinite(rho.sel(end="value").values).all(0)
    known = [
        (i, j)
        for i, j in combinations(range(len(columns)), 2)
        if defined[i, j] and (columns[i], columns[j]) not in IDENTITIES and not {columns[i], columns[j]} & {*without}
    ]
    of_pairs = np.stack([rho.values[..., i, j] for i, j in known], -1) if known else np.empty((n_inits + 1, 3, 0))
    trained = list(rho["init"].values).index(TRAINED)
    (own, low, high), inits = of_pairs[trained], np.delete(of_pairs[:, 0], trained, 0)
    found = [(own[n], *known[n]) for n in np.flatnonzero(beyond_inits(own, low, high, inits))]
    strongest = [
        f"{COLUMNS[columns[i]]} with {COLUMNS[columns[j]]} {one:.2f}"
        for one, i, j in sorted(found, key=lambda one: -abs(one[0]))[:MOST_PAIRS]
    ]
    listed = f", strongest: {', '.join(strongest)}" if strongest else ""
    return (
        f"{scope.capitalize()} {len(found)} of {len(known)} pairs of columns go together beyond {n_inits} random inits "
        f"(about {CHANCE:g} expected by chance in all){listed}."
    )
