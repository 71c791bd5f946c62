"""The forecast against mean scores of longer prompts, which run at other frequencies."""

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.core.measure import HEAD, Variable
from tl_posgen.core.run import Run
from tl_posgen.core.sums import Sums
from tl_posgen.frequencies.forecasts import Conditions, waves_of
from tl_posgen.hooks.replace_scores import RowByRow, finished, replace_scores
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.rope.bilinear_sums import sums_over_band
from tl_posgen.rope.planes import mean_curves
from tl_posgen.rope.rotation import rotate

QUERIES = ("inside", "beyond")  # by their position, against the number of tokens that `inside` is
SEGMENTS = (*QUERIES, "further")  # as beyond, at distances that no query inside has
OF_SCORES = {name: Variable("", dims=(*HEAD, "queries", "distance")) for name in ("scores", "pairs")}


def beyond(run: Run, data: xr.Dataset, conditions: Conditions) -> xr.DataArray:
    """Return how far mean scores at each distance are from the forecast, [rule, segment, layer, head], in sd of scores.

    Every prompt runs whole under each rule in all chosen heads at once.
    """
    found = [errors_of(run, data, conditions, place) for place in range(len(conditions.rules))]
    return xr.concat(found, "rule").assign_coords(rule=list(conditions.rules))


def errors_of(run: Run, data: xr.Dataset, conditions: Conditions, place: int) -> xr.DataArray:
    """Return the errors under one rule, [segment, layer, head]."""
    sums = mean_scores(run, conditions, place)
    scores, pairs = sums.sum("scores"), sums.sum("pairs")
    whole = xr.full_like(data["sd"], np.nan).expand_dims(segment=list(SEGMENTS)).copy()
    for layer in scores["layer"].values.tolist():
        geometry = run.wrapped.layer(layer).geometry
        rope, here = conditions.changed(geometry.rope)[place], data.sel(layer=layer)
        counts = torch.from_numpy(pairs.sel(layer=layer).values).nan_to_num(0)
        forecast = mean_curves(waves_of(here, geometry), rope, counts.shape[-1], geometry.d_head)
        found = segment_errors(torch.from_numpy(scores.sel(layer=layer).values), counts, forecast)
        whole.loc[{"layer": layer}] = found.mT.numpy() / here["sd"].values
    return whole


def segment_errors(
    scores: Float[Tensor, "head queries=2 distance"],
    counts: Float[Tensor, "head queries=2 distance"],
    forecast: Float[Tensor, "head distance"],
) -> Float[Tensor, "head segment=3"]:
    """sqrt(sum_d n_d (mean_d - forecast_d - c)^2 / sum_d n_d) of each of `SEGMENTS`, NaN without pairs.

    c, which softmax does not see, is the mean over all pairs of the queries inside, or of those beyond. Of inside and
    beyond n_d is the number of pairs of the queries inside, so that they compare the same distances alike; of further
    it is that of the queries beyond.

    Args:
        scores: sums over the pairs at each distance.
        counts: their numbers.
    """
    off = (scores / counts - forecast[:, None]).masked_fill(counts == 0, 0)
    off = off - (off * counts).sum(-1, keepdim=True) / counts.sum(-1, keepdim=True)
    near, far = counts.unbind(1)
    weights = torch.stack([near, near, far.where(near == 0, 0)], 1)  # queries beyond have all distances of those inside
    squares = off[:, [0, 1, 1]].square()
    return ((squares * weights).sum(-1) / weights.sum(-1)).sqrt()


def mean_scores(run: Run, conditions: Conditions, place: int) -> Sums:
    """Return sums of scores by distance, and numbers of pairs, of queries inside and beyond, under one rule in all
    chosen heads; the first token left out. Beside the pass's own scores no [query, key] matrix is formed."""
    sums = Sums(OF_SCORES)
    for number, row in enumerate(run.rows):
        queries: dict[int, list[Tensor]] = {}

        def scores_of(
            capture: LayerCapture, number: int = number, n: int = len(row), queries: dict = queries
        ) -> Float[Tensor, "head query key"]:
            rope = conditions.changed(capture.geometry.rope)[place]
            q, k = rotate(capture.q, capture.query_positions, rope), rotate(capture.k, capture.positions, rope)
            queries.setdefault(capture.layer, []).append(q)
            if capture.length == n:  # the last block of queries
                whole = capture.geometry.scale * torch.cat(queries.pop(capture.layer), 1)
                capture.prompt = number
                sums.add_layer(capture, by_distance(whole, k, conditions.inside, capture.geometry.window))
            return finished(capture.geometry.scale * q @ k.mT, capture)

        run.losses(row[None], replace_scores(run.model, RowByRow(scores_of), **run.where))
    return sums


def by_distance(
    q: Float[Tensor, "head pos d_head"], k: Float[Tensor, "head pos d_head"], inside: int, window: int | None
) -> dict[str, Tensor]:
    """Return sums of <q_i, k_j> by distance i - j, and numbers of pairs, [head, queries, distance], of the queries at
    positions below `inside` and of the others; the first token left out.

    Args:
        window: distances below it count; None for all.
    """
    q, k = double(q[:, 1:]), double(k[:, 1:])
    n, short = q.shape[1], min(inside, q.shape[1] + 1) - 1
    width, distance = min(window or n, n), torch.arange(n, device=q.device)
    sums, pairs = q.new_zeros(2, len(q), n), q.new_zeros(2, n)
    for row, size in enumerate((short, n) if n else ()):
        sums[row, :, :size] = sums_over_band(q[:, :size], k[:, :size], min(width, size))[0]
        pairs[row] = (size - distance).clamp(0).where(distance < width, 0)
    sums[1] -= sums[0]
    pairs[1] -= pairs[0]
    return {"scores": sums.transpose(0, 1), "pairs": pairs.expand(len(q), -1, -1)}
