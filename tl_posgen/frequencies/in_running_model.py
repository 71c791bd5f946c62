"""The forecast against the running model: the rise of the loss head by head, and mean scores on longer prompts."""

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.core.measure import ENDS, HEAD, Variable
from tl_posgen.core.run import Run
from tl_posgen.core.sums import Sums
from tl_posgen.frequencies.forecasts import Conditions, waves_of
from tl_posgen.frequencies.hooks import with_frequencies
from tl_posgen.hooks.replace_scores import HookList, finished, replace_scores
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.selection import select_heads
from tl_posgen.rope.bilinear_sums import sums_along_diagonals
from tl_posgen.rope.planes import mean_curves
from tl_posgen.rope.rotation import rotate
from tl_posgen.stats.rank_correlation import rank_correlation

PREDICTORS = ("distortion", "sd of the change", "sd of scores")  # the last knows no rule
OF_SCORES = {"scores": Variable("", dims=(*HEAD, "distance")), "pairs": Variable("", dims=(*HEAD, "distance"))}


def rises(run: Run, conditions: Conditions) -> xr.DataArray:
    """Return the rise of the loss with one head at a time changed, [change, rule, prompt, layer, head]; 0 unchanged."""
    tokens = torch.stack([row[: conditions.inside] for row in run.rows])
    selected = select_heads(run.model, **run.where)
    run.plan(len(tokens) * (1 + 2 * (len(conditions.rules) - 1) * sum(map(len, selected.values()))))
    changes, (_, *rules) = ("rule", "random"), conditions.rules
    edits = [f"{change} {rule}" for change in changes for rule in rules]

    def hooks_of(layer: int, head: int) -> dict[str, HookList]:
        own = run.wrapped.layer(layer).geometry.rope
        if not own.rotary_dim:
            return {}
        changed, heads = conditions.changed(own), [(layer, head)]
        ropes = zip(edits, [*changed[1:], *conditions.elsewhere(own, changed)[1:]], strict=True)
        return {edit: with_frequencies(run.model, lambda _, rope=rope: rope, heads=heads) for edit, rope in ropes}

    found = run.rises_of_heads(tokens, selected, edits, hooks_of)
    values = found.values.reshape(len(changes), len(rules), *found.shape[1:])
    values = np.concatenate([0 * values[:, :1], values], 1)  # the model's own frequencies first
    labels = {"change": list(changes), "rule": list(conditions.rules), **{dim: found[dim].values for dim in HEAD}}
    return xr.DataArray(values, labels, ("change", "rule", "prompt", *HEAD))


def rank_correlations(distortion: xr.DataArray, sd: xr.DataArray, rise: xr.DataArray) -> xr.DataArray:
    """Return Spearman's rho over heads of the mean rise and each of `PREDICTORS`, with its interval."""
    rise = rise.mean("prompt")
    predictors = dict(zip(PREDICTORS, (distortion, distortion * sd, sd), strict=True))
    alike = xr.broadcast(*predictors.values(), rise)
    *x, y = (torch.from_numpy(one.transpose("change", "rule", *HEAD).values.copy()).flatten(2) for one in alike)
    found = np.full((len(x), *y.shape[:2], len(ENDS)), np.nan)
    for place in np.ndindex(*found.shape[:3]):
        found[place] = rank_correlation(x[place[0]][place[1:]], y[place[1:]]).ends
    labels = {"predictor": list(PREDICTORS), "change": alike[-1]["change"].values, "rule": alike[-1]["rule"].values}
    return xr.DataArray(found, {**labels, "end": list(ENDS)}, ("predictor", "change", "rule", "end"))


def beyond(run: Run, data: xr.Dataset, conditions: Conditions) -> xr.DataArray:
    """Return how far mean scores at each distance are from the forecast, [rule, segment, layer, head], in sd of scores.

    Every prompt runs whole under each rule in all chosen heads at once.
    """
    run.plan(len(run.rows) * len(conditions.rules))
    found = [errors_of(run, data, conditions, place) for place in range(len(conditions.rules))]
    return xr.concat(found, "rule").assign_coords(rule=list(conditions.rules))


def errors_of(run: Run, data: xr.Dataset, conditions: Conditions, place: int) -> xr.DataArray:
    """Return the errors under one rule, [segment, layer, head]."""
    sums = mean_scores(run, conditions, place)
    scores, pairs = sums.sum("scores"), sums.sum("pairs")
    whole = xr.full_like(data["sd"], np.nan).expand_dims(segment=["inside", "beyond"]).copy()
    for layer in scores["layer"].values.tolist():
        geometry = run.wrapped.layer(layer).geometry
        rope, here = conditions.changed(geometry.rope)[place], data.sel(layer=layer)
        counts = torch.from_numpy(pairs.sel(layer=layer).values).nan_to_num(0)
        measured = torch.from_numpy(scores.sel(layer=layer).values) / counts
        forecast = mean_curves(waves_of(here, geometry), rope, counts.shape[-1], geometry.d_head)
        off = (measured - forecast).masked_fill(counts == 0, 0)
        off = off - (off * counts).sum(-1, keepdim=True) / counts.sum(-1, keepdim=True)
        for segment, part in enumerate((slice(conditions.inside), slice(conditions.inside, None))):
            square = (off.square() * counts)[:, part].sum(-1) / counts[:, part].sum(-1)
            whole[segment].loc[{"layer": layer}] = square.sqrt().numpy() / here["sd"].values
    return whole


def mean_scores(run: Run, conditions: Conditions, place: int) -> Sums:
    """Return sums of scores by distance, and of pairs, under one rule in all chosen heads; the first token left out."""
    sums = Sums(OF_SCORES)
    for number, row in enumerate(run.rows):

        def scores_of(capture: LayerCapture, number: int = number) -> Float[Tensor, "head query key"]:
            rope = conditions.changed(capture.geometry.rope)[place]
            q, k = (rotate(x, capture.positions, rope) for x in (capture.q, capture.k))
            scores = capture.geometry.scale * q @ k.mT
            seen = capture.geometry.visible(capture.length, capture.device)[1:, 1:]
            capture.prompt = number
            by_distance = sums_along_diagonals(double(scores[:, 1:, 1:]) * double(seen))
            pairs = sums_along_diagonals(double(seen)[None]).expand(len(by_distance), -1)
            sums.add_layer(capture, {"scores": by_distance, "pairs": pairs})
            return finished(scores, capture)

        run.losses(row[None], replace_scores(run.model, scores_of, **run.where))
    return sums
