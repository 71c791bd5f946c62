"""The residual's summaries against dense linear algebra, with a real three-axis least-squares residual."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.errors import InputError
from tl_posgen.maths import residual as residual_module
from tl_posgen.maths.residual import residual_sums, spectrum, top_pairs, top_token_pairs
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
    torch.testing.assert_close(spectrum(masked, VISIBLE, 3).values, spectrum(left.tril(), VISIBLE, 3).values)


def test_the_spectrum_rebuilds_the_residual():
    left = random_tensor(2, N, N).tril()
    found = spectrum(left, VISIBLE, N)
    torch.testing.assert_close((found.left * found.values[:, None]) @ found.right.mT, left)
    torch.testing.assert_close(found.share.sum(-1), torch.ones(2, dtype=torch.float64))


def test_iteration_finds_the_exact_spectrum(monkeypatch):
    n = 80
    visible = torch.ones(n, n).tril().bool()
    left = random_tensor(2, n, n).tril()
    exact = spectrum(left, visible, 5)
    monkeypatch.setattr(residual_module, "EXACT_BELOW", 8)
    found = spectrum(left, visible, 5)
    torch.testing.assert_close(found.values, exact.values, rtol=1e-5, atol=0)
    torch.testing.assert_close(found.share, exact.share, rtol=1e-5, atol=0)
    overlap = (found.left[..., 0] * exact.left[..., 0]).sum(-1) * (found.right[..., 0] * exact.right[..., 0]).sum(-1)
    torch.testing.assert_close(overlap, torch.ones(2, dtype=torch.float64), atol=1e-4, rtol=0)


def test_top_pairs_are_the_largest_visible_entries():
    left = random_tensor(2, N, N)
    found = top_pairs(left, VISIBLE, 4)
    for head in range(2):
        expected = left[head][VISIBLE].abs().sort(descending=True).values[:4]
        torch.testing.assert_close(found.value[head].abs(), expected)
        assert torch.equal(left[head, found.query[head], found.key[head]], found.value[head])
        assert (found.query[head] >= found.key[head]).all()


def test_no_more_pairs_than_there_are():
    assert top_pairs(random_tensor(2, N, N), VISIBLE, 1000).value.shape == (2, N * (N + 1) // 2)


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


def test_a_rank_below_one_is_refused():
    with pytest.raises(InputError, match="at least 1"):
        spectrum(random_tensor(1, N, N), VISIBLE, 0)
