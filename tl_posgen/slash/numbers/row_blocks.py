"""Causal attention in blocks of rows: sums along its diagonals, entropies of its rows."""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import elements_at_once, row_ranges

ROWS = 64  # rows of one block: small, as an R x R corner of it is copied
BLOCK = 2**20  # entries of one block over all its heads: keeps temporaries at a few MiB


def pattern_blocks(n_heads: int, n: int, device: torch.device) -> Iterator[tuple[slice, int, int]]:
    """Yield (heads, start, stop) of every block of an n x n pattern; rows up to stop - 1 see only keys below `stop`."""
    for heads in row_ranges(n_heads, ROWS * n, elements_at_once(device, BLOCK)):
        for start, stop in row_ranges(n, 1, ROWS):
            yield slice(*heads), start, stop


def sums_by_distance(
    rows: Float[Tensor, "head row key"], weights: Float[Tensor, "variant head row"]
) -> Float[Tensor, "variant head key"]:
    """sum_t weights_t rows[t, i - D] with i = K - R + t: the last R rows of a K x K pattern, summed by distance D.

    The first variant's weights apply to all keys, the second's to all but the first token. With a row stride larger by
    one, the block's diagonals become columns; this needs no copy for D < K - R. Only the R x R corner of the first keys
    is copied, because there a row of the view would begin before its row of the block.
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
