"""Correlation over heads of the sum of plane scores with the interaction share."""

from collections.abc import Sequence

import numpy as np
import torch
import xarray as xr

from tl_posgen.core.measure import ENDS, TOKENS
from tl_posgen.core.numbers import Numbers, one_side
from tl_posgen.stats.agreement import fisher_interval, pearson, spearman

WEIGHTS = ("own", "shuffled")


def correlation(sides: Sequence[xr.Dataset]) -> xr.Dataset:
    """Return pearson [end], with Fisher's interval of independent heads, spearman and n_heads over all heads of these
    datasets; a head that never varies, or has no planes, has no number and is left out."""
    columns = [np.stack([side[name].values.ravel() for name in ("score_sum", "interaction")]) for side in sides]
    both = np.concatenate(columns, axis=1)
    x, y = torch.from_numpy(both[:, ~np.isnan(both).any(0)])
    r = pearson(x, y)
    ends = [float(one) for one in (r, *fisher_interval(r, len(x)))]
    data = {"pearson": ("end", ends), "spearman": float(spearman(x, y)), "n_heads": float(len(x))}
    return xr.Dataset(data, {"end": list(ENDS)})


def correlations(heads: xr.Dataset) -> xr.Dataset:
    """Return the correlations of score_sum and interaction [weights, tokens, layer, head] over layers and heads."""
    weights = heads["weights"].values
    each = [[correlation([heads.sel(weights=one, tokens=tokens)]) for tokens in TOKENS] for one in weights]
    found: xr.Dataset = xr.combine_nested(each, ["weights", "tokens"]).transpose("weights", "tokens", "end")
    return found.assign_coords(weights=weights, tokens=list(TOKENS))


def pooled(own: Numbers, tokens: str) -> xr.Dataset:
    """Return the correlation over the heads of all kinds of weights, of random inits those of the first; its interval
    means nothing, as a head under three kinds of weights is one head."""
    sides = [own.data.sel(weights=weights) for weights in WEIGHTS]
    sides += [one_side(own.dataset, init).sel(weights=WEIGHTS[0]) for init in own.inits[:1]]
    return correlation([side.sel(tokens=tokens) for side in sides])


def r_and_rho(found: xr.Dataset) -> tuple[float, float]:
    """Return Pearson's r and Spearman's rho of a correlation."""
    return float(found["pearson"].sel(end="value")), float(found["spearman"])
