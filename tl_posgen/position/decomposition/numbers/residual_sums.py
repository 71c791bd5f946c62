"""Residual of a three-axis fit to a head's scores: its energy, and its entries among the first tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import double, query_ranges
from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.numbers.pair_moments import causal_rows, pair_moments_from_rows
from tl_posgen.position.decomposition.numbers.three_axis_fit import ThreeAxisFit, fit_three_axis
from tl_posgen.rope.bilinear_sums import along_diagonals


@dataclass(frozen=True)
class ResidualSums:
    """Sums over the pairs that count of the residual e_ij = W_ij - a_{i-j} - b_i - c_j of a fit, float64.

    Attributes:
        energy: sum of e^2.
        within: sum of squares of W less its row means over the keys that count.
        squares: sum of W^2.
        corner: e of the first tokens, 0 at pairs that do not count.
    """

    pairs: CausalPairs
    energy: Float[Tensor, " head"]
    within: Float[Tensor, " head"]
    squares: Float[Tensor, " head"]
    corner: Float[Tensor, "head query key"]


def residual_sums(
    rows: Callable[[int, int], Float[Tensor, "head row key"]], fit: ThreeAxisFit, *, crop: int = 0
) -> tuple[ResidualSums, ResidualSums]:
    """Return the sums of what the fit of these scores leaves, and of what one without the first token leaves.

    What the fit leaves is fitted once more, to the scores themselves: sums over q and k round in float32, and e must be
    at right angles to every fit.

    Args:
        rows: (start, stop) -> the scores of queries start .. stop - 1 and keys before `stop`; hidden ones are not read.
        fit: over all tokens.
        crop: number of first tokens in `corner`.

    Example:
        >>> from tl_posgen.position.decomposition.numbers.pair_moments import pair_moments_from_scores
        >>> scores = torch.randn(1, 9, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> fit = fit_three_axis(pair_moments_from_scores(scores))
        >>> sums, _ = residual_sums(lambda start, stop: scores[:, start:stop, :stop], fit)
        >>> torch.allclose(sums.energy / sums.within, 1 - fit.r_within_rows**2)
        True
    """
    n, n_heads = fit.pairs.n_tokens, len(fit.r)
    moments = pair_moments_from_rows(lambda *block: _less(rows(*block), fit), n, window=fit.pairs.window)
    assert moments.without_first_token is not None
    refits = [fit_three_axis(variant) for variant in (moments, moments.without_first_token)]
    energy, within, squares = fit.a.new_zeros(3, len(refits), n_heads)
    corner = fit.a.new_zeros(len(refits), n_heads, *2 * [min(crop, n)])
    for start, stop in query_ranges(n_heads, n, fit.a.device):
        block, position = double(rows(start, stop)), torch.arange(stop, device=fit.a.device)
        left = _less(block, fit)
        for number, refit in enumerate(refits):
            seen, width = double(refit.pairs.mask(position[start:], position)), refit.pairs.width
            scores, e = causal_rows(block, width) * seen, causal_rows(_less(left, refit), width) * seen
            about_mean = (scores - (scores.sum(-1) / seen.sum(-1).clamp(min=1))[..., None]).mul_(seen)
            for sums, x in ((energy, e), (within, about_mean), (squares, scores)):
                sums[number] += torch.linalg.vecdot(x, x).sum(-1)
            n_corner = corner.shape[-1]
            corner[number, :, start:stop, :stop] = e[:, : max(0, n_corner - start), :n_corner]
    fits_and_sums = zip(refits, energy, within, squares, corner, strict=True)
    all_tokens, without_first = (ResidualSums(refit.pairs, *sums) for refit, *sums in fits_and_sums)
    return all_tokens, without_first


def _less(scores: Float[Tensor, "head row key"], fit: ThreeAxisFit) -> Float[Tensor, "head row key"]:
    """W_ij - a_{i-j} - b_i - c_j, float64, of rows that end with their last key's token; meaningless where j > i."""
    n_rows, n_keys = scores.shape[1:]
    a, b, c = (x[:, :n_keys].nan_to_num() for x in (fit.a, fit.b, fit.c))
    return (double(scores) - along_diagonals(a, n_rows)).sub_(b[:, -n_rows:, None]).sub_(c[:, None])
