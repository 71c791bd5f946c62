"""Slash heads of a model whose bands are ablated: which were dominant before, how many still are, their mean score."""

import xarray as xr

from tl_posgen.core.measure import HEAD

UNCHANGED = "unchanged"


def heads_before(data: xr.Dataset) -> xr.DataArray:
    """Return which heads are slash-dominant in the unchanged model; all where none is."""
    dominant = data["dominant"].sel(condition=UNCHANGED, drop=True).astype(bool).any("short_distance")
    return dominant | ~dominant.any(HEAD)


def mean_of_slash_heads(data: xr.Dataset, name: str = "score") -> xr.DataArray:
    """Return the mean of a slash score over the heads that were dominant before (all where none was)."""
    return data[name].where(heads_before(data)).mean(HEAD)


def n_slash_heads(data: xr.Dataset) -> xr.DataArray:
    """Return how many heads are dominant at one of the distances."""
    return data["dominant"].astype(bool).any("short_distance").sum(HEAD)


def n_slash_heads_kept(data: xr.Dataset) -> xr.DataArray:
    """Return how many heads are dominant at a distance where they were before."""
    dominant = data["dominant"].astype(bool)
    return (dominant & dominant.sel(condition=UNCHANGED, drop=True)).any("short_distance").sum(HEAD)
