"""Every closed form against the table it avoids, in float64."""

from itertools import product

import pytest
import torch
from drawn import normal, token_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from rotated_heads import ROPES, additive_fit, distance_table, random_head, true_distances

from tl_posgen.errors import InputError
from tl_posgen.position.distance.numbers import key_agreement, table_energies
from tl_posgen.position.order.numbers import jittered_distances
from tl_posgen.rope.rotation import Rope, inverse_frequencies, rotate
from tl_posgen.rope.scores_at import scores_at, scores_at_positions, scores_frozen_beyond

SCALE = 0.3


def brute_scores(q, k, rope, distance) -> torch.Tensor:
    """One pair at a time: the query turned by the distance, the key left at position zero."""
    n, still = q.shape[1], rotate(k, torch.zeros(k.shape[1]), rope)
    scores = torch.zeros(len(q), n, n, dtype=q.dtype)
    for i, j in product(range(n), repeat=2):
        turned = rotate(q[:, i : i + 1], torch.tensor([float(distance[i, j])], dtype=torch.float64), rope)
        scores[:, i, j] = SCALE * (turned[:, 0] * still[:, j]).sum(-1)
    return scores


def test_distance_table_at_the_true_distance_is_the_true_score(rope):
    q, k = random_head()
    position = torch.arange(12)
    scores = scores_at_positions(q, k, rope, SCALE, position, position)
    table = distance_table(q[:, 11], k, rope, SCALE, position)
    torch.testing.assert_close(table[:, 11 - position, position], scores[:, 11])


@pytest.mark.parametrize("distances", [torch.arange(16), torch.tensor([0.0, 2.5, 40.0])], ids=["range", "fractional"])
def test_energies_from_moments_equal_those_of_the_table(rope, distances):
    q, k = random_head()
    energies = table_energies(q, k, rope, SCALE, distances)
    distance, key, neither = energies
    for query in range(q.shape[1]):
        fit = additive_fit(distance_table(q[:, query], k, rope, SCALE, distances))
        torch.testing.assert_close(distance[:, query], fit.rows.square().mean(-1))
        torch.testing.assert_close(key[:, query], fit.columns.square().mean(-1))
        torch.testing.assert_close((neither / energies.sum(0))[:, query], fit.interaction_share)


def test_additive_fit_is_the_least_squares_fit():
    table = normal(5, 6)
    rows = torch.eye(5, dtype=torch.float64).repeat_interleave(6, 0)
    columns = torch.eye(6, dtype=torch.float64).repeat(5, 1)
    design = torch.cat([rows, columns], 1)
    fitted = design @ torch.linalg.lstsq(design, table.flatten()[:, None], driver="gelsd").solution
    fit = additive_fit(table)
    torch.testing.assert_close((fit.mean + fit.rows[:, None] + fit.columns).flatten(), fitted[:, 0])
    torch.testing.assert_close(fit.r, torch.corrcoef(torch.stack([table.flatten(), fitted[:, 0]]))[0, 1])


def test_a_head_whose_fast_planes_hold_constant_keys_is_additive():
    q, k = random_head()
    rope = Rope(torch.tensor([1.0, 0.7, 0.0, 0.0], dtype=torch.float64))
    k = k.clone()
    k[..., [0, 1, 4, 5]] = 1.0
    energies = table_energies(q, k, rope, SCALE, torch.arange(64))
    torch.testing.assert_close(energies[2] / energies.sum(0), torch.zeros(2, 12, dtype=torch.float64))


def test_key_agreement_is_the_correlation_of_the_key_parts_mean_over_queries(rope, monkeypatch):
    monkeypatch.setattr("tl_posgen.position.distance.numbers.QUERIES_AT_ONCE", 5)
    q, k = random_head()
    distances = torch.tensor([10.0, 0.0, 64.0, 256.0])
    found = key_agreement(q, k, rope, distances)
    for head in range(2):
        tables = [distance_table(q[:, query], k, rope, SCALE, distances)[head] for query in range(12)]
        torch.testing.assert_close(found[head], torch.stack([torch.corrcoef(one) for one in tables]).mean(0))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**16), name=st.sampled_from(sorted(ROPES)), n=st.integers(2, 20))
