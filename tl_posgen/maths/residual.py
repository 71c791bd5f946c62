"""What a fit leaves of a head's scores: its spectrum, and the pairs, distances and planes that it sits in."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posgen.errors import InputError
from tl_posgen.maths.rope import Rope, complex_planes

EXACT_BELOW = 512
OVERSAMPLING = 10


@dataclass(frozen=True)
class Spectrum:
    """residual ~ sum_r values_r left_r right_r': the strongest patterns of what is left.

    `share` is each one's part of the residual's energy, values_r^2 / sum of squares of all entries.
    """

    values: Float[Tensor, "head rank"]
    share: Float[Tensor, "head rank"]
    left: Float[Tensor, "head query rank"]
    right: Float[Tensor, "head key rank"]


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
class TopPairs:
    """The pairs with the largest |residual| of each head, largest first."""

    query: Int[Tensor, "head rank"]
    key: Int[Tensor, "head rank"]
    value: Float[Tensor, "head rank"]


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


def spectrum(
    residual: Float[Tensor, "head query key"], visible: Bool[Tensor, "query key"], rank: int, *, seed: int = 0
) -> Spectrum:
    """Leading singular values and vectors of the residual with invisible entries at zero, in float64.

    Exact up to 512 queries or keys; above, subspace iteration from a seeded start until the values stand still to 1e-9.

    Raises:
        InputError: a rank below 1.

    Example:
        >>> seen = torch.ones(3, 3, dtype=torch.bool)
        >>> spectrum(torch.ones(1, 3, 3), seen, rank=2).share.round(decimals=6).tolist()
        [[1.0, 0.0]]
    """
    if rank < 1:
        raise InputError(f"{rank} singular values asked for; give at least 1")
    matrix = _visible_part(residual, visible)
    exact = min(matrix.shape[-2:]) <= max(EXACT_BELOW, rank + OVERSAMPLING)
    u, s, v = _exact_svd(matrix) if exact else _subspace_iteration(matrix, rank, seed)
    total = matrix.square().sum((1, 2))
    return Spectrum(s[:, :rank], s[:, :rank].square() / total[:, None], u[..., :rank], v[..., :rank])


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


def top_pairs(residual: Float[Tensor, "head query key"], visible: Bool[Tensor, "query key"], n: int) -> TopPairs:
    """Where each head's fit is worst: the n visible pairs (fewer if there are not so many) with the largest |residual|.

    Example:
        >>> worst = top_pairs(torch.tensor([[[1.0, 9.0], [-3.0, 2.0]]]), torch.tensor([[True, False], [True, True]]), 2)
        >>> worst.query.tolist(), worst.key.tolist(), worst.value.tolist()
        ([[1, 1]], [[0, 1]], [[-3.0, 2.0]])
    """
    query, key = visible.nonzero(as_tuple=True)
    values = residual[:, query, key]
    at = values.abs().topk(min(n, len(query)), dim=1).indices
    return TopPairs(query[at], key[at], values.gather(1, at))


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


def _exact_svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u, s, vh.mT


def _subspace_iteration(matrix: Tensor, rank: int, seed: int, tolerance: float = 1e-9) -> tuple[Tensor, Tensor, Tensor]:
    """Halko, Martinsson & Tropp 2011, algorithm 4.4, with a test of convergence instead of a fixed number of passes."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(matrix.shape[-1], rank + OVERSAMPLING, generator=generator, dtype=torch.float64)
    right = start.to(matrix.device).expand(len(matrix), -1, -1)
    values = matrix.new_zeros(len(matrix), right.shape[-1])
    for _ in range(500):
        left = torch.linalg.qr(matrix @ right).Q
        right = torch.linalg.qr(matrix.mT @ left).Q
        before, values = values, torch.linalg.svdvals(matrix @ right)
        if bool(((values - before)[:, :rank].abs() <= tolerance * values[:, :1]).all()):
            break
    u, s, vh = torch.linalg.svd(matrix @ right, full_matrices=False)
    return u, s, right @ vh.mT
