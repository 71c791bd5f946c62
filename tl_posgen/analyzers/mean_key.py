"""Analyzer of the mean-key split: how far each head's scores are f(q, i - j) + g(q, k) at a dummy distance."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from tl_posgen.analyzers.collect import HeadRows
from tl_posgen.maths.mean_key import mean_key_r
from tl_posgen.models.capture import LayerCapture


class MeanKey:
    r"""corr(W, f + g), f_ij = s <R_i q_i, R_j kbar>, g_ij = s <R_d0 q_i, k_j - kbar>, kbar the head's mean key.

    Per head, mean over prompts: `mean_key_r` and `mean_key_r_visible` (within rows) at the headline distance `d0`, the
    same without the first token (`*_no_first`), and `r_by_distance`, `r_visible_by_distance` over all `distances`.
    A soft cap and ALiBi are not part of W here.

    Args:
        d0: the headline dummy distance.
        distances: further dummy distances.

    Source: reconstructed from the public code of the first author of Han & Ji 2025, which uses d0 = 1000.

    Example:
        >>> import tl_posgen
        >>> report = tl_posgen.analyze("mini", "Down, down, down.", analyzers=["mean_key"], null_seed=None)
        >>> report["mean_key"].dataset["d0"].values.tolist()
        [0, 64, 1000]
    """

    name: str = "mean_key"
    needs: frozenset[str] = frozenset()

    def __init__(self, *, d0: int = 1000, distances: Sequence[int] = (0, 64, 1000)):
        self.d0 = d0
        self.distances = sorted({d0, *distances})
        self._rows = HeadRows()

    def update(self, capture: LayerCapture) -> None:
        geometry = capture.geometry
        for first_token, suffix in ((True, ""), (False, "_no_first")):
            fit = mean_key_r(
                capture.q,
                capture.k,
                geometry.rope,
                geometry.scale,
                self.distances,
                window=geometry.window,
                first_token=first_token,
            )
            self._rows.add(capture, **{f"r{suffix}": fit.r.mT, f"r_visible{suffix}": fit.r_visible.mT})

    def result(self) -> xr.Dataset:
        curves = {
            name: self._rows.array(name, "d0").mean("prompt").assign_coords(d0=np.array(self.distances))
            for name in ("r", "r_visible", "r_no_first", "r_visible_no_first")
        }
        data = {f"mean_key_{name}": curve.sel(d0=self.d0, drop=True) for name, curve in curves.items()}
        data |= {"r_by_distance": curves["r"], "r_visible_by_distance": curves["r_visible"]}
        return xr.Dataset(data, attrs={"d0": self.d0})
