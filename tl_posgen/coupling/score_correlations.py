"""Correlation over models of quantities and sizes with a score: of values, of ranks, and given width and size."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.core.measure import ENDS
from tl_posgen.coupling.score_table import CONTROLS, SIZES
from tl_posgen.stats.agreement import pearson, ranks
from tl_posgen.stats.correlation_excess import correlation_excess
from tl_posgen.stats.partial_correlation import correlation, partial_correlation, regression_line, unexplained
from tl_posgen.stats.rank_correlation import rank_correlation

FEWEST = 4  # models for an interval of r; each control needs one more
FEWEST_GIVEN_SIZE = FEWEST + len(CONTROLS)
BY = {"values": correlation, "ranks": rank_correlation}  # label -> correlation of two columns with its interval
UNKNOWN = (np.nan,) * len(ENDS)


def correlated(
    quantities: Mapping[str, Float[np.ndarray, " model"]],
    score: Float[np.ndarray, " model"],
    sizes: Mapping[str, Float[np.ndarray, " model"]],
) -> xr.Dataset:
    """Return r of every quantity with the score, of values and of ranks, r given ln sizes, the regression line and the
    rests given ln sizes; r of every ln size, and the excess of coupling's r over it.

    Where there are too few models, or all have one size, they are NaN; the attribute `not_computed` says which.

    Args:
        quantities: "coupling" among them.
        sizes: `SIZES` of every model, above 0.
    """
    y, logs = torch.tensor(score), {name: torch.tensor(np.log(sizes[name])) for name in SIZES}
    controls = torch.stack([logs[name] for name in CONTROLS], 1)
    varied = bool((controls != controls[0]).any())
    columns = {name: torch.tensor(x) for name, x in quantities.items()}
    *found, of_score = (against(x, y, controls, varied) for x in (*columns.values(), y))
    dims: dict[str, tuple[str, ...]] = {"r": ("quantity", "by", "end"), "partial_r": ("quantity", "end")}
    dims |= dict.fromkeys(("slope", "intercept", "r2"), ("quantity",)) | {"rest": ("quantity", "model_name")}
    data: dict[str, Any] = {name: (of, np.array([row[name] for row in found])) for name, of in dims.items()}
    of_size = ("by", "size", "end")
    data["size_r"] = of_size, [[of_columns(logs[size], y, by) for size in SIZES] for by in BY]
    data["excess"] = of_size, [[excess(columns["coupling"], logs[size], y, by) for size in SIZES] for by in BY]
    data["rest_score"] = ("model_name", of_score["rest"])
    labels = {"quantity": list(quantities), "by": list(BY), "size": list(SIZES), "end": list(ENDS)}
    made = xr.Dataset(data, labels, {"not_computed": not_computed(len(score), varied)})
    return made.assign(r=made["r"].transpose("by", ...))


def not_computed(n: int, varied: bool) -> str:
    """Return what n models cannot give, in words; "" for nothing."""
    held = "the correlation given width and size"
    fewest = {"the correlation and its line": FEWEST, held: FEWEST_GIVEN_SIZE}
    missing = [f"{what} (needs {needed} models, {n} given)" for what, needed in fewest.items() if n < needed]
    if not varied and n >= FEWEST_GIVEN_SIZE:
        missing.append(f"{held} (all models have the same)")
    return "; ".join(missing)


def of_columns(x: Float[Tensor, " model"], y: Float[Tensor, " model"], by: str) -> tuple[float, ...]:
    """Return r of two columns, of values or ranks, with its interval."""
    if len(x) < FEWEST or not x.isfinite().all():
        return UNKNOWN
    return BY[by](x, y).ends


def excess(
    x: Float[Tensor, " model"], z: Float[Tensor, " model"], y: Float[Tensor, " model"], by: str
) -> tuple[float, ...]:
    """Return |r(x, y)| - |r(z, y)|, of values or ranks, with its interval."""
    if len(y) < FEWEST or not x.isfinite().all():
        return UNKNOWN
    between = pearson(ranks(x), ranks(z)) if by == "ranks" else pearson(x, z)
    return correlation_excess(BY[by](x, y), BY[by](z, y), float(between))


def against(
    x: Float[Tensor, " model"], y: Float[Tensor, " model"], controls: Float[Tensor, "model control"], varied: bool
) -> dict[str, Any]:
    """Return r and its line where there are enough models; r and the rest of x given the controls where these vary."""
    numbers: dict[str, Any] = {"r": [of_columns(x, y, by) for by in BY], "partial_r": UNKNOWN}
    numbers |= dict.fromkeys(("slope", "intercept", "r2"), np.nan) | {"rest": np.full(len(x), np.nan)}
    if not x.isfinite().all():
        return numbers
    if len(x) >= FEWEST:
        fitted = regression_line(x, y)
        numbers |= {"slope": fitted.slope, "intercept": fitted.intercept, "r2": fitted.r2}
    if len(x) >= FEWEST_GIVEN_SIZE and varied:
        numbers["partial_r"] = partial_correlation(x, y, controls).ends
    if len(x) > 1 + len(CONTROLS) and varied:
        numbers["rest"] = unexplained(x[:, None], controls)[:, 0].numpy()
    return numbers
