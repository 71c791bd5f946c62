"""Scores with every pair at a chosen distance: their means, the key part fitted to them again, and tables of heads."""

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int, Real
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.model import Model
from tl_posgen.models.selection import head_name
from tl_posgen.position.decomposition.layer_fits import fit_capture, fits_of
from tl_posgen.position.decomposition.numbers.pair_moments import PairMoments, pair_moments, pair_moments_from_scores
from tl_posgen.position.decomposition.numbers.three_axis_fit import ThreeAxisFit
from tl_posgen.position.distance.hooks import scores_at_distance
from tl_posgen.position.distance.numbers.distance_table import distance_table
from tl_posgen.report.head_figures import thinned
from tl_posgen.rope.planes import mean_curves
from tl_posgen.rope.rotation import complex_planes, rotate
from tl_posgen.rope.scores_at import unturned
from tl_posgen.stats.agreement import pearson

TABLE = ("example", "query_shown", "table_distance", "key")
TABLE_LABELS = {"example": ("most", "least"), "query_shown": ("last query", "mean over queries")}


def curve_under_intervention(capture: LayerCapture) -> Float[Tensor, "head distance"]:
    """mean_{j <= i} scale <R_d q_i, R_0 k_j> - slope d for d = 0 .. n - 1, from one product of cumulative sums."""
    geometry = capture.geometry
    zq, zk = (complex_planes(double(x), geometry.rope) for x in (capture.q, capture.k))
    n = zq.shape[1]
    pairs = (zq * zk.cumsum(1).conj()).sum(1) / (n * (n + 1) / 2)
    curve = geometry.scale * mean_curves(pairs, geometry.rope, n, capture.q.shape[-1])
    if geometry.alibi_slopes is not None:
        curve = curve - geometry.alibi_slopes.to(curve)[list(capture.heads), None] * capture.positions
    return curve


def refit_r(capture: LayerCapture, distances: Real[Tensor, " distance"]) -> Float[Tensor, "tokens=2 head distance"]:
    """corr_j(c, c') of the key parts of two three-axis fits: at the true distances, and with every pair at d0.

    With the first token and without it; NaN where a fit has as many parameters as pairs.
    """
    again = zip(*(fits_of(moments_at(capture, float(d0))) for d0 in distances), strict=True)
    both = zip(capture.once(fit_capture), again, strict=True)
    return torch.stack([torch.stack([same_key_part(fit, one) for one in refits], -1) for fit, refits in both])


def moments_at(capture: LayerCapture, distance: float) -> PairMoments:
    """Return pair moments of the layer's scores with every pair at one distance; bilinear scores need no matrix."""
    geometry = capture.geometry
    if not capture.bilinear:
        return pair_moments_from_scores(scores_at_distance(capture, distance, None), window=geometry.window)
    every = torch.full_like(capture.positions, distance, dtype=DOUBLE)
    turned = rotate(capture.q, every, geometry.rope)
    return pair_moments(turned, unturned(capture.k, geometry.rope), geometry.scale, window=geometry.window)


def same_key_part(one: ThreeAxisFit | None, other: ThreeAxisFit | None) -> Float[Tensor, " head"]:
    """corr over keys of c without its mean and its linear trend, which does not depend on the gauge of the fits. Ours.

    No data determine the trend of c: a_d + t d, b_i - t i, c_j + t j is the same fit for every t. In the gauge
    "flat_keys" c has neither mean nor trend, so its plain correlation is the one wanted.
    """
    assert one is not None, "prompts have two tokens at least, so one is left"
    assert other is not None
    if one.pairs.saturated:
        return torch.full_like(one.r, torch.nan)
    keys = slice(one.pairs.first_key, None)
    return pearson(one.c[:, keys], other.c[:, keys])


def table_examples(model: Model, tokens: Int[Tensor, " pos"], key_part_r: xr.DataArray, n_distances: int) -> xr.Dataset:
    """Return M_dj of one prompt, for the heads of highest and lowest `key_part_r`: of the last query, and mean over
    queries.

    M is linear in the query, so the mean over queries is the table of the mean query. Of the distances that the
    table's numbers are of, a choice is kept: all the short ones, ever fewer of the long. NaN for heads without an r.
    """
    ranked = key_part_r.to_series().dropna().sort_values()
    picks = [(int(layer), int(head)) for layer, head in dict.fromkeys([*ranked.index[-1:], *ranked.index[:1]])]
    every = xr.Dataset(coords={"distance": np.arange(min(len(tokens), n_distances))})
    distances = thinned(every, share=1.0)["distance"].values
    found: dict[tuple[int, int], np.ndarray] = {}

    def add_tables(layer: LayerCapture) -> None:
        geometry, q, k = layer.geometry, double(layer.q), double(layer.k)
        at = torch.tensor(distances, device=q.device)
        both = torch.stack(
            [distance_table(one, k, geometry.rope, geometry.scale, at) for one in (q[:, -1], q.mean(1))], 1
        )
        hidden = at >= (geometry.window or torch.inf)  # the table's statistics are over distances in the window
        tables_of_layer = both.masked_fill(hidden[:, None], torch.nan).float().cpu().numpy()
        found.update(zip([(layer.layer, head) for head in layer.heads], tables_of_layer, strict=True))

    if picks:
        run_capture(model, tokens[None], add_tables, heads=picks)
    labels = {name: list(one) for name, one in TABLE_LABELS.items()}
    labels["example"] = labels["example"][: key_part_r.size]  # the same of every random init
    tables = np.full((*map(len, labels.values()), len(distances), len(tokens)), np.nan, dtype=np.float32)
    for place, pick in enumerate(picks):
        tables[place] = found[pick]
    names = [head_name(*pick) for pick in picks] + [""] * (len(tables) - len(picks))
    data = {"table": (TABLE, tables), "example_head": ("example", np.array(names, dtype=object))}
    return xr.Dataset(data, {**labels, "table_distance": distances})
