"""What is said of a result named emergence."""

import pandas as pd
import xarray as xr

from tl_posgen.report.phrases import mean
from tl_posgen.results import Result

TITLE = "When does the split form?"
QUESTION = "Every measure over training checkpoints, from step 0, each on the same prompts; means over heads."
SHOWN = {
    "three_axis_r": "r",
    "three_axis_r_visible": "r within rows",
    "variance_position": "position",
    "variance_meaning": "meaning",
    "variance_interaction": "interaction",
    "slash_best_score": "slash",
}
SENTENCES = {
    "three_axis_r_visible": ("The correlation within rows with position + query + key", "{:.3f}"),
    "variance_position": ("The share of position in the variance that softmax can see", "{:.0%}"),
    "variance_interaction": ("The share of neither position nor meaning", "{:.0%}"),
}


def found(result: Result) -> list[str]:
    data, null = result.dataset, result.null
    steps = data["step"].values
    if len(steps) < 2:
        return []
    loss = data["loss"].values
    sentences = [f"From step {steps[0]} to step {steps[-1]} the loss goes from {loss[0]:.3f} to {loss[-1]:.3f} nats."]
    for name, (what, form) in SENTENCES.items():
        if name not in data:
            continue
        values = data[name].mean(("layer", "head"))
        first, for_good = _half_way(values)
        lost = f"at step {steps[first]}, is lost again, and is there for good " if first < for_good else ""
        reached = f"half of the change is there {lost}by step {steps[for_good]}, at loss {loss[for_good]:.3f}"
        chance = "no null measured" if null is None else f"random init {form.format(mean(null, name))}"
        sentences.append(
            f"{what} goes from {form.format(float(values[0]))} at step {steps[0]} to {form.format(float(values[-1]))} "
            f"at step {steps[-1]} ({chance}); {reached}."
        )
    return sentences


def table(dataset: xr.Dataset) -> pd.DataFrame:
    """One row a checkpoint: its step, the loss, and means over heads. At most 20 rows, spread over all of them."""
    names = [name for name in SHOWN if name in dataset] or [
        str(name) for name, array in dataset.data_vars.items() if "head" in array.dims
    ][:6]
    frame = pd.DataFrame({"checkpoint": dataset["checkpoint"].values})
    frame["loss"] = dataset["loss"].values
    for name in names:
        frame[SHOWN.get(name, name)] = dataset[name].mean(("layer", "head")).values
    n = len(frame)
    kept = range(n) if n <= 20 else sorted({round(i * (n - 1) / 19) for i in range(20)})
    return frame.iloc[list(kept)]


def _half_way(values: xr.DataArray) -> tuple[int, int]:
    """The first checkpoint past the middle between the first and the last value, and that from which all are."""
    change = values.values - float(values[0])
    past = change / change[-1] >= 0.5 if change[-1] else change == 0
    before = (~past).nonzero()[0]
    return int(past.argmax()), int(before[-1]) + 1 if len(before) else 0
