"""Heads by a quantity, the highest or the lowest first, and other heads drawn as their control."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from tl_posgen.core.measure import ENDS, HEAD
from tl_posgen.core.numbers import MOST_LABELS, Numbers
from tl_posgen.errors import InputError


def ranked_heads(
    measure: Any, data: xr.Dataset, by: str | None, labels: Mapping[str, Any], *, lowest: bool = False
) -> tuple[pd.DataFrame, dict[str, str]]:
    """Return layer, head, a quantity and what stands beside it, of all heads that have one, in order; and the variable
    that each of these columns is of.

    Args:
        data: of one model.
        by, labels: see `tl_posgen.core.result.Result.heads`.
    """
    by, title, labels = _quantity(measure, data, by, labels)
    numbers = Numbers(measure, data)
    if more := [str(dim) for dim in numbers.array(by, **labels).dims if dim not in HEAD]:
        there = "; ".join(map(str, data[by][more[0]].values[:MOST_LABELS]))
        raise InputError(f"by={by!r} has a value for each {more[0]}: give {more[0]}=, one of {there}")
    beside = measure.variables[by].shown_with if by in measure.variables else ""
    columns = {title: by} | ({beside: beside} if beside in data and set(HEAD) <= set(data[beside].dims) else {})
    frame = pd.DataFrame(
        {column: numbers.array(name, **labels).transpose(*HEAD).to_series() for column, name in columns.items()}
    )
    frame = frame.dropna(subset=title).astype({title: float})
    frame = frame.sort_values(title, ascending=lowest, kind="stable").reset_index()
    return frame[[*HEAD, *columns]], columns


def _quantity(
    measure: Any, data: xr.Dataset, by: str | None, labels: Mapping[str, Any]
) -> tuple[str, str, Mapping[str, Any]]:
    """Return the variable that `by` names, what its column is called, and the labels at which it is taken.

    Of a comparison, whose numbers stand along "number", `by` is one of these, also by the name that its own measure
    gives."""
    variables = measure.variables
    names = [name for name in variables if name in data] + [name for name in data if name not in variables]
    per_head = [str(name) for name in names if set(HEAD) <= set(data[name].dims)]
    headlines = [name for name, variable in variables.items() if name in per_head and variable.headline]
    numbers = data["number"].values.tolist() if "number" in data.coords else []
    if "quantity" in data and by not in (*numbers, *per_head):
        same = [number for number, name in zip(numbers, data["quantity"].values, strict=True) if name == by]
        by = same[0] if len(same) == 1 else by
    if per_head and (by in numbers or (by is None and numbers and "number" not in labels)):
        by, labels = per_head[0], {"number": by or numbers[0], **labels}
    by = title = by or next(iter(headlines or per_head), "")
    if by not in per_head:
        by = next((name for name in headlines if variables[name].headline == by), by)
    if by not in per_head:
        there = ("; ".join(numbers) or ", ".join(per_head)) if per_head else "nothing"
        raise InputError(f"by={by!r}: {measure.name} has, per head, {there}")
    return by, title, {"end": ENDS[0], **labels} if "end" in data[by].dims else labels


def others_last(frame: pd.DataFrame, heads: Sequence[tuple[int, int]]) -> tuple[pd.DataFrame, int]:
    """Return the rows of these heads first, and how many they are."""
    pairs = {*heads}
    is_named = np.array([pair in pairs for pair in frame[[*HEAD]].itertuples(index=False, name=None)], bool)
    return pd.concat([frame.loc[is_named], frame.loc[~is_named]]), int(is_named.sum())


def random_control(frame: pd.DataFrame, n: int, seed: int) -> pd.DataFrame:
    """Return n rows behind the first n at random, of the same layers where these have others."""
    first, candidates = frame.iloc[:n], frame.iloc[n:]
    if len(candidates) < n:
        raise InputError(f"random: beside the {n} heads there are {len(candidates)} others; give a smaller top")
    order = candidates.iloc[np.random.default_rng(seed).permutation(len(candidates))]
    wanted = first["layer"].value_counts()
    place = order.groupby("layer").cumcount()  # in its layer, in random order
    is_alike = (place < order["layer"].map(wanted).fillna(0)).to_numpy()
    return pd.concat([order[is_alike], order[~is_alike]]).head(n).reset_index(drop=True)
