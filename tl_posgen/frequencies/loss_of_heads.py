"""The forecast against the loss: its rise with one head at a time changed, and how well forecasts order heads by it."""

import numpy as np
import torch
import xarray as xr

from tl_posgen.core.measure import ENDS, HEAD
from tl_posgen.core.run import Run
from tl_posgen.frequencies.forecasts import Conditions
from tl_posgen.frequencies.hooks import with_frequencies
from tl_posgen.hooks.replace_scores import HookList
from tl_posgen.models.selection import select_heads
from tl_posgen.stats.rank_correlation import rank_correlation

PREDICTORS = ("distortion", "sd of the change", "sd of scores")  # the last knows no rule


def rises(run: Run, conditions: Conditions) -> xr.DataArray:
    """Return the rise of the loss with one head at a time changed, [change, rule, prompt, layer, head]; 0 unchanged."""
    tokens = torch.stack([row[: conditions.inside] for row in run.rows])
    selected = select_heads(run.model, **run.where)
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
