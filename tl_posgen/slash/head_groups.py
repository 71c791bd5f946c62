"""Slash-dominant heads beside the others, and beside those of the random init: counted, averaged, tabulated."""

from collections.abc import Mapping
from itertools import product
from typing import Any

import pandas as pd
import xarray as xr

from tl_posgen.core.measure import HEAD
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import Numbers

TITLES = {"all": "all tokens", "without first": "first token left out"}  # of labels of the dim tokens
GROUPS = {"dominant": "slash-dominant", "other": "other"}


def _group_masks(heads: xr.Dataset) -> dict[str, xr.DataArray]:
    """Return which heads are slash-dominant, and which of those measured (they have a best distance) are not."""
    measured, dominant = heads["best_distance"].notnull(), heads["dominant"].astype(bool)
    return {"dominant": dominant & measured, "other": ~dominant & measured}


def n_heads(own: Numbers, group: str, tokens: str = "all") -> Number:
    """Return how many heads are in a group."""
    return own.number(_group_masks(own.dataset.sel(tokens=tokens))[group].sum(HEAD))


def mean_over_group(own: Numbers, array: xr.DataArray, group: str, tokens: str = "all") -> xr.DataArray:
    """Return the mean of an array over the heads of a group; NaN where one of them has no value, or there is none."""
    heads = _group_masks(own.dataset.sel(tokens=tokens))[group]
    return array.where(heads, 0).sum(HEAD, skipna=False) / heads.sum(HEAD)


def group_mean(own: Numbers, name: str, group: str, tokens: str = "all", **labels: Any) -> Number:
    """Return the mean of a variable over the heads of a group."""
    array = mean_over_group(own, own.array(name, tokens=tokens, **labels), group, tokens)
    return own.number(array, own.measure.variables[name].bounds)


def in_groups(own: Numbers, name: str, *, tokens: str = "all", form: str = ".3f") -> str:
    """Return '0.947 and 0.964 in 31 slash-dominant heads, 0.823 and 0.903 in 9 other heads', of Q and of K."""
    phrases = []
    for group, words in GROUPS.items():
        if n := n_heads(own, group, tokens).value:
            means = (group_mean(own, name, group, tokens, side=side) for side in "qk")
            values = " and ".join(f"{one.with_interval:{form}}" for one in means)
            none = group == "other" and not n_heads(own, "dominant", tokens).value
            phrases.append(f"{values} in {f'{count(n)}, none slash-dominant' if none else count(n, words)}")
    return ", ".join(phrases)


def count(n: int | float, words: str = "") -> str:
    """Return how many heads there are, or how many on average over several random inits.

    Example:
        >>> count(1, "slash-dominant"), count(9.0), count(5 / 3, "other")
        ('1 slash-dominant head', '9 heads', '1.67 other heads on average')
    """
    heads = f"{n:.3g} {words}".strip() + (" head" if n == 1 else " heads")
    return heads if n == int(n) else f"{heads} on average"


def group_table(own: Numbers, columns: Mapping[str, xr.DataArray]) -> pd.DataFrame:
    """Return a row for each choice of tokens and group of heads, a column for each array [tokens, layer, head]."""
    rows = []
    for (tokens, title), (group, words) in product(TITLES.items(), GROUPS.items()):
        if n := n_heads(own, group, tokens).value:
            means = {name: mean_over_group(own, one.sel(tokens=tokens), group, tokens) for name, one in columns.items()}
            values = {heading: own.number(mean).value for heading, mean in means.items()}
            rows.append({"tokens": title, "heads": f"{n:.3g} {words}", **values})
    return pd.DataFrame(rows)