def test_the_shares_have_the_agreement_of_all_pairs_of_distances(seed, name, n):
    """key / (key + neither) = the mean covariance of all pairs of distances over the mean variance at a distance, and
    its root the correlation of the table, each distance's mean removed, with its key part."""
    q, k = random_head(seed, heads=1, n=6)
    distances = torch.arange(n)
    _, key, neither = table_energies(q, k, ROPES[name], SCALE, distances)[:, 0, 0]
    table = distance_table(q[:, 0], k, ROPES[name], SCALE, distances)[0]
    cov = torch.cov(table, correction=0)
    torch.testing.assert_close(key / (key + neither), cov.mean() / cov.diagonal().mean())
    within = table - table.mean(1, keepdim=True)
    key_part = within.mean(0).expand_as(within)
    r = torch.corrcoef(torch.stack([within.flatten(), key_part.flatten()]))[0, 1]
    torch.testing.assert_close((key / (key + neither)).sqrt(), r)


@pytest.mark.parametrize("d0", [0, 3, 1000, 2.5, 1e6 + 0.1])
def test_constant_distance_equals_pair_by_pair(rope, d0):
    q, k = random_head(n=6)
    expected = brute_scores(q, k, rope, torch.full((6, 6), d0, dtype=torch.float64))
    torch.testing.assert_close(scores_at(q, k, rope, SCALE, d0), expected)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**16), name=st.sampled_from(sorted(ROPES)), fractional=st.booleans())
def test_any_distance_matrix_equals_pair_by_pair(seed, name, fractional):
    q, k = random_head(seed, n=5)
    distance = token_ids(5, 5, seed=seed, low=0, high=50) + (0.25 if fractional else 0)
    expected = brute_scores(q, k, ROPES[name], distance).tril()
    torch.testing.assert_close(scores_at(q, k, ROPES[name], SCALE, distance).tril(), expected)


def test_the_true_distances_and_a_limit_beyond_the_text_give_the_true_scores(rope):
    q, k = random_head()
    position, visible = torch.arange(12), torch.ones(12, 12).tril().bool()
    expected = scores_at_positions(q, k, rope, SCALE, position, position)
    for distances in (lambda distance: distance, position[:, None] - position):  # above the diagonal any will do
        found = scores_at(q, k, rope, SCALE, distances)
        torch.testing.assert_close(found[:, visible], expected[:, visible])
        assert found.isfinite().all()
    assert torch.equal(scores_frozen_beyond(q, k, rope, SCALE, 12), expected)


def test_float32_heads_keep_their_precision_at_a_large_distance():
    q, k = random_head()
    rope = Rope(inverse_frequencies(8, 10_000.0))
    exact = scores_at(q, k, rope, SCALE, 100_000)
    single = scores_at(q.float(), k.float(), rope, SCALE, 100_000)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "distance",
    [jittered_distances(9, 0.5, 1, seed=0), true_distances(9) + torch.arange(9) % 4],
    ids=["jitter", "as many as planes"],
)
def test_few_offsets_cost_a_product_each(monkeypatch, distance):
    q, k = random_head(n=9)
    expected = brute_scores(q, k, ROPES["half"], distance)
    monkeypatch.setattr("tl_posgen.rope.scores_at._scores_at_matrix", None)
    found = scores_at(q, k, ROPES["half"], SCALE, distance)
    visible = torch.ones(9, 9).tril().bool()
    torch.testing.assert_close(found[:, visible], expected[:, visible])


def test_frozen_beyond_equals_clamped_distances_across_query_blocks(rope):
    q, k = random_head(n=150)
    visible = torch.ones(150, 150).tril().bool()
    expected = scores_at(q, k, rope, SCALE, lambda distance: distance.clamp(max=4))
    found = scores_frozen_beyond(q, k, rope, SCALE, 4)
    torch.testing.assert_close(found[:, visible], expected[:, visible])


def named_pair(distance):
    distance = true_distances(12)
    distance[7, 3] = -2
    return distance


@pytest.mark.parametrize(
    ("distance", "said"),
    [
        (-1, "0 or more"),
        (float("nan"), "0 or more"),
        (lambda d: d - 1, "0 or more"),
        (named_pair, "distance -2 at query 7, key 3"),
        (torch.zeros(3, 3), "12 queries"),
    ],
    ids=["number", "nan", "function", "one pair", "shape"],
)
def test_distances_that_are_none_are_refused(distance, said):
    with pytest.raises(InputError, match=said):
        scores_at(*random_head(), ROPES["half"], SCALE, distance)
    with pytest.raises(InputError, match="0 or more"):
        scores_frozen_beyond(*random_head(), ROPES["half"], SCALE, -1)
