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
from tl_posgen.stats.correlations import (
    correlation,
    correlation_excess,
    partial_correlation,
    pearson,
    rank_correlation,
    ranks,
)

FEWEST = 4  # models for an interval of r; each control needs one more
FEWEST_GIVEN_SIZE = FEWEST + len(CONTROLS)
BY = {"values": correlation, "ranks": rank_correlation}  # label -> correlation of two columns with its interval
UNKNOWN = (np.nan,) * len(ENDS)


def correlated(
    quantities: Mapping[str, Float[np.ndarray, " model"]],
    score: Float[np.ndarray, " model"],
    sizes: Mapping[str, Float[np.ndarray, " model"]],
) -> xr.Dataset:
    """Return r of every quantity with the score, of values, of ranks, and given ln sizes; r of every ln size, and the
    excess of coupling's r over it.

    Where there are too few models, or all have one size, they are NaN; the attribute `not_computed` says which.

    Args:
        quantities: "coupling" among them.
        sizes: `SIZES` of every model, above 0.
    """
    y, logs = torch.tensor(score), {name: torch.tensor(np.log(sizes[name])) for name in SIZES}
    controls = torch.stack([logs[name] for name in CONTROLS], 1)
    varied = bool((controls != controls[0]).any())
    columns = {name: torch.tensor(x) for name, x in quantities.items()}
    held = len(score) >= FEWEST_GIVEN_SIZE and varied
    partial = [
        partial_correlation(x, y, controls).ends if held and x.isfinite().all() else UNKNOWN for x in columns.values()
    ]
    of_size = ("by", "size", "end")
    data: dict[str, Any] = {"partial_r": (("quantity", "end"), partial)}
    data["r"] = ("by", "quantity", "end"), [[_of_columns(x, y, by) for x in columns.values()] for by in BY]
    data["size_r"] = of_size, [[_of_columns(logs[size], y, by) for size in SIZES] for by in BY]
    data["excess"] = of_size, [[_excess(columns["coupling"], logs[size], y, by) for size in SIZES] for by in BY]
    labels = {"quantity": list(quantities), "by": list(BY), "size": list(SIZES), "end": list(ENDS)}
    return xr.Dataset(data, labels, {"not_computed": _not_computed(len(score), varied)})


def _not_computed(n: int, varied: bool) -> str:
    """Return what n models cannot give, in words; "" for nothing."""
    held = "the correlation given width and size"
    fewest = {"the correlation and its line": FEWEST, held: FEWEST_GIVEN_SIZE}
    missing = [f"{what} (needs {needed} models, {n} given)" for what, needed in fewest.items() if n < needed]
    if not varied and n >= FEWEST_GIVEN_SIZE:
        missing.append(f"{held} (all models have the same)")
    return "; ".join(missing)


def _of_columns(x: Float[Tensor, " model"], y: Float[Tensor, " model"], by: str) -> tuple[float, ...]:
    """Return r of two columns, of values or ranks, with its interval."""
    if len(x) < FEWEST or not x.isfinite().all():
        return UNKNOWN
    return BY[by](x, y).ends


def _excess(
    x: Float[Tensor, " model"], z: Float[Tensor, " model"], y: Float[Tensor, " model"], by: str
) -> tuple[float, ...]:
    """Return |r(x, y)| - |r(z, y)|, of values or ranks, with its interval."""
    if len(y) < FEWEST or not x.isfinite().all():
        return UNKNOWN
    between = pearson(ranks(x), ranks(z)) if by == "ranks" else pearson(x, z)
    return correlation_excess(BY[by](x, y), BY[by](z, y), float(between))
