"""What is said of a result named planes."""

import numpy as np
import pandas as pd
import xarray as xr

from tl_posgen.report.phrases import beside
from tl_posgen.results import Result

TITLE = "What does each of RoPE's planes carry?"
QUESTION = (
    "Queries and keys before RoPE, plane by plane: how long, how constant (concentration 1: always the same vector), "
    "at which phase; and how much of the head's position part and meaning part each plane carries. A head is certified "
    "additive where in every plane the key is nearly constant, or query and key are too small to matter, or the plane "
    "hardly turns."
)
BANDS = [0, 16, 128, 1024, 8192, np.inf]  # of wavelengths, in tokens
NAMES = ["up to 16", "16 to 128", "128 to 1024", "1024 to 8192", "above 8192"]
MEASURES = ("concentration_q", "concentration_k", "magnitude_q", "magnitude_k")
CONDITIONS = {
    "position": "the key is nearly constant",
    "quiet": "it is too small to matter",
    "slow": "it hardly turns",
}
SUMMED = ("position_by_plane", "meaning_by_plane")


def found(result: Result) -> list[str]:
    data = result.dataset
    eps, n = data.attrs["eps"], int(data["additive"].notnull().sum())
    met = ", ".join(f"{words} in {beside(result, f'meets_{name}', '{:.0%}')}" for name, words in CONDITIONS.items())
    return [
        f"Concentration |E z| / E|z| of queries is {beside(result, 'concentration_q')}, of keys "
        f"{beside(result, 'concentration_k')}; without the first token "
        f"{beside(result, 'concentration_q_no_first')} and {beside(result, 'concentration_k_no_first')}. "
        f"Participation ratio of K: {beside(result, 'participation_k')}.",
        f"Of the planes, at eps = {eps:g}: {met}. The criterion certifies {beside(result, 'additive', '{:.0%}')} of "
        f"{n} heads as additive. Sum of plane scores / std: {beside(result, 'score_sum', '{:.2f}')}.",
    ]


def table(dataset: xr.Dataset) -> pd.DataFrame:
    """Bands of wavelengths: means over planes and heads; of the shares the sum over the band's planes, mean over
    heads."""
    wavelength = dataset["wavelength"].broadcast_like(dataset["score"])
    frame = dataset[[*MEASURES, *SUMMED]].assign(wavelength=wavelength).to_dataframe().dropna(subset="wavelength")
    frame["band"] = pd.cut(frame["wavelength"].clip(upper=1e300), BANDS, labels=NAMES)
    groups = frame.groupby("band", observed=True)
    n_heads = frame.groupby(["layer", "head"]).ngroups
    columns = {"planes": groups.size() / n_heads} | {name: groups[name].mean() for name in MEASURES}
    columns |= {name.removesuffix("_by_plane"): groups[name].sum() / n_heads for name in SUMMED}
    return pd.DataFrame(columns).reset_index(names="wavelength")
