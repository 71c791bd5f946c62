"""The plane x plane matrix of the interaction against brute force over every triple, and what is proved of it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.position.decomposition.numbers.variance_shares import TripleMoments, variance_shares
from tl_posgen.position.planes.numbers.interaction_matrix import InteractionMatrix, interaction_matrix
from tl_posgen.rope.planes import turning_factors
from tl_posgen.rope.rotation import Rope, complex_planes, inverse_frequencies

ROPES = {
    "half": (Rope(inverse_frequencies(6, 50.0)), 6),
    "adjacent": (Rope(inverse_frequencies(6, 50.0), pairing="adjacent"), 6),
    "partial, odd rest, scaled": (Rope(inverse_frequencies(4, 50.0), scaling=1.4), 7),
    "a plane that does not turn": (Rope(torch.tensor([1.0, 0.0, 0.3], dtype=torch.float64)), 6),
}


def random_qk(n: int, d_head: int, seed: int, heads: int = 2):
    """Queries and keys of unlike lengths in every coordinate, about means that are not zero."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(6, heads, n, d_head, dtype=torch.float64, generator=generator)
    widths = normal[2:4, :, :1].exp()
    return normal[0] * widths[0] + 2 * normal[4, :, :1], normal[1] * widths[1] + 2 * normal[5, :, :1]


def each_plane(q, k, rope, scale, n_distances, p):
    """I_m of every triple [head, query, key, distance, plane]."""
    zq, zk = complex_planes(q, rope), complex_planes(k, rope)
    turn = turning_factors(torch.arange(n_distances), rope, q.shape[-1])
    v, e = turn - p.to(turn) @ turn, zk - zk.mean(1, keepdim=True)
    return scale * torch.einsum("hip,hjp,dp->hijdp", zq, e.conj(), v).real


@pytest.mark.parametrize("weights", ["uniform", "causal"])
@pytest.mark.parametrize(("rope", "d_head"), ROPES.values(), ids=ROPES.keys())
def test_it_is_the_covariance_over_all_triples_and_adds_up_to_the_interaction(rope, d_head, weights):
    q, k = random_qk(6, d_head, seed=0)
    moments = TripleMoments.from_qk(q, k, rope)
    found = interaction_matrix(moments, rope, 0.3, 5, weights=weights)
    p = {"uniform": torch.ones(5), "causal": torch.arange(5.0, 0, -1)}[weights].double()
    p = p / p.sum()
    parts = each_plane(q, k, rope, 0.3, 5, p)
    torch.testing.assert_close(
        (parts * p[:, None]).sum(3).mean((1, 2)), torch.zeros_like(found.energy), atol=1e-12, rtol=0
    )
    expected = torch.einsum("hijdm,hijdn,d->hmn", parts, parts, p) / 36
    torch.testing.assert_close(found.matrix, expected, atol=1e-12, rtol=1e-9)
    shares = variance_shares(moments, rope, 0.3, 5, weights=weights)
    torch.testing.assert_close(found.total, shares.interaction * shares.total, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(found.by_plane.sum(-1), found.total)
    still = turning_factors(torch.arange(5), rope, d_head).std(0) < 1e-12
    assert float(found.matrix[:, still].abs().sum()) == pytest.approx(0, abs=1e-20)


def holds(found: InteractionMatrix) -> None:
    slack = 1 + 1e-9
    tiny = 1e-12 * found.loose_bound.max()
    torch.testing.assert_close(found.matrix, found.matrix.mT)
    assert bool((torch.linalg.eigvalsh(found.matrix) >= -tiny).all())
    assert bool((found.diagonal <= found.energy * slack + tiny).all())
    alone = found.diagonal.sqrt().sum(-1).square()
    assert bool((found.total <= alone * slack + tiny).all())
    assert bool((alone <= found.bound * slack + tiny).all())
    assert bool((found.bound <= found.loose_bound * slack + tiny).all())


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(2, 9),
    half=st.integers(1, 4),
    rest=st.integers(0, 3),
    n_distances=st.integers(1, 40),
    base=st.floats(1.5, 1e5),
    causal=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_what_is_proved_holds(n, half, rest, n_distances, base, causal, seed):
    rope = Rope(inverse_frequencies(2 * half, base))
    q, k = random_qk(n, 2 * half + rest, seed)
    moments = TripleMoments.from_qk(q, k, rope)
    holds(interaction_matrix(moments, rope, 0.7, n_distances, weights="causal" if causal else "uniform"))


def test_the_bound_is_reached_where_one_plane_turns_along_its_queries_and_keys():
    """One plane that turns by half a circle, queries and key deviations on the real axis: nothing is lost."""
    rope = Rope(torch.tensor([torch.pi], dtype=torch.float64))
    q = torch.tensor([[[1.0, 0.0], [3.0, 0.0]]], dtype=torch.float64)
    k = torch.tensor([[[-2.0, 5.0], [2.0, 5.0]]], dtype=torch.float64)
    found = interaction_matrix(TripleMoments.from_qk(q, k, rope), rope, 1.0, 4)
    assert float(found.total) == pytest.approx(5 * 4)
    assert float(found.bound) == pytest.approx(float(found.total))
    assert float(found.estimate) == pytest.approx(float(found.total) / 2)  # a factor of two: phases that do not vary


def test_the_estimate_is_exact_on_average_where_every_direction_is_alike():
    rope = Rope(inverse_frequencies(8, 1e4))
    q, k = torch.randn(2, 1, 20000, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = interaction_matrix(TripleMoments.from_qk(q, k, rope), rope, 1.0, 64)
    assert float(found.estimate / found.total) == pytest.approx(1, abs=0.02)


def test_keys_that_are_their_mean_leave_no_interaction_whatever_their_rank():
    """Rank one is not what makes a head additive: the same direction with random signs interacts, r1 = 1 in both."""
    rope = Rope(inverse_frequencies(8, 100.0))
    q, k = random_qk(500, 8, seed=1, heads=1)
    direction, sign = k[:, :1], torch.randn(1, 500, 1, generator=torch.Generator().manual_seed(0)).sign()
    same, signed = (TripleMoments.from_qk(q, x.expand_as(k), rope) for x in (direction, direction * sign))
    none, some = (variance_shares(moments, rope, 1.0, 64).interaction for moments in (same, signed))
    assert float(same.k.r1) == pytest.approx(1)
    assert float(signed.k.r1) == pytest.approx(1)
    assert float(same.k.mean_energy) == pytest.approx(1)
    assert float(signed.k.mean_energy) < 0.01
    assert float(none) < 1e-12
    assert float(some) > 0.2


def test_r1_and_the_mean_energy_are_those_of_the_samples():
    rope = Rope(inverse_frequencies(4, 100.0))
    q, k = random_qk(30, 7, seed=2)
    moments = TripleMoments.from_qk(q[:, :12], k[:, :12], rope) + TripleMoments.from_qk(q[:, 12:], k[:, 12:], rope)
    singular = torch.linalg.svdvals(k)
    torch.testing.assert_close(moments.k.r1, singular[:, 0] ** 2 / singular.square().sum(-1))
    torch.testing.assert_close(moments.q.mean_energy, q.mean(1).square().sum(-1) / q.square().sum(-1).mean(-1))
