"""The mean score by distance with every pair put at it, and the slopes of curves."""

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


def slope_of(curve: xr.DataArray) -> xr.DataArray:
    """Return the least-squares slope of a curve over distances."""
    t = curve["distance"] - curve["distance"].mean()
    return (curve * t).mean("distance") / (t * t).mean("distance")


def without_slope(curve: xr.DataArray) -> xr.DataArray:
    """Return what is left of a curve without its slope."""
    return curve - slope_of(curve) * (curve["distance"] - curve["distance"].mean())
