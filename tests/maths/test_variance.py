"""The variance decomposition against brute force over all triples (query, key, distance)."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.maths.rope import Rope, inverse_frequencies, rotate
from tl_posgen.maths.variance import COMPONENTS, FactorMoments, QueryKeyMoments, variance_shares


def random_head(seed: int, n: int, d_head: int, rotary_dim: int, pairing: str = "half", scaling: float = 1.0):
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 2, n, d_head, dtype=torch.float64, generator=generator)
    offset = torch.randn(2, 1, 1, d_head, dtype=torch.float64, generator=generator)
    return q + offset[0], k + offset[1], Rope(inverse_frequencies(rotary_dim, 50.0), pairing, scaling)


def all_triples(q, k, rope, scale, n_distances):
    """w [head, query, key, distance], each query at each distance from each key."""
    positions = torch.arange(n_distances)
    turned = torch.stack([rotate(q, p.expand(q.shape[1]), rope) for p in positions], -2)
    still = rotate(k, torch.zeros(k.shape[1]), rope)
    return scale * torch.einsum("hidx,hjx->hijd", turned, still)


def brute_force(w, p):
    """Variance of every component by inclusion-exclusion over conditional means."""
    axes = {"q": 1, "k": 2, "d": 3}
    weights = torch.ones_like(w) / (w.shape[1] * w.shape[2]) * p

    def mean_square_of_conditional_mean(kept: str):
        out = [axis for name, axis in axes.items() if name not in kept]
        mass = weights.sum(out, keepdim=True) if out else weights  # torch sums over everything where `out` is empty
        mean = (w * weights).sum(out, keepdim=True) / mass if out else w
        return (mean.square() * mass).sum((1, 2, 3))

    parts = []
    for component in COMPONENTS:
        subsets = [s for size in range(len(component) + 1) for s in combinations(component, size)]
        signed = [(-1) ** (len(component) - len(s)) * mean_square_of_conditional_mean("".join(s)) for s in subsets]
        parts.append(torch.stack(signed).sum(0))
    return torch.stack(parts)


@pytest.mark.parametrize("weights", ["uniform", "causal"])
@pytest.mark.parametrize(
    ("rotary_dim", "pairing", "scaling"), [(6, "half", 1.0), (6, "adjacent", 1.3), (4, "half", 0.7), (0, "half", 1.0)]
)
def test_every_component_equals_brute_force(weights, rotary_dim, pairing, scaling):
    q, k, rope = random_head(0, 9, 7 if rotary_dim == 4 else 6, rotary_dim, pairing, scaling)
    n_distances = 11
    p = torch.ones(n_distances).double() if weights == "uniform" else n_distances - torch.arange(n_distances).double()
    expected = brute_force(all_triples(q, k, rope, 0.3, n_distances), p / p.sum())
    moments = QueryKeyMoments.of(q, k, rope)
    shares = variance_shares(moments, rope, q.shape[-1], 0.3, n_distances=n_distances, weights=weights)
    torch.testing.assert_close(shares.shares * shares.total, expected, rtol=1e-9, atol=1e-12)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.integers(2, 12), st.integers(1, 40), st.floats(0.01, 100))
def test_shares_are_a_partition_of_the_variance(seed, n, n_distances, scale):
    q, k, rope = random_head(seed, n, 8, 8)
    shares = variance_shares(QueryKeyMoments.of(q, k, rope), rope, 8, scale, n_distances=n_distances)
    w = all_triples(q, k, rope, scale, n_distances)
    torch.testing.assert_close(shares.shares.sum(0), torch.ones(2).double(), atol=1e-9, rtol=0)
    assert (shares.shares >= 0).all()
    torch.testing.assert_close(shares.total, w.flatten(1).var(1, unbiased=False), rtol=1e-8, atol=1e-12)


def test_moments_of_prompts_add_up_to_those_of_the_corpus():
    q, k, rope = random_head(1, 20, 6, 6)
    whole = QueryKeyMoments.of(q, k, rope)
    pieces = [QueryKeyMoments.of(q[:, part], k[:, part], rope) for part in (slice(0, 3), slice(3, 4), slice(4, 20))]
    added = pieces[0] + pieces[1] + pieces[2]
    for side in ("q", "k"):
        for name in ("n", "mean", "plain", "conjugate"):
            torch.testing.assert_close(getattr(getattr(added, side), name), getattr(getattr(whole, side), name))


def test_a_large_constant_part_costs_no_digits():
    q, k, rope = random_head(2, 10, 6, 0)
    small = variance_shares(QueryKeyMoments.of(q, k, rope), rope, 6, n_distances=5)
    shifted = torch.cat([k, torch.full_like(k[..., :1], 1e3)], -1)
    constant = torch.cat([q, torch.ones_like(q[..., :1])], -1)
    large = variance_shares(QueryKeyMoments.of(constant, shifted, rope), rope, 7, n_distances=5)
    torch.testing.assert_close(large.shares, small.shares, rtol=1e-6, atol=1e-9)


def test_constant_scores_have_no_shares():
    q = k = torch.ones(1, 5, 4)
    shares = variance_shares(QueryKeyMoments.of(q, k, Rope()), Rope(), 4, n_distances=3)
    assert shares.shares.isnan().all()


def test_a_split_into_position_and_meaning_has_no_interaction():
    """Position planes with one key, meaning planes that do not turn: w = f(q, d) + g(q, k)."""
    q, k, rope = random_head(3, 8, 8, 4)
    k[..., :4] = torch.tensor([1.0, -2.0, 0.5, 3.0])
    shares = variance_shares(QueryKeyMoments.of(q, k, rope), rope, 8, n_distances=6)
    torch.testing.assert_close(shares["kd"] + shares["qkd"], torch.zeros(2).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(shares.additive_r, torch.ones(2).double())
    assert (shares.visible("d", "qd") > 0.01).all()


def test_a_bias_by_distance_is_counted_in_d():
    q, k, rope = random_head(4, 8, 6, 6)
    bias = -0.4 * torch.arange(7).double().expand(2, 7)
    w = all_triples(q, k, rope, 1.0, 7) + bias[:, None, None]
    expected = brute_force(w, torch.full((7,), 1 / 7, dtype=torch.float64))
    shares = variance_shares(QueryKeyMoments.of(q, k, rope), rope, 6, n_distances=7, bias=bias)
    torch.testing.assert_close(shares.shares * shares.total, expected, rtol=1e-9, atol=1e-12)


def test_additive_r_is_the_correlation_with_the_best_two_axis_fit():
    q, k, rope = random_head(5, 6, 6, 6)
    w = all_triples(q, k, rope, 1.0, 5)
    fit = w.mean(2, keepdim=True) + w.mean(3, keepdim=True) - w.mean((2, 3), keepdim=True)
    expected = torch.stack([torch.corrcoef(torch.stack([x.flatten(), y.flatten()]))[0, 1] for x, y in zip(w, fit, strict=True)])
    shares = variance_shares(QueryKeyMoments.of(q, k, rope), rope, 6, n_distances=5)
    torch.testing.assert_close(shares.additive_r, expected)


@pytest.mark.parametrize("options", [{"n_distances": 0}, {"n_distances": 3, "weights": "other"}])
def test_bad_options_are_refused(options):
    q, k, rope = random_head(6, 4, 4, 4)
    with pytest.raises((ValueError, TypeError)):
        variance_shares(QueryKeyMoments.of(q, k, rope), rope, 4, **options)


def test_the_covariances_are_those_of_their_definition():
    z = torch.randn(3, 50, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    moments, centred = FactorMoments.of(z), z - z.mean(1, keepdim=True)
    torch.testing.assert_close(moments.plain, torch.einsum("hil,him->hlm", centred, centred) / 50)
    torch.testing.assert_close(moments.conjugate, torch.einsum("hil,him->hlm", centred, centred.conj()) / 50)
