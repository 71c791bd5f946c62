"""A full table's least-squares additive fit, in the open: what closed forms are tested against."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AdditiveFit:
    """table_dj ~ mean + rows_d + columns_j; r its correlation with the table, interaction_share = 1 - r^2."""

    mean: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    r: torch.Tensor
    interaction_share: torch.Tensor


def additive_fit(table: torch.Tensor) -> AdditiveFit:
    table = table.double()
    mean = table.mean((-2, -1))
    rows, columns = table.mean(-1) - mean[..., None], table.mean(-2) - mean[..., None]
    centred = table - mean[..., None, None]
    left = centred - rows[..., :, None] - columns[..., None, :]
    share = left.square().mean((-2, -1)) / centred.square().mean((-2, -1))
    return AdditiveFit(mean, rows, columns, (1 - share).clamp(min=0).sqrt(), share)
