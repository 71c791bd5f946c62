"""Correlation over heads of the sum of plane scores with the interaction share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr

from tl_posgen.core.measure import ENDS, TOKENS
from tl_posgen.core.numbers import Numbers, one_side
from tl_posgen.stats.agreement import fisher_interval, pearson, spearman

WEIGHTS = ("own", "shuffled")


@dataclass(frozen=True)
class HeadCorrelation:
    """Correlation of score_sum with interaction over heads.

    Attributes:
        pearson: r and the ends of Fisher's 95 % interval of independent heads.
        spearman: rho.
        n_heads: that have both numbers: a head that never varies, or has no planes, has none.
    """

    pearson: tuple[float, float, float]
    spearman: float
    n_heads: int


def correlate(sides: Sequence[xr.Dataset]) -> HeadCorrelation:
    """Return the correlation over all heads of these datasets, score_sum and interaction [layer, head] each."""
    columns = [np.stack([side[name].values.ravel() for name in ("score_sum", "interaction")]) for side in sides]
    both = np.concatenate(columns, axis=1)
    x, y = torch.from_numpy(both[:, ~np.isnan(both).any(0)])
    r = pearson(x, y)
    low, high = fisher_interval(r, len(x))
    return HeadCorrelation((float(r), float(low), float(high)), float(spearman(x, y)), len(x))


def correlations(heads: xr.Dataset) -> xr.Dataset:
    """Return the correlations over heads for each kind of weights and choice of tokens.

    Args:
        heads: score_sum and interaction [weights, tokens, layer, head].
    """
    weights = heads["weights"].values
    every = [[correlate([heads.sel(weights=one, tokens=tokens)]) for tokens in TOKENS] for one in weights]
    dims = ("weights", "tokens", "end")
    data: dict[str, Any] = {"pearson": (dims, [[one.pearson for one in row] for row in every])}
    for name in ("spearman", "n_heads"):
        data[name] = (dims[:2], [[float(getattr(one, name)) for one in row] for row in every])
    return xr.Dataset(data, {"weights": weights, "tokens": list(TOKENS), "end": list(ENDS)})


def pooled(own: Numbers, tokens: str) -> HeadCorrelation:
    """Return the correlation over the heads of all kinds of weights, of random inits those of the first; its interval
    means nothing, as a head under three kinds of weights is one head."""
    sides = [own.data.sel(weights=weights) for weights in WEIGHTS]
    sides += [one_side(own.dataset, init).sel(weights=WEIGHTS[0]) for init in own.inits[:1]]
    return correlate([side.sel(tokens=tokens) for side in sides])
