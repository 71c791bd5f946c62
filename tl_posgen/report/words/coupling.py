"""What is said of a result named coupling."""

import pandas as pd
import xarray as xr

from tl_posgen.results import Result

TITLE = "Do the layers act along the same directions?"
QUESTION = (
    "Coupling of the residual Jacobians of two layers at the last token: 1 - || |A| - S ||_F / ||S||_F, top K singular "
    "vectors: 1 for shared ones, about 0 for unrelated ones. Beside it random bases with the same spectra and a "
    "random-init model; then how straight tokens move and how evenly their norms grow. 95 % intervals over prompts."
)


def found(result: Result) -> list[str]:
    data = result.dataset
    lines = []
    for k in data["k"].values.tolist():
        chance = float(data["mean_chance"].sel(k=k))
        lines.append(
            f"Top-{k} coupling over pairs of layers is {_beside(result, 'coupling', k)}; random bases with the same "
            f"spectra reach {chance:.3f}. Left in right singular vectors: {_beside(result, 'swapped', k)}."
        )
    lines.append(
        f"Token trajectories have a line-shape score of {_beside(result, 'line_shape_score')}, where 1 is a straight "
        f"line; an exponential in the layer explains {_beside(result, 'growth_r2')} of the growth of ln |x|, with an "
        f"expodistance of {_beside(result, 'expodistance')}."
    )
    if "mean_linearisation" in data:
        lines.append(f"The linearised blocks end at a cosine of {_beside(result, 'linearisation')} with the model's.")
    return lines


def table(dataset: xr.Dataset) -> pd.DataFrame:
    """One row a K, each measure with its 95 % interval."""
    columns = {
        "coupling": "coupling",
        "chance": "chance",
        "swapped": "swapped",
        "line_shape_score": "line-shape score",
        "expodistance": "expodistance",
        "growth_r2": "growth R²",
        "linearisation": "linearisation",
    }
    shown = {label: name for name, label in columns.items() if f"mean_{name}" in dataset}
    rows = [
        {"K": k, **{label: _with_interval(dataset.sel(k=k), name) for label, name in shown.items()}}
        for k in dataset["k"].values.tolist()
    ]
    return pd.DataFrame(rows)


def _with_interval(dataset: xr.Dataset, name: str) -> str:
    """'.058 [.041, .073]', or '.058' where one prompt leaves no interval."""
    mean, low, high = (float(dataset[f"mean_{name}{end}"]) for end in ("", "_low", "_high"))
    return f"{mean:.3f}" + (f" [{low:.3f}, {high:.3f}]" if low == low else "")


def _beside(result: Result, name: str, k: int | None = None) -> str:
    """'0.058 [0.041, 0.073] (random init 0.028)'."""
    data, null = (side if side is None or k is None else side.sel(k=k) for side in (result.dataset, result.null))
    assert data is not None
    beside = "no null measured" if null is None else f"random init {float(null[f'mean_{name}']):.3f}"
    return f"{_with_interval(data, name)} ({beside})"
