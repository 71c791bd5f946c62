"""Scores that (query, key) pairs would have at other positions or distances than their own.

Where there are fewer queries than keys, the queries are the last ones: query i is at key n_keys - n_queries + i.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int, Real
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double
from tl_posgen.errors import InputError
from tl_posgen.rope.planes import turning_factors
from tl_posgen.rope.rotation import Rope, complex_planes, real_coordinates, rotate, rotate_by

_QUERY_BLOCK = 128


def scores_at_positions(
    q: Float[Tensor, "head query d_head"],
    k: Float[Tensor, "head key d_head"],
    rope: Rope,
    scale: float,
    query_positions: Real[Tensor, " query"],
    key_positions: Real[Tensor, " key"],
) -> Float[Tensor, "head query key"]:
    """scale <R_{p_i} q_i, R_{p'_j} k_j> for given position indices p of the queries and p' of the keys."""
    return scale * rotate(q, query_positions, rope) @ rotate(k, key_positions, rope).mT


def scores_frozen_beyond(
    q: Float[Tensor, "head query d_head"],
    k: Float[Tensor, "head key d_head"],
    rope: Rope,
    scale: float,
    limit: int | float | Float[Tensor, " plane"],
    query_positions: Real[Tensor, " query"] | None = None,
    key_positions: Real[Tensor, " key"] | None = None,
) -> Float[Tensor, "head query key"]:
    """score_ij = scale Re sum_m z^q_im conj(z^k_jm) e^{i theta_m min(i - j, limit_m)}: planes that turn up to a limit.

    One limit for all planes is LM-Infinite's rule. A matrix product for plain RoPE, and one for each limit that
    decides over a pair.

    Args:
        limit: the distance beyond which a plane does not turn, for all planes or one a plane; inf where it turns on.
        query_positions, key_positions: in the place of the last of 0 .. n_keys - 1, and of these.

    Raises:
        InputError: a limit below 0.
    """
    keys = torch.arange(k.shape[1], device=k.device) if key_positions is None else key_positions
    queries = keys[-q.shape[1] :] if query_positions is None else query_positions
    limits = limit_of_planes(limit, rope)
    away, total = queries[:, None] - keys, scores_at_positions(q, k, rope, scale, queries, keys)
    furthest = len(keys) - 1 if query_positions is None and key_positions is None else torch.inf
    for beyond in (distance for distance in limits.unique().tolist() if distance < furthest):
        far_q, far_k = rotated_beyond(q, k, rope, limits, beyond, queries, keys)
        total = torch.where(away > beyond, scale * far_q @ far_k.mT, total)
    return total


def limit_of_planes(limit: int | float | Float[Tensor, " plane"], rope: Rope) -> Float[Tensor, " plane"]:
    """Return the distance beyond which each plane does not turn, float64; InputError for one below 0."""
    theta = double(rope.inv_freq)
    limits = double(torch.as_tensor(limit, device="cpu")).to(theta).expand_as(theta)
    if not (limits >= 0).all():
        raise InputError(f"limit {limits.min().item():g}: distances must be 0 or more")
    return limits


def rotated_beyond(
    q: Float[Tensor, "*batch query d_head"],
    k: Float[Tensor, "*batch_k key d_head"],
    rope: Rope,
    limits: Float[Tensor, " plane"],
    beyond: int | float,
    query_positions: Real[Tensor, " query"],
    key_positions: Real[Tensor, " key"],
) -> tuple[Float[Tensor, "*batch query d_head"], Float[Tensor, "*batch_k key d_head"]]:
    """Return q' and k' whose products are those of pairs `beyond` apart, or further, up to the next limit: planes with
    limit_m <= beyond stand at limit_m in every query and at 0 in every key, the others at their positions."""
    rotated = []
    for x, positions, limit in ((q, query_positions, limits), (k, key_positions, torch.zeros_like(limits))):
        place = double(positions)[:, None]
        theta, held, limit = (values.to(place.device) for values in (double(rope.inv_freq), limits <= beyond, limit))
        angles = torch.where(held, limit, place) * theta
        rotated.append(rotate_by(x, torch.polar(torch.full_like(angles, rope.scaling), angles), rope))
    return rotated[0], rotated[1]


def scores_at(
    q: Float[Tensor, "head query d_head"],
    k: Float[Tensor, "head key d_head"],
    rope: Rope,
    scale: float,
    distance: int
    | float
    | Real[Tensor, "row column"]
    | Callable[[Int[Tensor, "query key"]], Real[Tensor, "query key"]],
) -> Float[Tensor, "head query key"]:
    """score_ij = scale <R_{d_ij} q_i, R_0 k_j>: every pair scored at the distance d_ij instead of i - j.

    Entries above the diagonal are finite but meaningless: apply the layer's causal mask. A matrix that differs from
    i - j by few offsets (a jitter) costs one product per offset; any other is summed plane by plane in blocks of
    queries, without a [query, key, plane] tensor.

    Args:
        q, k: before RoPE.
        distance: one number for all pairs (a single product), a matrix, or a function of the matrix i - j (clamped at
            0 above the diagonal). Whole or fractional tokens.

    Raises:
        InputError: a distance is negative at some j <= i, or a matrix does not have the shape [query, key].
    """
    keys = torch.arange(k.shape[1], device=k.device)
    queries = keys[-q.shape[1] :]
    if not isinstance(distance, Tensor) and not callable(distance):
        if not distance >= 0:
            raise InputError(f"distance {distance}: distances must be 0 or more")
        distances = torch.full((len(queries),), float(distance), dtype=DOUBLE, device=q.device)
        return scale * rotate(q, distances, rope) @ unturned(k, rope).mT
    away = queries[:, None] - keys
    matrix, before = distance if isinstance(distance, Tensor) else distance(away.clamp(min=0)), len(keys) - len(queries)
    if matrix.shape != away.shape:
        wanted = f"{len(queries)} queries and {len(keys)} keys; give {list(away.shape)}"
        raise InputError(f"distance of shape {tuple(matrix.shape)} for {wanted}")
    matrix = matrix.to(q.device).tril(before)
    if len(wrong := (~(matrix >= 0)).nonzero()):
        query, key = wrong[0].tolist()
        raise InputError(
            f"distance {matrix[query, key].item()} at query {query}, key {key}: distances must be 0 or more"
        )
    offset = (matrix - away).tril(before)
    first, *other_offsets = offset.unique().tolist()
    if len(other_offsets) >= len(rope.inv_freq):
        blocks = [slice(start, start + _QUERY_BLOCK) for start in range(0, len(queries), _QUERY_BLOCK)]
        return torch.cat([_scores_at_matrix(q[:, block], k, rope, scale, matrix[block]) for block in blocks], dim=1)
    total = scores_at_positions(q, k, rope, scale, queries + first, keys)
    for value in other_offsets:
        moved = scores_at_positions(q, k, rope, scale, queries + value, keys)
        total = torch.where(offset == value, moved, total)
    return total


def _scores_at_matrix(q: Tensor, k: Tensor, rope: Rope, scale: float, distance: Tensor) -> Tensor:
    """Return the scores of one block of queries; the factors of each distinct distance are computed once."""
    zq, zk = complex_planes(q, rope), complex_planes(k, rope)
    turning = len(rope.inv_freq)
    rest_q, rest_k = (real_coordinates(z[..., turning:]) for z in (zq, zk))
    total = rest_q @ rest_k.mT
    distances, indices = distance.unique(return_inverse=True)
    turn = turning_factors(distances, rope, q.shape[-1]).to(zq.dtype)
    for m in range(turning):
        product = zq[:, :, None, m] * zk[:, None, :, m].conj()
        total += product.real * turn.real[indices, m]
        total -= product.imag * turn.imag[indices, m]
    return scale * total


def unturned(k: Tensor, rope: Rope) -> Tensor:
    """R_0 k: no rotation at position zero, but YaRN's factor on rotated keys applies."""
    return rotate(k, torch.zeros(k.shape[-2], device=k.device), rope)
