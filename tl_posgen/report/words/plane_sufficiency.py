"""What is said of a result named plane_sufficiency."""

import pandas as pd
import xarray as xr

from tl_posgen.results import Result

TITLE = "Do a head's planes foretell how additive it is?"
QUESTION = (
    "In each plane: mean length of the query, times how far keys stray from their mean, times how far the plane turns. "
    "Summed over planes, relative to the standard deviation of the scores, this bounds what a split into position and "
    "meaning can miss; here it is set against the interaction share, for trained weights, a random initialisation, and "
    "the trained weights with the entries of every matrix shuffled."
)
PER_HEAD = ("score_sum", "interaction", "planes_met", "additive")


def found(result: Result) -> list[str]:
    data = result.dataset
    without = data.sel(variant="no_first")
    trained, random, shuffled, pooled = (
        f"{float(without['pearson'].sel(group=group)):.2f} (Spearman {float(without['spearman'].sel(group=group)):.2f})"
        for group in ("trained", "random init", "shuffled", "pooled")
    )
    n = int(without["n_heads"].sel(group="trained"))
    means = data[["score_sum_no_first", "interaction_no_first", "additive"]].mean(("layer", "head"))

    def beside(name: str, form: str) -> str:
        values = [form.format(float(means[name].sel(weights=kind))) for kind in data["weights"].values]
        return f"{values[0]} (random init {values[1]}, shuffled {values[2]})"

    return [
        f"Over {n} heads the sum of the plane scores correlates with the interaction share at r = {trained}; random "
        f"init {random}, shuffled {shuffled}, pooled {pooled}. First token left out.",
        f"Mean sum of scores {beside('score_sum_no_first', '{:.2f}')}, interaction share "
        f"{beside('interaction_no_first', '{:.3f}')}; certified additive {beside('additive', '{:.0%}')}. A sum above 1 "
        "bounds nothing by itself: it ranks heads, it does not prove them additive.",
    ]


def table(dataset: xr.Dataset) -> pd.DataFrame:
    """A row per kind of weights: correlations without the first token, and means over heads."""
    means = dataset[list(PER_HEAD)].mean(("layer", "head")).to_dataframe()
    columns = dataset[["pearson", "spearman"]].sel(variant="no_first", drop=True).to_dataframe()
    return columns.join(means).reset_index(names="weights")
