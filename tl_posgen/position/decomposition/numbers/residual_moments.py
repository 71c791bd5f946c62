"""Residual of a three-axis fit to a head's scores: its energy by distance, by plane and by token pair."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.position.decomposition.numbers.pair_moments import causal_rows
from tl_posgen.position.decomposition.numbers.three_axis_fit import ThreeAxisFit
from tl_posgen.position.decomposition.numbers.token_pairs import TokenSums
from tl_posgen.rope.bilinear_sums import along_diagonals, sums_along_diagonals
from tl_posgen.rope.rotation import Rope, complex_planes


class PlaneParts:
    """Rotated q and k by plane, float64: the real part of every plane, then the imaginary parts.

    W_m, the part of the score in plane m, is scale Re(z^q_m conj(z^k_m)); `complex_planes` defines the planes of the
    unrotated remainder.
    """

    def __init__(
        self,
        rotated_q: Float[Tensor, "head query d_head"],
        rotated_k: Float[Tensor, "head key d_head"],
        rope: Rope,
        scale: float,
    ):
        planes = (complex_planes(double(x), rope) for x in (rotated_q, rotated_k))
        self.q, self.k = (torch.cat([z.real, z.imag], -1) for z in planes)
        self.scale = scale

    def products(self, e: Float[Tensor, "head row key"]) -> Float[Tensor, "head plane_and_rest"]:
        r"""<W_m, e>: the sum of W_m e over pairs, e 0 where none counts; its last row and key are one token.

        Divided by <e, e> they add up to 1 if e is the residual of a least-squares fit to W = sum_m W_m. The fit is
        linear, so e = sum_m e_m with e_m the residual of plane m alone, and <e_m, e> = <W_m, e> because e is orthogonal
        to every fit: the planes' shares need no fit per plane. A negative product means that the plane opposes e.
        """
        rows, keys = e.shape[1:]
        products = self.q[:, keys - rows : keys] * (e @ self.k[:, :keys])
        return self.scale * products.sum(1).unflatten(-1, (2, -1)).sum(1)


def less_fit(
    scores: Float[Tensor, "head row key"],
    a: Float[Tensor, "head pos"],
    b: Float[Tensor, "head pos"],
    c: Float[Tensor, "head pos"],
) -> Float[Tensor, "head row key"]:
    """W_ij - a_{i-j} - b_i - c_j, float64, of rows that end with their last key's token; meaningless where j > i."""
    rows, keys = scores.shape[1:]
    e = double(scores) - along_diagonals(a[:, :keys], rows)
    return e.sub_(b[:, keys - rows : keys, None]).sub_(c[:, None, :keys])


class ResidualSums:
    r"""Sums over pairs of the residual e_ij = W_ij - a_{i-j} - b_i - c_j of a fit, float64, from blocks of rows of W.

    Args:
        fit: the fit with a, b and c.
        planes: q and k by plane, if scores are a sum over planes.
        tokens: token ids, if known.
        crop, crop_within: numbers of first tokens in `corner` and in `within_corner`.

    Attributes:
        energy_at, abs_at: sums of e^2 and of |e| at each distance.
        energy: sum of e^2. squares: sum of W^2.
        within: sum of squares of W less its row means over the keys that count.
        in_planes, within_planes: <W_m, e> and <W_m, W less its row means>, see `PlaneParts`.
        corner, within_corner: e, and W less its row means, of the first tokens.
        tokens: sums of e by token pair; None without ids.
        n_distance: pairs at each distance.

    Example:
        >>> from tl_posgen.position.decomposition.numbers.pair_moments import pair_moments_from_scores
        >>> from tl_posgen.position.decomposition.numbers.three_axis_fit import fit_three_axis
        >>> scores = torch.randn(1, 9, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> fit = fit_three_axis(pair_moments_from_scores(scores))
        >>> sums = ResidualSums(fit)
        >>> for start, stop in ((0, 4), (4, 9)):
        ...     sums.add(scores[:, start:stop, :stop])
        >>> torch.allclose(sums.energy / sums.within, 1 - fit.r_within_rows**2)
        True
    """

    def __init__(
        self,
        fit: ThreeAxisFit,
        planes: PlaneParts | None = None,
        tokens: Int[Tensor, " pos"] | None = None,
        *,
        crop: int = 0,
        crop_within: int = 0,
    ):
        self.pairs, self.n_distance, self.planes = fit.pairs, fit.n_distance, planes
        self._a, self._b, self._c = (x.nan_to_num() for x in (fit.a, fit.b, fit.c))
        heads, n = self._a.shape
        self.energy_at, self.abs_at = self._a.new_zeros(2, heads, n)
        self.squares, self.within = self._a.new_zeros(2, heads)
        n_planes = planes.q.shape[-1] // 2 if planes else 0
        self.in_planes, self.within_planes = self._a.new_zeros(2, heads, n_planes)
        self.corner, self.within_corner = (self._a.new_zeros(heads, *2 * [min(c, n)]) for c in (crop, crop_within))
        self.tokens = None if tokens is None else TokenSums(tokens, heads, self._a.device)

    @property
    def energy(self) -> Float[Tensor, " head"]:
        return self.energy_at.sum(-1)

    def add(self, scores: Float[Tensor, "head row key"], rest: Float[Tensor, "head row key"] | None = None) -> None:
        """Add the scores of some rows over the keys up to the last of these rows, and `rest`, what was fitted if that
        is not the scores themselves but these less an additive part; other entries are not read."""
        rows, keys = scores.shape[1:]
        start = keys - rows
        position = torch.arange(keys, device=scores.device)
        seen = double(self.pairs.mask(position[start:], position))
        width = self.pairs.first_distance + self.pairs.width
        scores = causal_rows(double(scores), width).mul_(seen)
        left = scores if rest is None else causal_rows(rest, width)
        e = less_fit(left, self._a, self._b, self._c).mul_(seen)
        within = (scores - (scores.sum(-1) / seen.sum(-1).clamp(min=1))[..., None]).mul_(seen)
        self.energy_at[:, :keys] += sums_along_diagonals(e.square())
        self.abs_at[:, :keys] += sums_along_diagonals(e.abs())
        self.squares += torch.linalg.vecdot(scores, scores).sum(-1)
        self.within += torch.linalg.vecdot(within, within).sum(-1)
        for corner, block in ((self.corner, e), (self.within_corner, within)):
            n = corner.shape[-1]
            corner[:, start:keys, :keys] = block[:, : max(0, n - start), :n]
        if self.planes is not None:
            self.in_planes += self.planes.products(e)
            self.within_planes += self.planes.products(within)
        if self.tokens is not None:
            self.tokens.add(e, seen)

    def drop(self, left: Bool[Tensor, " head"], within: Bool[Tensor, " head"]) -> None:
        """Set all sums of e, and of W less its row means, to zero in these heads."""
        of_tokens = [] if self.tokens is None else [self.tokens.total]
        for x in (self.energy_at, self.abs_at, self.in_planes, self.corner, *of_tokens):
            x[left] = 0
        for x in (self.within, self.within_planes, self.within_corner):
            x[within] = 0
