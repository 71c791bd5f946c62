"""What is said of a result named coupling_emergence."""

import pandas as pd
import xarray as xr

from tl_posgen.results import Result

TITLE = "Does coupling form during training?"
QUESTION = (
    "Top-K coupling of residual Jacobians, straightness and growth of token trajectories at every checkpoint, on the "
    "same prompts; beside them random bases and a random-init model."
)
NAMES = {
    "coupling": "coupling",
    "line_shape_score": "the line-shape score",
    "growth_r2": "R² of exponential growth",
    "expodistance": "expodistance",
}


def found(result: Result) -> list[str]:
    data = result.dataset
    steps = data["step"].values
    lines = []
    for name, label in NAMES.items():
        first, last = (_with_interval(data.isel(checkpoint=place), name) for place in (0, -1))
        top = int(data[name].values.argmax())
        null = "" if result.null is None else f"; random init {float(result.null[name].squeeze()):.3f}"
        lines.append(
            f"From step {steps[0]} to {steps[-1]}, {label} goes from {first} to {last}, and is largest at step "
            f"{steps[top]} ({float(data[name][top]):.3f}){null}."
        )
    chance = data["chance"].values
    return [*lines, f"Random bases with the same spectra reach {chance.min():.3f} to {chance.max():.3f}."]


def table(dataset: xr.Dataset) -> pd.DataFrame:
    """One row a checkpoint."""
    rows = [dataset.isel(checkpoint=place) for place in range(dataset.sizes["checkpoint"])]
    columns: dict[str, list] = {"checkpoint": [str(row["checkpoint"].values) for row in rows]}
    columns["loss"] = [float(row["loss"]) for row in rows]
    columns["coupling"] = [_with_interval(row, "coupling") for row in rows]
    for name in ("chance", "swapped", "line_shape_score", "expodistance", "growth_r2"):
        columns[name.replace("_", " ").replace("r2", "R²")] = [float(row[name]) for row in rows]
    return pd.DataFrame(columns)


def _with_interval(row: xr.Dataset, name: str) -> str:
    mean, low, high = (float(row[f"{name}{end}"]) for end in ("", "_low", "_high"))
    return f"{mean:.3f}" + (f" [{low:.3f}, {high:.3f}]" if low == low else "")
