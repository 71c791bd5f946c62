"""Correlation of quantities over models with a score, as they are and given the models' width and size."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.core.measure import ENDS
from tl_posgen.coupling.score_table import CONTROLS
from tl_posgen.stats.partial_correlation import correlation, partial_correlation, regression_line, unexplained

FEWEST = 4  # models for an interval of r; each control needs one more
FEWEST_GIVEN_SIZE = FEWEST + len(CONTROLS)


def correlated(
    quantities: Mapping[str, Float[np.ndarray, " model"]],
    score: Float[np.ndarray, " model"],
    sizes: Float[np.ndarray, "model control"],
) -> xr.Dataset:
    """Return r of every quantity with the score, r given ln sizes, the regression line, and the rests given ln sizes.

    Where there are too few models, or all have one size, they are NaN; the attribute `not_computed` says which.

    Args:
        sizes: d_model and parameters of every model, above 0.
    """
    n, y, controls = len(score), torch.tensor(score), torch.tensor(np.log(sizes))
    varied = bool((controls != controls[0]).any())
    *found, of_score = (against(torch.tensor(x), y, controls, varied) for x in (*quantities.values(), score))
    dims: dict[str, tuple[str, ...]] = dict.fromkeys(("r", "partial_r"), ("quantity", "end"))
    dims |= dict.fromkeys(("slope", "intercept", "r2"), ("quantity",)) | {"rest": ("quantity", "model_name")}
    data: dict[str, Any] = {name: (of, np.array([row[name] for row in found])) for name, of in dims.items()}
    held = "the correlation given width and size"
    fewest = {"the correlation and its line": FEWEST, held: FEWEST_GIVEN_SIZE}
    missing = [f"{what} (needs {needed} models, {n} given)" for what, needed in fewest.items() if n < needed]
    if not varied and n >= FEWEST_GIVEN_SIZE:
        missing.append(f"{held} (all models have the same)")
    labels = {"quantity": list(quantities), "end": list(ENDS)}
    data["rest_score"] = ("model_name", of_score["rest"])
    return xr.Dataset(data, labels, {"not_computed": "; ".join(missing)})


def against(
    x: Float[Tensor, " model"], y: Float[Tensor, " model"], controls: Float[Tensor, "model control"], varied: bool
) -> dict[str, Any]:
    """Return r and its line where there are enough models; r and the rest of x given the controls where these vary."""
    numbers: dict[str, Any] = {name: [np.nan] * len(ENDS) for name in ("r", "partial_r")}
    numbers |= dict.fromkeys(("slope", "intercept", "r2"), np.nan) | {"rest": np.full(len(x), np.nan)}
    if not x.isfinite().all():
        return numbers
    if len(x) >= FEWEST:
        plain, fitted = correlation(x, y), regression_line(x, y)
        numbers["r"] = plain.r, plain.low, plain.high
        numbers |= {"slope": fitted.slope, "intercept": fitted.intercept, "r2": fitted.r2}
    if len(x) >= FEWEST_GIVEN_SIZE and varied:
        held = partial_correlation(x, y, controls)
        numbers["partial_r"] = held.r, held.low, held.high
    if len(x) > 1 + len(CONTROLS) and varied:
        numbers["rest"] = unexplained(x[:, None], controls)[:, 0].numpy()
    return numbers
