"""Numbers in sentences: values with intervals and random inits, names of heads, caveats of position encodings."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import xarray as xr

from tl_posgen.summary import NullSummary, Summary

NO_NULL = "no null measured"
ENCODINGS = {
    "absolute": "Positions are added to the embeddings here",
    "alibi": "Positions enter as a fixed slope per head here (ALiBi)",
    "none": "Nothing in the attention knows positions here (NoPE)",
}


def beside(own: Summary, null: NullSummary | None, key: str, form: str = ".3f") -> str:
    """Format a number of the summary with its interval over prompts, if it has one, and the random init's number.

    Over several random inits it gives their mean and standard deviation.

    Example:
        >>> beside({"r": 0.917, "r_low": 0.905, "r_high": 0.929}, NullSummary([{"r": 0.323}]), "r")
        '0.917 [0.905, 0.929] (random init 0.323)'
        >>> beside({"r": 0.917}, NullSummary([{"r": 0.3}, {"r": 0.4}]), "r", ".2f")
        '0.92 (random init 0.35 ± 0.07)'
        >>> beside({"r": 0.917}, None, "r", ".0%")
        '92% (no null measured)'
    """
    return f"{with_interval(own, key, form)} ({null_of(null, key, form)})"


def with_interval(own: Summary, key: str, form: str = ".3f") -> str:
    """Format a number of the summary with its interval, if it has one; of several random inits, mean and spread.

    Example:
        >>> with_interval({"r": 0.058, "r_low": 0.041, "r_high": 0.073}, "r")
        '0.058 [0.041, 0.073]'
        >>> with_interval(NullSummary([{"r": 0.3, "r_low": 0.2}, {"r": 0.4, "r_low": 0.1}]), "r", ".2f")
        '0.35 ± 0.07'
        >>> with_interval(NullSummary([{"change": 0.3}, {"change": 0.4}]), "change", "+.2f")
        '+0.35 ± 0.07'
    """
    if isinstance(own, NullSummary) and len(own.seeds) > 1:
        return with_spread(own, key, form)
    low, high = own.get(f"{key}_low"), own.get(f"{key}_high")
    return said(own[key], form) + ("" if low is None or low != low else f" [{said(low, form)}, {said(high, form)}]")


def with_spread(null: NullSummary, key: str, form: str) -> str:
    """Format the mean over random inits and, for several, their standard deviation."""
    spread = null.spread(key)
    return said(null[key], form) + ("" if spread is None else f" ± {said(spread, form.lstrip('+'))}")


def entry(own: Summary, key: str, place: int) -> Summary:
    """Return one entry of a list in the summary, with the ends of its interval if they are listed too.

    Example:
        >>> with_interval(entry({"r": [0.5, 0.9], "r_low": [0.4, 0.8], "r_high": [0.6, 1.0]}, "r", 1), "r", ".1f")
        '0.9 [0.8, 1.0]'
    """
    if isinstance(own, NullSummary):
        return NullSummary([entry(seed, key, place) for seed in own.seeds])
    return {name: own[name][place] for name in (key, f"{key}_low", f"{key}_high") if name in own}


def null_of(null: NullSummary | None, key: str, form: str = ".3f", unit: str = "") -> str:
    """Format the random init's part of `beside`, with a unit at the end.

    Example:
        >>> null_of(NullSummary([{"loss": 0.3}, {"loss": 0.4}]), "loss", ".2f", " nats")
        'random init 0.35 ± 0.07 nats'
    """
    if null is None or key not in null:
        return NO_NULL
    return f"random init {with_spread(null, key, form)}{unit}"


def said(value: Any, form: str) -> str:
    """Format a number; None and NaN become "not defined"."""
    return "not defined" if value is None or value != value else unsigned_zero(value, form)


def unsigned_zero(value: int | float, form: str) -> str:
    """Format a number, never as "-0.000".

    Example:
        >>> [unsigned_zero(-0.0001, form) for form in (".3f", ".1%", "+.2f", ".4f")]
        ['0.000', '0.0%', '+0.00', '-0.0001']
    """
    text = format(value, form)
    return text if text.strip("+-0.%") else format(0.0, form)


def at_most(summary: Summary, key: str, digits: int = 3) -> str:
    """Format an upper bound, rounded up so that it holds; of several random inits, the largest bound.

    Example:
        >>> at_most({"change": 0.25}, "change"), at_most(NullSummary([{"change": 0.0}, {"change": 2e-5}]), "change")
        ('0.250', '0.001')
    """
    seeds = summary.seeds if isinstance(summary, NullSummary) else [summary]
    largest = max(one[key] for one in seeds)
    if not math.isfinite(largest):
        return said(largest, f".{digits}f")
    # the inner rounding removes a float's own error, which must not be rounded up
    return f"{math.ceil(round(largest * 10**digits, 6)) / 10**digits:.{digits}f}"


def head_reference(dataset: xr.Dataset, variable: str, *, largest: bool = True) -> str | None:
    """Return the layer and head, as "3.6", where a per-head variable is largest or smallest; None if all are NaN.

    Example:
        >>> r = xr.Dataset({"r": (("layer", "head"), [[0.1, 0.9]])}, {"layer": [3], "head": [5, 6]})
        >>> head_reference(r, "r"), head_reference(r, "r", largest=False)
        ('3.6', '3.5')
    """
    series = dataset[variable].transpose("layer", "head").to_series().dropna()
    if series.empty:
        return None
    layer, head = series.index[int(series.to_numpy().argmax() if largest else series.to_numpy().argmin())]
    return f"{layer}.{head}"


def extremes(dataset: xr.Dataset, variable: str) -> dict[str, Any]:
    """Return where a per-head variable is largest and smallest, and its values there: `<variable>_highest_head` etc."""
    values = dataset[variable]
    return {
        f"{variable}_highest_head": head_reference(dataset, variable),
        f"{variable}_highest": float(values.max()),
        f"{variable}_lowest_head": head_reference(dataset, variable, largest=False),
        f"{variable}_lowest": float(values.min()),
    }


def means(data: xr.Dataset | pd.DataFrame, *names: str) -> dict[str, float]:
    """Return the mean of each variable or column over all its values; NaN is left out."""
    return {name: float(data[name].mean()) for name in names}


def at_head(reference: str | None, value: float, form: str = ".3f") -> str:
    """Format a head and its value: 'layer 3 head 6 (0.642)' for "3.6"."""
    if reference is None:
        return "none"
    layer, head = reference.split(".")
    return f"layer {layer} head {head} ({said(value, form)})"


def caveat(name: str, caveats: Mapping[str, str], encodings: Sequence[str]) -> str | None:
    """Return the restriction of a measure for a model of these encodings, or None if there is none.

    Example:
        >>> caveat("residual", {"none": "there are no planes."}, ["none"])
        'residual: Nothing in the attention knows positions here (NoPE): there are no planes.'
        >>> caveat("residual", {"none": "there are no planes."}, ["rotary"]) is None
        True
    """
    where = " in some layers" if len(encodings) > 1 else ""
    words = [f"{ENCODINGS.get(one, one)}{where}: {caveats[one]}" for one in encodings if one in caveats]
    return f"{name}: {' '.join(words)}" if words else None
