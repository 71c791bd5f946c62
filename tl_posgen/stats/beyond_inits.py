"""Find the correlations of a trained model that go beyond those of its random inits."""

from statistics import NormalDist

import numpy as np
from jaxtyping import Bool, Float

CHANCE = 0.1  # about so many are expected beyond random init by chance, of all that are looked at together
LEVEL = 0.01  # of the quantile: deviations over 8 inits are uncertain, and where they differ fourfold .09 pass, not .01
FEWEST_INITS = 8  # from which on correlations are said to go beyond them
CLOSEST = 0.9999  # a correlation of 1 has no finite z


def beyond_inits(
    r: Float[np.ndarray, " pair"],
    low: Float[np.ndarray, " pair"],
    high: Float[np.ndarray, " pair"],
    inits: Float[np.ndarray, "init pair"],
) -> Bool[np.ndarray, " pair"]:
    r"""sign(z) (z - mean_s z_s) > c s sqrt(1 + 1/n), z = artanh r: pairs that go together as in none of n random inits.

    s is the deviation of the pair over inits or, where larger, that of all pairs together; c the normal quantile at
    which LEVEL of all pairs pass by chance if deviations are known. They are not: up to CHANCE of all pairs do in
    simulations, .15 over heads and none within layers among 24 random inits of the bundled model. The interval of r
    over heads must leave out 0. A pair that goes together less than without training is not among them.

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
    reach = NormalDist().inv_cdf(1 - LEVEL / 2 / known.sum()) * np.sqrt(1 + 1 / len(inits))
    return known & (np.sign(z) * (z - of_inits.mean(0)) > reach * deviation) & ((low > 0) | (high < 0))
