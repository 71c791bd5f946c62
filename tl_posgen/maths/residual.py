"""What a fit leaves of a head's scores: the kinds of pairs, the distances and the planes that it sits in."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posgen.maths.rope import Rope, complex_planes


@dataclass(frozen=True)
class ResidualSums:
    """Sums over the visible pairs of some queries, float64; the sums of other blocks of queries, or prompts, add.

    Attributes:
        energy: sum of e^2 by distance. pairs: number of pairs by distance.
        planes: sum of W_m e over pairs, with W_m the part of the score in plane m (remainder as in `complex_planes`).
    """

    energy: Float[Tensor, "head distance"]
    pairs: Int[Tensor, " distance"]
    planes: Float[Tensor, "head plane_and_rest"]

    def __add__(self, other: "ResidualSums") -> "ResidualSums":
        return ResidualSums(self.energy + other.energy, self.pairs + other.pairs, self.planes + other.planes)

    @property
    def share_by_distance(self) -> Float[Tensor, "head distance"]:
        return self.energy / self.energy.sum(-1, keepdim=True)

    @property
    def mean_square_by_distance(self) -> Float[Tensor, "head distance"]:
        """NaN at a distance with no pair."""
        return self.energy / self.pairs

    @property
    def share_by_plane(self) -> Float[Tensor, "head plane_and_rest"]:
        """<W_m, e> / <e, e>: adds up to 1 when e is what a least-squares fit leaves of W = sum_m W_m.

        The fit is linear, so e = sum_m e_m with e_m what it leaves of plane m alone, and <e_m, e> = <W_m, e> because e
        is at right angles to every fit: the planes' shares need no fit per plane. Negative: the plane works against e.
        """
        return self.planes / self.energy.sum(-1, keepdim=True)


@dataclass(frozen=True)
class TokenPairs:
    """Residuals gathered by what the tokens are, for one head; largest share of energy first.

    Attributes:
        query_token, key_token: token ids. share: of the residual's energy. mean: residual. count: pairs of this kind.
    """

    query_token: Int[Tensor, " rank"]
    key_token: Int[Tensor, " rank"]
    share: Float[Tensor, " rank"]
    mean: Float[Tensor, " rank"]
    count: Int[Tensor, " rank"]


def residual_sums(
    residual: Float[Tensor, "head query key"],
    visible: Bool[Tensor, "query key"],
    rotated_q: Float[Tensor, "head query d_head"],
    rotated_k: Float[Tensor, "head key d_head"],
    rope: Rope,
    scale: float,
    first_query: int = 0,
) -> ResidualSums:
    """Energy of the residual by distance, and its product with each plane's part of the score; query x key memory.

    Rows are the queries first_query, first_query + 1, ...; give all keys. q and k are after RoPE.
    """
    left = _visible_part(residual, visible)
    n_query, n_key = visible.shape
    distance = (
        torch.arange(n_query, device=left.device)[:, None] + first_query - torch.arange(n_key, device=left.device)
    )
    at = distance[visible]
    energy = left.new_zeros(len(left), n_key).index_add(1, at, left[:, visible].square())
    zq, zk = complex_planes(rotated_q.double(), rope), complex_planes(rotated_k.double(), rope)
    planes = zq.real * (left @ zk.real) + zq.imag * (left @ zk.imag)
    return ResidualSums(energy, at.bincount(minlength=n_key), scale * planes.sum(1))


def top_token_pairs(
    residual: Float[Tensor, "query key"], visible: Bool[Tensor, "query key"], tokens: Int[Tensor, " pos"], n: int
) -> TokenPairs:
    """Which kinds of token pair hold the residual of one head: energy, mean and count per (query, key) token ids."""
    query, key = visible.nonzero(as_tuple=True)
    values = residual[query, key].double()
    kinds, kind = torch.stack([tokens[query], tokens[key]], 1).unique(dim=0, return_inverse=True)
    count = kind.bincount(minlength=len(kinds))
    energy = values.new_zeros(len(kinds)).index_add(0, kind, values.square())
    mean = values.new_zeros(len(kinds)).index_add(0, kind, values) / count
    at = energy.topk(min(n, len(kinds))).indices
    return TokenPairs(kinds[at, 0], kinds[at, 1], energy[at] / energy.sum(), mean[at], count[at])


def _visible_part(residual: Tensor, visible: Tensor) -> Float[Tensor, "head query key"]:
    return residual.double().masked_fill(~visible, 0)
