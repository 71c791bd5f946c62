"""What is said of a result named claims."""

import pandas as pd
import xarray as xr

TITLE = "What the papers claim, on this model"
QUESTION = (
    "A row a claim, in our words: the verdict, the numbers it rests on, and the same numbers for a randomly "
    "initialised model. The criteria are ours and stand beside the verdicts."
)


def table(dataset: xr.Dataset) -> pd.DataFrame:
    """A row a claim, whole."""
    return pd.DataFrame({name: dataset[name].values for name in ("claim", *dataset.data_vars)})
