"""How sure a number is that is not a mean over prompts: what it becomes when some of the prompts are left out."""

import numpy as np
from jaxtyping import Float

from tl_posgen.errors import InputError

T_975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)  # of Student's t, 1 to 9 degrees
MOST_GROUPS = 1 + len(T_975)


def jackknife_interval(
    whole: Float[np.ndarray, "*measure"] | float,
    left_out: Float[np.ndarray, "group *measure"],
    share: Float[np.ndarray, " group"],
) -> tuple[Float[np.ndarray, "*measure"], Float[np.ndarray, "*measure"]]:
    r"""theta -+ t_{.975, G - 1} s, s^2 = 1/G sum_g (p_g - mean_J)^2 / (h_g - 1): the delete-a-group jackknife.

    theta is the estimate of all prompts, theta_g that without group g, h_g = 1 / share_g,
    p_g = h_g theta - (h_g - 1) theta_g and mean_J = G theta - sum_g (1 - 1/h_g) theta_g. Of groups of one prompt each
    and a mean over prompts that is Student's interval. For smooth functions of what is summed over prompts (shares,
    correlations); not for counts, and not for where something is largest.

    Args:
        whole: estimates.
        left_out: the same without each group, 2 to 10 groups.
        share: of the prompts that are in each group, above 0, summing to 1.

    Returns:
        Lower and upper end; NaN where an estimate is.

    Raises:
        InputError: fewer than 2 groups or more than 10, or shares that are none.

    Source: Quenouille 1956, Tukey 1958; groups of unequal size: Busing, Meijer & van der Leeden 1999.

    Example:
        >>> prompts = np.array([0.90, 0.92, 0.91, 0.95])
        >>> left_out = np.array([np.delete(prompts, g).mean() for g in range(4)])
        >>> low, high = jackknife_interval(prompts.mean(), left_out, np.full(4, 0.25))
        >>> round(float(low), 4), round(float(high), 4)  # .92 -+ 3.182 * .0216 / 2
        (0.8856, 0.9544)
    """
    n = len(left_out)
    if not 2 <= n <= MOST_GROUPS or len(share) != n:
        raise InputError(f"jackknife: {n} groups and {len(share)} shares; give 2 to {MOST_GROUPS} groups, a share each")
    if not (share > 0).all() or abs(share.sum() - 1) > 1e-9:
        raise InputError(f"jackknife: shares {share.tolist()} of the prompts; they are above 0 and sum to 1")
    h = (1 / share).reshape(n, *(1 for _ in np.shape(whole)))
    mean = n * whole - ((1 - 1 / h) * left_out).sum(0)
    pseudo_values = h * whole - (h - 1) * left_out
    half = T_975[n - 2] * np.sqrt(((pseudo_values - mean) ** 2 / (h - 1)).mean(0))
    return np.asarray(whole - half), np.asarray(whole + half)
