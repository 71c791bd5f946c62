"""Correlation of quantities over models with a score, as they are and given the models' width and size."""

from collections.abc import Mapping

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float

from tl_posgen.core.measure import ENDS
from tl_posgen.coupling.score_table import CONTROLS
from tl_posgen.stats.partial_correlation import correlation, partial_correlation, regression_line, unexplained

FEWEST = 4  # models for an interval of r; each control needs one more


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
    y, controls = torch.tensor(score), torch.tensor(np.log(sizes))
    found = [against(torch.tensor(x), y, controls) for x in quantities.values()]
    enough = len(y) > 1 + len(CONTROLS) and vary(controls)
    rests = [rest_of(x, controls) if enough else np.full(len(y), np.nan) for x in (*quantities.values(), score)]
    data = {name: (("quantity", "end"), [one[name] for one in found]) for name in ("r", "partial_r")}
    data |= {name: ("quantity", [one[name] for one in found]) for name in ("slope", "intercept", "r2")}
    data |= {"rest": (("quantity", "model_name"), np.stack(rests[:-1])), "rest_score": ("model_name", rests[-1])}
    labels = {"quantity": list(quantities), "end": list(ENDS)}
    return xr.Dataset(data, labels, {"not_computed": not_computed(len(y), vary(controls))})


def against(
    x: Float[torch.Tensor, " model"],
    y: Float[torch.Tensor, " model"],
    controls: Float[torch.Tensor, "model control"],
) -> dict[str, tuple[float, float, float] | float]:
    """Return r and its line where there are enough models, and r given the controls where these vary."""
    none = (np.nan, np.nan, np.nan)
    numbers: dict[str, tuple[float, float, float] | float] = {"r": none, "partial_r": none}
    numbers |= dict.fromkeys(("slope", "intercept", "r2"), np.nan)
    if len(x) >= FEWEST and bool(x.isfinite().all()):
        plain, fitted = correlation(x, y), regression_line(x, y)
        numbers |= {"r": (plain.r, plain.low, plain.high)}
        numbers |= {"slope": fitted.slope, "intercept": fitted.intercept, "r2": fitted.r2}
        if len(x) >= FEWEST + len(CONTROLS) and vary(controls):
            held = partial_correlation(x, y, controls)
            numbers |= {"partial_r": (held.r, held.low, held.high)}
    return numbers


def rest_of(
    x: Float[np.ndarray, " model"], controls: Float[torch.Tensor, "model control"]
) -> Float[np.ndarray, " model"]:
    """Return what the controls leave of a column; NaN where one of its values is."""
    if not np.isfinite(x).all():
        return np.full(len(x), np.nan)
    return unexplained(torch.tensor(x)[:, None], controls)[:, 0].numpy()


def vary(controls: Float[torch.Tensor, "model control"]) -> bool:
    """Return whether the models differ in width or size."""
    return bool((controls != controls[0]).any())


def not_computed(n: int, varied: bool) -> str:
    """Return what is NaN as there are too few models, or all have one size; "" for nothing."""
    held = "the correlation given width and size"
    fewest = {"the correlation and its line": FEWEST, held: FEWEST + len(CONTROLS)}
    missing = [f"{what} (needs {needed} models, {n} given)" for what, needed in fewest.items() if n < needed]
    if not varied and n >= fewest[held]:
        missing.append(f"{held} (all models have the same)")
    return "; ".join(missing)
