"""Shares of each plane of each layer in position, content and energy, and their correlation with the plane's cost."""

from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float

from tl_posgen.core.measure import ENDS
from tl_posgen.rope.frequency_bands import BANDS
from tl_posgen.stats.agreement import spearman
from tl_posgen.stats.intervals import resampled_interval

CARRIED = ("position", "content", "energy")


def plane_shares(planes: xr.Dataset, layers: Any, by_planes: bool) -> xr.Dataset:
    """Return the shares of the planes of the map, from `Planes`, first token left out; bands sum planes.

    position_lm is the mean over heads of the covariance of plane m's position part with the whole position part
    (`plane_parts`), divided by its sum over the map; content_lm likewise; energy_lm is the share of E|z|^2 in its
    layer, mean over heads, queries and keys. The unrotated rest of partial rotary heads is not in the map.

    Returns:
        share [part, layer, planes], with planes by number or bands by name, NaN where a layer has fewer planes; and
        wavelength [layer, planes], of a band the mean wavelength.
    """
    known = planes.sel(layer=layers, tokens="without first", drop=True).rename(plane="planes")
    known = known.isel(planes=np.isfinite(known["wavelength"]).any("layer").values)
    parts = (known["share_by_plane"] * known["share"] * known["std"] ** 2).sel(part=list(CARRIED[:2])).mean("head")
    energy = known["energy"].sum("side").mean("head").expand_dims(part=["energy"]) / 2
    found = xr.Dataset({"share": xr.concat([parts, energy], "part"), "wavelength": known["wavelength"]})
    turning = found["wavelength"] < np.inf
    found = found.where(turning)
    if not by_planes:
        place = xr.DataArray(np.arange(found.sizes["planes"]), dims="planes")
        bands = [found.where(3 * place // turning.sum("planes") == number) for number in range(len(BANDS))]
        summed = [one[["share"]].sum("planes").assign(wavelength=one["wavelength"].mean("planes")) for one in bands]
        found = xr.concat(summed, "planes").assign_coords(planes=list(BANDS))
    whole = found["share"].sum(("layer", "planes"))
    share = found["share"] / whole.where(whole["part"] != "energy", 1)
    return found.assign(share=share).transpose("part", "layer", "planes")


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

    `rho_gap` is rho with position less rho with content. `rho_positions` is there where shuffled positions were mapped.
    Intervals resample the prompts of the costs; shares are fixed.

    Args:
        data: map_rise [map_edit, layer, planes, cost, prompt] and share [part, layer, planes].
    """
    cells = data[["map_rise", "share"]].stack(cell=("layer", "planes"))
    cells = cells.isel(cell=cells["share"].sel(part=CARRIED[0]).notnull().values)
    each = cells["map_rise"].transpose("prompt", "map_edit", "cost", "cell").values
    shares = torch.tensor(cells["share"].sel(part=list(CARRIED)).transpose("part", "cell").values)
    edits = [str(edit) for edit in data["map_edit"].values]
    at = edits.index("shuffle_positions") if "shuffle_positions" in edits else None

    def rho_gap_and_positions(
        means: Float[np.ndarray, "some map_edit cost cell"],
    ) -> Float[np.ndarray, "some map_edit cost found"]:
        costs = torch.tensor(means)
        found = [spearman(costs, share.expand_as(costs)) for share in shares]
        found.append(found[0] - found[1])
        if at is not None:
            found.append(spearman(costs, costs[:, at, 0][:, None, None].expand_as(costs)))
            found[-1][:, at, 0] = torch.nan  # the correlation of positions' cost with itself
        return torch.stack(found, -1).numpy()

    every = np.stack(resampled_interval(each, rho_gap_and_positions, (-2.0, 2.0)), -1)  # [map_edit, cost, found, end]
    n, dims = len(CARRIED), ("map_edit", "cost")
    found: dict[str, Any] = {"rho": ((*dims, "part", "end"), every[:, :, :n].clip(-1, 1))}
    found["rho_gap"] = ((*dims, "end"), every[:, :, n])
    if at is not None:
        found["rho_positions"] = ((*dims, "end"), every[:, :, n + 1].clip(-1, 1))
    coords = {"map_edit": edits, "cost": data["cost"].values, "part": list(CARRIED), "end": list(ENDS)}
    return xr.Dataset(found, coords)
