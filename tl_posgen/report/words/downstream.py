"""What is said of a result named downstream."""

import pandas as pd
import xarray as xr

from tl_posgen.results import Result

TITLE = "Do task scores survive disorder?"
QUESTION = (
    "Multiple-choice or cloze items, every choice scored by its log-likelihood after the context, with a share of the "
    "context out of order in the text (T), the position index (P) or the features (F); 95 % bootstrap intervals over "
    "items."
)


def found(result: Result) -> list[str]:
    data, null = result.dataset, result.null
    none, most = data.sel(ratio=data["ratio"].min()), data.sel(ratio=data["ratio"].max())
    accuracy = float(none["accuracy"].mean())
    beside = "" if null is None else f" (random init {float(null['accuracy'].sel(ratio=none['ratio']).mean()):.0%})"
    lines = [
        f"Accuracy over {data.attrs['items']} items with {float(none['ratio']):.0%} of the context moved: "
        f"{accuracy:.0%}{beside}; chance {float(data['chance']):.0%}."
    ]
    if data.sizes["ratio"] > 1:
        words = "; ".join(after(most.sel(arm=arm), none.sel(arm=arm)) for arm in data["arm"].values)
        lines.append(
            f"With {float(most['ratio']):.0%} moved, accuracy and change of the right choice's log-likelihood (nats a "
            f"token): {words}."
        )
    return lines


def after(moved: xr.Dataset, ordered: xr.Dataset) -> str:
    mean, low, high = (f"{float(moved[f'accuracy{end}']):.0%}" for end in ("", "_low", "_high"))
    change = float(moved["log_likelihood"] - ordered["log_likelihood"])
    return f"{str(moved['arm'].item()).replace('_', ' ')} {mean} [{low}, {high}], {change:+.2f}"


def table(dataset: xr.Dataset) -> pd.DataFrame:
    """One row per arm and ratio; the lowest ratio once, as all arms agree where nothing is moved."""
    names = ("accuracy", "accuracy_low", "accuracy_high", "accuracy_per_byte", "log_likelihood")
    ratios = dataset["ratio"].values
    places = [(arm, ratio) for arm in dataset["arm"].values for ratio in ratios[ratios > 0]]
    if 0 in ratios:
        places.insert(0, (dataset["arm"].values[0], 0.0))
    rows = [
        ("none" if ratio == 0 else arm, f"{ratio:.0%}", *(float(dataset[n].sel(arm=arm, ratio=ratio)) for n in names))
        for arm, ratio in places
    ]
    return pd.DataFrame(rows, columns=["arm", "moved", *names])
