"""What is said of a result named coupling_scores."""

import pandas as pd
import xarray as xr

from tl_posgen.results import Result

TITLE = "Does coupling go with a better model?"
QUESTION = (
    "Correlation over models of coupling, straightness and growth with a score, as they are and given ln d_model and "
    "ln parameters. The control matters: with the trace normalisation and K proportional to the width, random "
    "Jacobians already couple by about 1 - 1/sqrt(K), so wider models look coupled."
)


def found(result: Result) -> list[str]:
    data = result.dataset
    lines = []
    coupling = data.sel(measure="coupling")
    if coupling["r"].notnull():
        null = "" if result.null is None else f" (random init {_number(result.null, 'r')})"
        held = "" if coupling["partial_r"].isnull() else f"; given width and size {_interval(data, 'partial_r')}"
        lines.append(
            f"Top-{data.attrs['k']} coupling and {data.attrs['score']} correlate at r = {_interval(data, 'r')}{null} "
            f"over {data.sizes['model']} models{held}."
        )
    if data.attrs["not_computed"]:
        lines.append(f"Not computed: {data.attrs['not_computed']}.")
    trace, frobenius = (data["width_coupling"].sel(norm=norm).values for norm in ("trace", "frobenius"))
    widths = data["width"].values
    lines.append(
        f"Warning: independent random Jacobians of width {widths[0]} to {widths[-1]} have a trace-normalised coupling "
        f"of {trace[0]:.2f} to {trace[-1]:.2f}, which 1/sqrt(width) explains with R² "
        f"{float(data['width_r2'].sel(norm='trace')):.4f}; Frobenius stays within {abs(frobenius).max():.3f} of 0."
    )
    return lines


def table(dataset: xr.Dataset) -> pd.DataFrame:
    """One row a measure: its correlation with the score, as it is and given width and size."""
    rows = [
        {"measure": str(name), "r": _interval(dataset, "r", name), "given size": _interval(dataset, "partial_r", name)}
        | {"slope": float(dataset["slope"].sel(measure=name)), "R²": float(dataset["r2"].sel(measure=name))}
        for name in dataset["measure"].values
    ]
    return pd.DataFrame(rows)


def _interval(dataset: xr.Dataset, r: str, measure: str = "coupling") -> str:
    prefix = r.removesuffix("_r")
    values = [float(dataset[name].sel(measure=measure)) for name in (r, f"{prefix}_low", f"{prefix}_high")]
    return "-" if values[0] != values[0] else "{:.3f} [{:.3f}, {:.3f}]".format(*values)


def _number(dataset: xr.Dataset, r: str) -> str:
    value = float(dataset[r].sel(measure="coupling"))
    return "undefined, as it does not vary" if value != value else f"{value:.3f}"
