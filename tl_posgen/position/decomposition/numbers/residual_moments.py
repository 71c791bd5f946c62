"""Residual of a three-axis fit to a head's scores: its energy by distance, by plane and by token pair."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double
from tl_posgen.position.decomposition.numbers.pair_moments import causal_rows
from tl_posgen.position.decomposition.numbers.three_axis_fit import ThreeAxisFit
from tl_posgen.rope.bilinear_sums import along_diagonals, sums_along_diagonals
from tl_posgen.rope.rotation import Rope, complex_planes

ID_BITS = 32  # kind of pair = query id * 2^32 + key id
KEEP = 1024  # kinds of pair that a tally keeps per head


@dataclass(frozen=True)
class TokenPairTally:
    r"""Sum and number of the residuals e of each kind of pair (query token, key token); float64, all heads.

    Tallies of prompts add up: `a + b`. Kinds are sorted by n mean(e)^2, the energy of the residual that the two tokens
    explain: a frequent pair whose residuals cancel comes last. Each head keeps the first `KEEP` kinds, so the tally is
    exact for up to `KEEP` kinds; with more, a kind that was dropped and occurs again counts only from then on.

    Attributes:
        kind: query id * 2^32 + key id; -1 where there is none.
        total: sum of e. count: number of pairs.
        energy: sum of e^2 over all kinds, kept or not.
    """

    kind: Int[Tensor, "head kind"]
    total: Float[Tensor, "head kind"]
    count: Float[Tensor, "head kind"]
    energy: Float[Tensor, " head"]

    @classmethod
    def join_heads(cls, parts: Sequence["TokenPairTally"]) -> "TokenPairTally":
        """Join tallies of the same prompt for some heads each into one for all heads."""
        return cls(*(torch.cat([getattr(part, one.name) for part in parts]) for one in fields(cls)))

    def __add__(self, other: "TokenPairTally") -> "TokenPairTally":
        kind, order = torch.cat([self.kind, other.kind], 1).sort(dim=1)
        again = kind[:, 1:] == kind[:, :-1]  # a kind occurs once in each summand, so twice at most

        def merged(name: str) -> Tensor:
            x = torch.cat([getattr(self, name), getattr(other, name)], 1).gather(1, order)
            x[:, :-1] += x[:, 1:].masked_fill(~again, 0)
            x[:, 1:].masked_fill_(again, 0)
            return x

        kind[:, 1:].masked_fill_(again, -1)
        total, count = merged("total"), merged("count")
        return TokenPairTally(kind, total, count, self.energy + other.energy).strongest()

    @property
    def query_token(self) -> Int[Tensor, "head kind"]:
        return self.kind >> ID_BITS

    @property
    def key_token(self) -> Int[Tensor, "head kind"]:
        return torch.where(self.kind < 0, -1, self.kind & (2**ID_BITS - 1))

    @property
    def mean(self) -> Float[Tensor, "head kind"]:
        """Return the mean residual of each kind; NaN where there is no kind."""
        return self.total / self.count

    @property
    def explained(self) -> Float[Tensor, "head kind"]:
        """n mean(e)^2 of each kind."""
        return self.total.square() / self.count.clamp(min=1)

    @property
    def share(self) -> Float[Tensor, "head kind"]:
        """n mean(e)^2 as a share of the residual's energy."""
        return self.explained / self.energy[:, None]

    def strongest(self) -> "TokenPairTally":
        """Return the `KEEP` kinds that explain most, in that order."""
        ranking = self.explained.masked_fill(self.count == 0, -1)
        at = ranking.topk(min(KEEP, ranking.shape[1])).indices
        kind, total, count = (x.gather(1, at) for x in (self.kind, self.total, self.count))
        return TokenPairTally(kind, total, count, self.energy)


class TokenSums:
    """Sums of residuals over the pairs of each two tokens of one prompt, added up from blocks of rows.

    Example:
        >>> sums, left = TokenSums(torch.tensor([7, 7]), 1, "cpu"), torch.tensor([[[1.0, 0.0], [-3.0, 5.0]]])
        >>> sums.add(left, torch.ones(2, 2).tril())
        >>> tally = sums.tally(left.square().sum((1, 2)))
        >>> tally.query_token.tolist(), tally.mean.tolist(), tally.count.tolist()
        ([[7]], [[1.0]], [[3.0]])
    """

    def __init__(self, tokens: Int[Tensor, " pos"], n_heads: int, device: torch.device | str):
        self.ids, self._which = tokens.to(device).long().unique(return_inverse=True)
        shape = [len(self.ids)] * 2
        self.total, self._count = (torch.zeros(n, *shape, dtype=DOUBLE, device=device) for n in (n_heads, 1))

    def add(self, e: Float[Tensor, "head row key"], mask: Bool[Tensor, "row key"] | Float[Tensor, "row key"]) -> None:
        """Add some rows over the keys up to the last of them; e must be 0 where the mask is."""
        rows, keys = mask.shape
        of_keys = self._which[:keys]
        for sums, x in ((self.total, double(e)), (self._count, double(mask[None]))):
            by_key = x.new_zeros(len(x), rows, len(self.ids)).index_add_(2, of_keys, x)
            sums.index_add_(1, of_keys[-rows:], by_key)

    def tally(self, energy: Float[Tensor, " head"]) -> TokenPairTally:
        total, count = self.total.flatten(1), self._count.flatten(1)
        ranking = total.square().div_(count.clamp(min=1)).sub_(double(count == 0))  # kinds that do not occur: last
        at = ranking.topk(min(KEEP, int(count.count_nonzero()))).indices
        kind = (self.ids[at // len(self.ids)] << ID_BITS) + self.ids[at % len(self.ids)]
        return TokenPairTally(kind, total.gather(1, at), count.expand_as(total).gather(1, at), energy)


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
