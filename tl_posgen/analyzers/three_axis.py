"""Analyzer of the three-axis fit: how far each head's scores are position + query + key."""

import torch
import xarray as xr

from tl_posgen.analyzers.collect import HeadRows
from tl_posgen.maths.bootstrap import bootstrap_interval
from tl_posgen.maths.three_axis import Gauge, ThreeAxisFit, fit_three_axis, pooled_r
from tl_posgen.maths.triangle_moments import TriangleMoments, triangle_moments, triangle_moments_from_scores
from tl_posgen.models.capture import LayerCapture

CURVES = {"a": "distance", "b": "query", "c": "key"}


class ThreeAxis:
    r"""W_ij ~ a_{i-j} + b_i + c_j: correlation r of every head's scores with the best such sum, over visible pairs.

    Per head: `r`, `r_no_first` (first token left out as query and key), `r_visible` (within rows: what softmax can
    see), `r_visible_no_first`, `r_squared`, and the 95 % bootstrap interval `r_low`, `r_high` over prompts (NaN for a
    single prompt); each the mean over prompts. Also `r_per_prompt`, `r_layer` (mean over the layer's heads), `r_mean`,
    `r_pooled` (one correlation over the entries of all heads and prompts), the curves a, b, c with the number of pairs
    behind each entry of a, and the attribute `r_iid`: the r that iid Gaussian scores reach on the last prompt.

    Args:
        ridge: penalty on a, b and c, in pairs.
        gauge: which constraint fixes levels and slope of a, b, c; see `maths.three_axis.fit_three_axis`.
        diagonal: whether a query paired with its own key counts.
        seed: of the bootstrap.

    Source: three axes: Han & Ji 2025 (arXiv 2503.13305), who report .959 for an estimator that is not public; the
    exact fit, r within rows and the nulls are ours.

    Example:
        >>> import tl_posgen
        >>> analyzer = tl_posgen.ThreeAxis(gauge="flat_distance")
        >>> report = tl_posgen.analyze("mini", "Down, down, down.", analyzers=[analyzer], null_seed=None)
        >>> report["three_axis"].dataset.attrs["gauge"]
        'flat_distance'
    """

    name: str = "three_axis"
    needs: frozenset[str] = frozenset()

    def __init__(self, *, ridge: float = 0.0, gauge: Gauge = "flat_keys", diagonal: bool = True, seed: int = 0):
        self.gauge: Gauge = gauge
        self.ridge, self.diagonal, self.seed = ridge, diagonal, seed
        self._rows = HeadRows()

    def update(self, capture: LayerCapture) -> None:
        full, rest = fit_capture(capture, ridge=self.ridge, gauge=self.gauge, diagonal=self.diagonal)
        self._rows.add(capture, r=full.r, r_visible=full.r_visible, tss=full.tss, a=full.a, b=full.b, c=full.c)
        self._rows.add(capture, n_distance=full.n_distance.expand_as(full.a))
        self._r_iid = full.null_r
        if rest is None:
            unknown = torch.full_like(full.r, torch.nan)
            self._rows.add(capture, rest=unknown, rest_visible=unknown, rest_tss=full.tss)
        else:
            self._rows.add(capture, rest=rest.r, rest_visible=rest.r_visible, rest_tss=rest.tss)

    def result(self) -> xr.Dataset:
        rows = self._rows
        r, rest = rows.array("r"), rows.array("rest")
        low, high = bootstrap_interval(r.values, seed=self.seed)
        data = {
            "r": r.mean("prompt"),
            "r_no_first": rest.mean("prompt"),
            "r_visible": rows.array("r_visible").mean("prompt"),
            "r_visible_no_first": rows.array("rest_visible").mean("prompt"),
            "r_squared": (r**2).mean("prompt"),
            "r_low": (("layer", "head"), low),
            "r_high": (("layer", "head"), high),
            "r_per_prompt": r,
            "r_layer": r.mean(("prompt", "head")),
            "r_layer_no_first": rest.mean(("prompt", "head")),
            "r_mean": r.mean(),
            "r_pooled": pooled(r, rows.array("tss")),
            "r_pooled_no_first": pooled(rest, rows.array("rest_tss")),
            "n_distance": rows.array("n_distance", "distance").sum("prompt").isel(head=0, drop=True),
        }
        data |= {name: rows.array(name, dim).mean("prompt") for name, dim in CURVES.items()}
        attrs = {"gauge": self.gauge, "ridge": self.ridge, "diagonal": str(self.diagonal), "r_iid": self._r_iid}
        return xr.Dataset(data, attrs=attrs)


def fit_capture(
    capture: LayerCapture, *, ridge: float = 0.0, gauge: Gauge = "flat_keys", diagonal: bool = True
) -> tuple[ThreeAxisFit, ThreeAxisFit | None]:
    """The fits with and without the first token; from q and k where the score is bilinear, else from the scores."""
    moments = moments_of(capture, diagonal=diagonal)
    without = moments.without_first_token
    full = fit_three_axis(moments, ridge=ridge, gauge=gauge)
    return full, None if without is None else fit_three_axis(without, ridge=ridge, gauge=gauge)


def moments_of(capture: LayerCapture, *, diagonal: bool = True) -> TriangleMoments:
    geometry = capture.geometry
    options = {"window": geometry.window, "diagonal": diagonal}
    if geometry.bilinear:
        return triangle_moments(capture.rotated_q, capture.rotated_k, geometry.scale, **options)
    return triangle_moments_from_scores(capture.scores(), **options)


def pooled(r: xr.DataArray, tss: xr.DataArray) -> float:
    """One correlation over the entries of all heads and prompts, see `maths.three_axis.pooled_r`."""
    return pooled_r(torch.from_numpy(r.values), torch.from_numpy(tss.values))
