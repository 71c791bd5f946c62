"""How uncertain a mean over prompts is."""

import torch
from jaxtyping import Float
from torch import Tensor


def bootstrap_interval(
    values: Float[Tensor, "prompt *rest"], *, level: float = 0.95, n_resamples: int = 2000, seed: int = 0
) -> tuple[Float[Tensor, "*rest"], Float[Tensor, "*rest"]]:
    r"""Percentile bootstrap of the mean over prompts: quantiles (1 - level) / 2 and (1 + level) / 2 of resampled means.

    Args:
        values: one measure per prompt; prompts are drawn with replacement.
        level: coverage.
        n_resamples: number of resampled means.
        seed: of the draws; the global random state is not touched.

    Returns:
        (low, high), float64; NaN where there is one prompt, since one prompt says nothing of others.

    Source: Efron 1979.

    Example:
        >>> low, high = bootstrap_interval(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        >>> bool(1.0 <= low < 2.5 < high <= 4.0)
        True
    """
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1; got {level}")
    n = values.shape[0]
    rest = values[0].double()
    if n < 2:
        return torch.full_like(rest, torch.nan), torch.full_like(rest, torch.nan)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(n, (n_resamples, n), generator=generator)
    counts = torch.zeros(n_resamples, n, dtype=torch.float64).scatter_add_(1, drawn, torch.ones_like(drawn).double())
    means = counts.to(values.device) @ values.double().reshape(n, -1) / n
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64, device=values.device)
    low, high = means.quantile(ends, dim=0).reshape(2, *rest.shape)
    return low, high
