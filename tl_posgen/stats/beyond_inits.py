"""Which correlations of a trained model go beyond those of its random inits."""

from statistics import NormalDist

import numpy as np
from jaxtyping import Bool, Float

FAMILY_LEVEL = 0.05  # correlations expected beyond random init by chance, of all that are looked at together
FEWEST_INITS = 8  # from which on correlations are said to go beyond them
CLOSEST = 0.9999  # a correlation of 1 has no finite z


def beyond_inits(
    r: Float[np.ndarray, " pair"],
    low: Float[np.ndarray, " pair"],
    high: Float[np.ndarray, " pair"],
    inits: Float[np.ndarray, "init pair"],
) -> Bool[np.ndarray, " pair"]:
    r"""|z - mean_s z_s| > c s sqrt(1 + 1/n), z = artanh r: pairs in which a model differs from its n random inits.

    s is the deviation of the pair over inits or, where larger, that of all pairs together; c the normal quantile at
    which FAMILY_LEVEL of all pairs are expected to pass by chance. The interval of r over heads must leave out 0.

    Args:
        r, low, high: of the model, with the ends of the interval.
        inits: r of each random init; with fewer than `FEWEST_INITS` no pair is said to go beyond them.

    Returns:
        For every pair whether it does; False where a correlation is not defined.

    Source: ours; the level divided by the number of pairs: Bonferroni.

    Example:
        >>> inits = np.linspace(-0.1, 0.1, 8)[:, None]
        >>> own = np.array([0.8]), np.array([0.5]), np.array([0.9])
        >>> beyond_inits(*own, inits).tolist(), beyond_inits(*own, inits[1:]).tolist()
        ([True], [False])
    """
    known = np.isfinite(r) & np.isfinite(inits).all(0)
    if len(inits) < FEWEST_INITS or not known.any():
        return np.zeros(len(r), bool)
    z, of_inits = (np.arctanh(np.clip(one, -CLOSEST, CLOSEST)) for one in (r, inits))
    variances = of_inits.var(0, ddof=1)
    deviation = np.sqrt(np.maximum(variances, variances[known].mean()))
    reach = NormalDist().inv_cdf(1 - FAMILY_LEVEL / 2 / known.sum()) * np.sqrt(1 + 1 / len(inits))
    return known & (np.abs(z - of_inits.mean(0)) > reach * deviation) & ((low > 0) | (high < 0))
