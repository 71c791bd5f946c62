"""Shares of each plane of each layer in position, content and energy, and their correlation with the plane's cost."""

from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Float

from tl_posgen.position.first_token import WITHOUT_FIRST_TOKEN
from tl_posgen.report.intervals import ENDS
from tl_posgen.rope.frequency_bands import BANDS, bands_by_thirds
from tl_posgen.stats.agreement import spearman
from tl_posgen.stats.intervals import resampled_interval

PARTS = ("position", "content", "energy")
COST_OF_POSITION = "cost_of_position"


def plane_shares(planes: xr.Dataset, layers: Any, by_planes: bool) -> xr.Dataset:
    """Return the shares of the planes of the map, from the measure "planes", first token left out; bands sum planes.

    position_lm is the mean over heads of the covariance of plane m's position part with the whole position part
    (`plane_parts`), divided by its sum over the map; content_lm likewise; energy_lm is the share of E|z|^2 in its
    layer, mean over heads, queries and keys. The unrotated rest of partial rotary heads is not in the map.

    Returns:
        The shares [layer, planes], with planes by number or bands by name, NaN where a layer has fewer planes; and the
        wavelength, of a band the mean wavelength.
    """
    known = planes.sel(layer=layers)
    known = known.isel(plane=np.isfinite(known["wavelength"]).any("layer").values)

    def without(name: str) -> xr.DataArray:
        return known[f"{name}{WITHOUT_FIRST_TOKEN}"]

    variance = without("std") ** 2
    found: Any = {part: (without(f"{part}_by_plane") * without(part) * variance).mean("head") for part in PARTS[:2]}
    found["energy"] = (without("energy_q") + without("energy_k")).mean("head") / 2
    found["wavelength"] = known["wavelength"]
    found = xr.Dataset(found).where(np.isfinite(known["wavelength"])).rename(plane="planes")
    if not by_planes:
        thirds = [bands_by_thirds(int(n)).numpy() for n in found["wavelength"].notnull().sum("planes")]
        masks = np.zeros((len(BANDS), found.sizes["layer"], found.sizes["planes"]), dtype=bool)
        for layer, mask in enumerate(thirds):
            masks[:, layer, : mask.shape[1]] = mask
        bands = [found.where(xr.DataArray(mask, dims=("layer", "planes"))) for mask in masks]
        summed = [one[list(PARTS)].sum("planes").assign(wavelength=one["wavelength"].mean("planes")) for one in bands]
        found = xr.concat(summed, pd.Index(list(BANDS), name="planes"))
    whole = found[list(PARTS[:2])].sum(("layer", "planes"))
    return found.assign({name: found[name] / whole[name] for name in PARTS[:2]}).transpose("layer", "planes")


def cost_of_half(cost: xr.DataArray, share: xr.DataArray) -> tuple[int, float]:
    """Return the least number of cells with half of a share, and their part of the summed cost; NaN without cost.

    Example:
        >>> cost, share = (xr.DataArray([[0.25, 0.75], [0.0, 0.0]]), xr.DataArray([[0.2, 0.6], [0.1, 0.1]]))
        >>> cost_of_half(cost, share)
        (1, 0.75)
    """
    known = share.notnull().values
    costs, shares = cost.transpose(*share.dims).values[known], share.values[known]
    order = np.argsort(-shares)
    n = int(np.searchsorted(shares[order].cumsum(), shares.sum() / 2)) + 1
    return n, float(costs[order[:n]].sum() / costs.sum()) if costs.sum() > 0 else float("nan")


def cost_share_correlations(data: xr.Dataset) -> xr.Dataset:
    """Return Spearman's rho over the map of each cost with each share, and with the cost of shuffled positions.

    `rho_gap` is rho with position less rho with content. Intervals resample the prompts of the costs; shares are fixed.

    Args:
        data: map_rise_each [prompt, map_edit, layer, planes, cost] and the shares [layer, planes].
    """
    cells = data[["map_rise_each", *PARTS]].stack(cell=("layer", "planes"))
    cells = cells.isel(cell=cells[PARTS[0]].notnull().values)
    each = cells["map_rise_each"].transpose("prompt", "map_edit", "cost", "cell").values
    edits = [str(edit) for edit in data["map_edit"].values]
    shares = torch.tensor(np.stack([cells[part].values for part in PARTS]))
    at = edits.index("shuffle_positions") if "shuffle_positions" in edits else None

    def rho_and_gap(
        means: Float[np.ndarray, "some map_edit cost cell"],
    ) -> Float[np.ndarray, "some map_edit cost share_and_gap"]:
        costs = torch.tensor(means)
        found = [spearman(costs, share.expand_as(costs)) for share in shares]
        if at is not None:
            found.append(spearman(costs, costs[:, at, 0][:, None, None].expand_as(costs)))
            found[-1][:, at, 0] = torch.nan  # the correlation of positions' cost with itself
        return torch.stack([*found, found[0] - found[1]], -1).numpy()

    dims, names = ("map_edit", "cost", "share"), [*PARTS, *([] if at is None else [COST_OF_POSITION])]
    found: dict[str, Any] = {"n_cells": each.shape[-1]}
    for end, column in zip(ENDS, resampled_interval(each, rho_and_gap, (-2.0, 2.0)), strict=True):
        rho, gap = column[..., :-1].clip(-1, 1), column[..., -1]
        found |= {f"rho{end}": (dims, rho), f"rho_gap{end}": (dims[:2], gap)}
    return xr.Dataset(found, {**{dim: data[dim] for dim in dims[:2]}, "share": names})
