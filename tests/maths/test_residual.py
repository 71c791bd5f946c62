"""The residual's summaries against dense linear algebra, with a real three-axis least-squares residual."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.maths.residual import residual_sums, top_token_pairs
from tl_posgen.maths.rope import Rope, inverse_frequencies, rotate

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
    return tuple(rotate(random_tensor(2, N, D_HEAD, seed=seed), position, rope) for seed in (0, 1))


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_shares_by_plane_are_those_of_one_fit_per_plane(rope):
    q, k = rotated_head(rope)
    left = three_axis_residual(SCALE * q @ k.mT)
    found = residual_sums(left, VISIBLE, q, k, rope, SCALE).share_by_plane
    torch.testing.assert_close(found.sum(-1), torch.ones(2, dtype=torch.float64))
    first = [0, len(rope.inv_freq)] if rope.pairing == "half" else [0, 1]
    own = three_axis_residual(SCALE * q[..., first] @ k[..., first].mT)
    torch.testing.assert_close(found[:, 0], (own * left).sum((1, 2)) / left.square().sum((1, 2)))


def test_energy_by_distance_is_that_of_the_diagonals():
    rope = ROPES["half"]
    q, k = rotated_head(rope)
    left = random_tensor(2, N, N)
    sums = residual_sums(left, VISIBLE, q, k, rope, SCALE)
    diagonals = [left.diagonal(-d, 1, 2) for d in range(N)]
    torch.testing.assert_close(sums.energy, torch.stack([x.square().sum(-1) for x in diagonals], 1))
    torch.testing.assert_close(sums.mean_square_by_distance, torch.stack([x.square().mean(-1) for x in diagonals], 1))
    torch.testing.assert_close(sums.share_by_distance.sum(-1), torch.ones(2, dtype=torch.float64))


@settings(max_examples=10, deadline=None)
@given(cut=st.integers(1, N - 1))
def test_blocks_of_queries_add_up_to_the_whole(cut):
    rope = ROPES["half"]
    q, k = rotated_head(rope)
    left = random_tensor(2, N, N)
    whole = residual_sums(left, VISIBLE, q, k, rope, SCALE)
    upper = residual_sums(left[:, :cut], VISIBLE[:cut], q[:, :cut], k, rope, SCALE)
    lower = residual_sums(left[:, cut:], VISIBLE[cut:], q[:, cut:], k, rope, SCALE, first_query=cut)
    for name in vars(whole):
        torch.testing.assert_close(getattr(upper + lower, name), getattr(whole, name))


def test_invisible_entries_are_left_out():
    rope = ROPES["half"]
    q, k = rotated_head(rope)
    left = random_tensor(2, N, N)
    masked = left.masked_fill(~VISIBLE, -torch.inf)
    for name in ("energy", "planes"):
        found = getattr(residual_sums(masked, VISIBLE, q, k, rope, SCALE), name)
        torch.testing.assert_close(found, getattr(residual_sums(left, VISIBLE, q, k, rope, SCALE), name))


def test_token_pairs_gather_the_energy_of_each_kind():
    tokens = torch.tensor([5, 7, 5, 9, 7, 5, 5, 9, 9, 7, 5])
    left = random_tensor(N, N)
    found = top_token_pairs(left, VISIBLE, tokens, 100)
    torch.testing.assert_close(found.share.sum(), torch.tensor(1.0, dtype=torch.float64))
    assert (found.share.diff() <= 0).all()
    total = left[VISIBLE].square().sum()
    for rank in range(len(found.share)):
        kind = VISIBLE & (tokens[:, None] == found.query_token[rank]) & (tokens == found.key_token[rank])
        torch.testing.assert_close(found.share[rank], left[kind].square().sum() / total)
        torch.testing.assert_close(found.mean[rank], left[kind].mean())
        assert found.count[rank] == kind.sum()
