"""Mean score by distance with every pair put at that distance, and its comparison with a three-axis fit."""

import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.rope.planes import turning_factors
from tl_posgen.rope.rotation import complex_planes


def curve_under_intervention(capture: LayerCapture) -> Float[Tensor, "head distance"]:
    """mean_{j <= i} scale <R_d q_i, R_0 k_j> - slope d for d = 0 .. n - 1, from one product of cumulative sums."""
    geometry = capture.geometry
    zq, zk = (complex_planes(x.double(), geometry.rope) for x in (capture.q, capture.k))
    n = zq.shape[1]
    pairs = (zq * zk.cumsum(1).conj()).sum(1) / (n * (n + 1) / 2)
    turn = turning_factors(capture.positions, geometry.rope, capture.q.shape[-1])
    curve = geometry.scale * (pairs @ turn.to(pairs).mT).real
    if geometry.alibi_slopes is not None:
        curve = curve - geometry.alibi_slopes.to(curve)[list(capture.heads), None] * capture.positions
    return curve


def curve_comparison(one: xr.DataArray, other: xr.DataArray) -> xr.Dataset:
    """Return the slopes of two curves, and the correlation of the curves after their slopes are removed."""
    t = one["distance"] - one["distance"].mean()
    slopes = [(curve * t).mean("distance") / (t * t).mean("distance") for curve in (one, other)]
    rests = [curve - slope * t for curve, slope in zip((one, other), slopes, strict=True)]
    return xr.Dataset(
        {"slope_intervention": slopes[0], "slope_fit": slopes[1], "curve_r": xr.corr(*rests, dim="distance")}
    )
