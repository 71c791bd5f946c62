"""What each plane of each layer carries, and whether what it costs to perturb it goes with that."""

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
    """What the planes of the map carry, from the measure "planes", first token left out; bands are sums of planes.

    position_lm = mean over heads of the covariance of plane m's position part with the whole's (`plane_parts`),
    logits^2, over its sum on the map; content_lm likewise; energy_lm the share of E|z|^2 of its layer, mean over heads,
    queries and keys. The unrotated rest of partial rotary heads is not in the map.

    Returns:
        [layer, planes], planes the numbers of planes or the names of bands; NaN where a layer has fewer planes. Beside
        the shares the wavelength, of a band the mean.
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
    """How few cells of the map carry half of a share, and what part of the summed cost is theirs; NaN of no cost.

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


def correlations(data: xr.Dataset) -> xr.Dataset:
    """Spearman's rho over the map of each cost with each share, and with what shuffled positions cost there.

    Intervals: costs of resampled prompts; the shares stay. `rho_gap`: rho with position less rho with content.

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
            found[-1][:, at, 0] = torch.nan  # with itself
        return torch.stack([*found, found[0] - found[1]], -1).numpy()

    dims, names = ("map_edit", "cost", "share"), [*PARTS, *([] if at is None else [COST_OF_POSITION])]
    found: dict[str, Any] = {"n_cells": each.shape[-1]}
    for end, column in zip(ENDS, resampled_interval(each, rho_and_gap, (-2.0, 2.0)), strict=True):
        rho, gap = column[..., :-1].clip(-1, 1), column[..., -1]
        found |= {f"rho{end}": (dims, rho), f"rho_gap{end}": (dims[:2], gap)}
    return xr.Dataset(found, {**{dim: data[dim] for dim in dims[:2]}, "share": names})
