"""What is said of a result named length."""

import pandas as pd
import xarray as xr

from tl_posgen.results import Result

TITLE = "Beyond the training length, do the outputs stay where they were?"
QUESTION = (
    "Prompts of several training lengths: untouched, with LM-Infinite's windows, with retrieved blocks besides, and "
    "with interpolated positions. Outputs o of every head are compared with those inside the training length; the "
    "noise floor is the distance between the outputs of two halves of the prompts there."
)
NAMES = {
    "vanilla": "Untouched",
    "lm_infinite": "LM-Infinite",
    "retrieval": "Block retrieval",
    "interpolation": "Position interpolation",
}


def found(result: Result) -> list[str]:
    data, null = result.dataset, result.null
    if data.sizes["segment"] < 2:
        return ["Nothing was run beyond the training length."]
    lines = []
    for arm in (str(arm) for arm in data["arm"].values):
        beside = "" if null is None else f"; random init: {drift_beyond(null, arm)}"
        lines.append(f"{NAMES[arm]}, beyond the training length: {drift_beyond(data, arm)}{beside}.")
    inside = float(data["loss_segment"].sel(arm="vanilla", segment=0))
    floors = [float(one["floor"].median()) for one in (data, null) if one is not None]
    beside = "" if null is None else f" (random init {floors[1]:.2f})"
    return [*lines, f"Inside it the untouched loss is {inside:.2f} and the noise floor {floors[0]:.2f}{beside}."]


def drift_beyond(dataset: xr.Dataset, arm: str) -> str:
    """Loss, the share of heads whose outputs are no further off than the noise floor, and medians over heads."""
    data = dataset.sel(arm=arm)
    beyond = data.isel(segment=slice(1, None)).mean("segment")
    stays = float((beyond["frechet"] <= beyond["floor"]).mean())
    frechet, norm = (float(beyond[name].median()) for name in ("frechet", "norm_ratio"))
    return (
        f"loss {float(beyond['loss_segment']):.2f}, outputs within the noise floor in {stays:.0%} of heads (Frechet "
        f"{frechet:.2f}, norm ratio {norm:.2f})"
    )


def table(dataset: xr.Dataset) -> pd.DataFrame:
    """One row per arm and multiple of the training length: medians over heads, loss, mean entropy."""
    segment_of_bin = dataset["bin"] // int(dataset.attrs["inside"])
    heads = ("layer", "head")
    columns = {
        "loss": dataset["loss_segment"],
        "frechet": dataset["frechet"].median(heads),
        "floor": dataset["floor"].median(heads),
        "within_floor": (dataset["frechet"] <= dataset["floor"]).mean(heads),
        "norm_ratio": dataset["norm_ratio"].median(heads),
        "entropy": dataset["entropy"].mean(heads).groupby(segment_of_bin.rename("segment")).mean(),
    }
    frame = xr.Dataset(columns).to_dataframe(dim_order=["arm", "segment"]).reset_index()
    frame["segment"] += 1
    return pd.DataFrame(frame.rename(columns={"segment": "times"})[["arm", "times", *columns]])
