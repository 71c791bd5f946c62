"""Numbers in sentences: a mean beside its null, and the head where a measure is largest."""

import xarray as xr

from tl_posgen.results import Result


def mean(dataset: xr.Dataset, variable: str) -> float:
    return float(dataset[variable].mean())


def beside(result: Result, variable: str, form: str = "{:.3f}") -> str:
    """'0.917 (random init 0.323)': the mean of a variable, and its null's."""
    value = form.format(mean(result.dataset, variable))
    null = "no null measured" if result.null is None else "random init " + form.format(mean(result.null, variable))
    return f"{value} ({null})"


def head_with(dataset: xr.Dataset, variable: str, *, largest: bool) -> str:
    """'layer 3 head 6 (0.642)': where a per-head measure is largest, or smallest."""
    series = dataset[variable].to_series().dropna()
    if series.empty:
        return "none"
    place = int(series.to_numpy().argmax() if largest else series.to_numpy().argmin())
    layer, head = series.index.to_list()[place]
    return f"layer {layer} head {head} ({series.iloc[place]:.3f})"
