"""What tests draw from a seed, and which keys a query sees."""

import torch


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def token_ids(*shape: int, seed: int = 0, low: int = 2, high: int = 60) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def visible(n: int, window: int | None = None) -> torch.Tensor:
    """Which keys a query sees [query, key]."""
    away = torch.arange(n)[:, None] - torch.arange(n)
    return (away >= 0) & (away < (window or n))
