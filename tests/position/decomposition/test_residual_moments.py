"""The residual's summaries against dense linear algebra, with a real three-axis least-squares residual."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.position.decomposition.residual_moments import plane_products, residual_energies
from tl_posgen.rope.rotation import Rope, inverse_frequencies, rotate

SCALE, N, D_HEAD = 0.3, 11, 8
VISIBLE = torch.ones(N, N).tril().bool()
ROPES = {
    "half": Rope(inverse_frequencies(8, 100.0)),
    "adjacent": Rope(inverse_frequencies(8, 100.0), pairing="adjacent"),
    "partial, scaled": Rope(inverse_frequencies(4, 100.0), scaling=1.3),
}


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def three_axis_residual(scores: torch.Tensor) -> torch.Tensor:
    """What dense least squares on a_{i-j} + b_i + c_j leaves of each head's visible scores."""
    query, key = VISIBLE.nonzero(as_tuple=True)
    eye = torch.eye(N, dtype=torch.float64)
    design = torch.cat([eye[query - key], eye[query], eye[key]], 1)
    target = scores[:, query, key].mT
    left = torch.zeros_like(scores)
    left[:, query, key] = (target - design @ torch.linalg.lstsq(design, target, driver="gelsd").solution).mT
    return left


def rotated_head(rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
    position = torch.arange(N)
    q, k = (rotate(random_tensor(2, N, D_HEAD, seed=seed), position, rope) for seed in (0, 1))
    return q, k


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_products_with_planes_are_those_of_one_fit_a_plane(rope):
    q, k = rotated_head(rope)
    left = three_axis_residual(SCALE * q @ k.mT)
    shares = plane_products(left, q, k, rope, SCALE) / left.square().sum((1, 2))[:, None]
    torch.testing.assert_close(shares.sum(-1), torch.ones(2, dtype=torch.float64))
    first = [0, len(rope.inv_freq)] if rope.pairing == "half" else [0, 1]
    own = three_axis_residual(SCALE * q[..., first] @ k[..., first].mT)
    torch.testing.assert_close(shares[:, 0], (own * left).sum((1, 2)) / left.square().sum((1, 2)))


def test_sums_by_distance_are_those_of_the_diagonals():
    left = random_tensor(2, N, N).tril()
    sums = residual_energies(left, VISIBLE)
    diagonals = [left.diagonal(-d, 1, 2) for d in range(N)]
    torch.testing.assert_close(sums["energy_at"], torch.stack([x.square().sum(-1) for x in diagonals], 1))
    torch.testing.assert_close(sums["abs_at"], torch.stack([x.abs().sum(-1) for x in diagonals], 1))
    torch.testing.assert_close(sums["energy"], left.square().sum((1, 2)))
    assert sums["pairs_at"].tolist() == 2 * [[N - d for d in range(N)]]
    assert sums["pairs"].tolist() == 2 * [N * (N + 1) / 2]


@settings(max_examples=10, deadline=None)
@given(cut=st.integers(1, N - 1))
def test_blocks_of_queries_add_up_to_the_whole(cut):
    rope = ROPES["half"]
    q, k = rotated_head(rope)
    left = random_tensor(2, N, N).tril()
    whole = plane_products(left, q, k, rope, SCALE)
    blocks = [plane_products(left[:, rows], q[:, rows], k, rope, SCALE) for rows in (slice(cut), slice(cut, None))]
    torch.testing.assert_close(sum(blocks), whole)
    upper = residual_energies(left[:, :cut, :cut], VISIBLE[:cut, :cut])
    lower, sums = residual_energies(left[:, cut:], VISIBLE[cut:]), residual_energies(left, VISIBLE)
    for name, value in sums.items():
        above = torch.nn.functional.pad(upper[name], (0, N - cut)) if name.endswith("_at") else upper[name]
        torch.testing.assert_close(above + lower[name], value)
