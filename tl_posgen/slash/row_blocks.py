"""Causal attention a block of rows at a time: sums along its diagonals, entropies of its rows."""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

ROWS = 64  # rows of one block: the R x R corner that has to be copied stays small beside the block
BLOCK = 2**20  # entries of one block over all its heads: temporaries stay at a few MiB


def row_blocks(n_heads: int, n: int) -> Iterator[tuple[slice, int, int]]:
    """(heads, start, stop) of every block of an n x n pattern; its rows see no key from `stop` on."""
    per_block = max(1, BLOCK // (ROWS * n))
    for head in range(0, n_heads, per_block):
        for start in range(0, n, ROWS):
            yield slice(head, head + per_block), start, min(start + ROWS, n)


def sums_by_distance(
    rows: Float[Tensor, "head row key"], weights: Float[Tensor, "variant head row"]
) -> Float[Tensor, "variant head key"]:
    """sum_t weights_t rows[t, i - D] with i = K - R + t: the last R rows of a K x K pattern, summed by distance D.

    The first variant's weights go over all keys, the second's over all but the first token. Read with a row stride
    one larger than it is, the block shows a diagonal as a column; this holds without a copy for D < K - R. Only the
    R x R corner of the first keys is copied: there a row of the view would run over the start of its row.
    """
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    n_heads, n_rows, n_keys = rows.shape
    start = n_keys - n_rows
    near = rows.as_strided(
        (n_heads, n_rows, start), (rows.stride(0), rows.stride(1) + 1, 1), rows.storage_offset() + (start > 0)
    )
    corner = torch.nn.functional.pad(rows[..., 1:n_rows].tril(-1), (n_rows + 1, 0))
    far = corner.as_strided((n_heads, n_rows, n_rows), (corner.stride(0), corner.stride(1) + 1, 1), 1)
    by_head = weights.transpose(0, 1)
    sums = torch.cat([(by_head @ near).flip(-1), (by_head @ far).flip(-1)], dim=-1).transpose(0, 1)
    sums[0, :, start:] += weights[0] * rows[..., 0]
    return sums


def row_entropies(
    rows: Float[Tensor, "head row key"], rest: Float[Tensor, "head row"]
) -> Float[Tensor, "variant head row"]:
    """H = -sum_j p_j log p_j of each row, and of p / rest over j >= 1: (H + p_0 log p_0) / rest + log rest."""
    tiny = torch.finfo(rows.dtype).tiny
    terms = rows.clamp_min(tiny).log_().mul_(rows)
    without_first_token = torch.where(rest > tiny, -terms[..., 1:].sum(-1) / rest + rest.clamp_min(tiny).log(), 0.0)
    return torch.stack([-terms.sum(-1), without_first_token])
