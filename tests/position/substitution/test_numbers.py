"""Splits against pair-by-pair formulas and against least squares over the full product, in float64."""

import math

import pytest
import torch
from drawn import normal, visible
from hypothesis import given, settings
from hypothesis import strategies as st
from rotated_heads import ROPES, captures_of, scores_at_every, true_distances

from tl_posgen.errors import InputError
from tl_posgen.models.tokens import prompts_of_one_length
from tl_posgen.position.decomposition.numbers.variance_shares import TripleMoments, variance_shares
from tl_posgen.position.decomposition.three_axis import fit_capture
from tl_posgen.position.substitution.hooks import all_positions, by_split, by_three_axis, near
from tl_posgen.position.substitution.numbers import (
    add_residual,
    attention_kl,
    below_quantile,
    positional_profile,
    running_mean_key,
    split_maps,
)
from tl_posgen.rope.rotation import Rope, inverse_frequencies, rotate
from tl_posgen.rope.scores_at import scores_at_positions
from tl_posgen.rope.splits import (
    DistanceDistribution,
    attention_profile,
    point_mass,
    split_scores,
    triangle,
    uniform,
)

SCALE, N, D_HEAD = 0.3, 9, 8
DISTRIBUTIONS = {
    "point": point_mass(1000),
    "triangle": triangle(5),
    "uniform": uniform(7),
    "fractional": DistanceDistribution(torch.tensor([0.5, 3.0]), torch.tensor([0.25, 0.75], dtype=torch.float64)),
    "per head": triangle(torch.tensor([2.0, 4.5])),
}
VISIBLE = visible(N)


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return normal(*shape, seed=seed) + 0.3


@pytest.fixture
def head() -> tuple[torch.Tensor, torch.Tensor]:
    return random_tensor(2, N, D_HEAD, seed=0), random_tensor(2, N, D_HEAD, seed=1)


def scores_over_distances(q, x, rope, distances):
    """[head, distance, query, key]"""
    return scores_at_every(distances, q, x, rope, SCALE).movedim(-1, 1)


@pytest.mark.parametrize("other_key", [False, True])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS.keys())
def test_the_parts_equal_their_formulas_pair_by_pair(rope, distribution, other_key, head):
    q, k = head
    reference, position = k[:, :1] if other_key else k.mean(1, keepdim=True), torch.arange(N)
    weights = distribution.weights.expand(2, -1)
    expected = scores_at_positions(q, reference.expand_as(k), rope, SCALE, position, position)
    content = scores_over_distances(q, k - reference, rope, distribution.distances.tolist())
    turn = distribution.mean_turn(rope, D_HEAD).expand(2, -1)
    for either in (distribution, turn):
        split = split_scores(q, k, rope, SCALE, either, k[:, 0] if other_key else None)
        torch.testing.assert_close(split.position, expected)
        torch.testing.assert_close(split.content, torch.einsum("hd,hdij->hij", weights, content))


def test_no_other_split_is_closer_over_the_full_product(head):
    """Projection of w(q, k, d) on f(q, d) + g(q, k) under p: E[w | q, d] + E[w | q, k] - E[w | q]."""
    q, k = head
    distribution, rope = triangle(6), ROPES["half"]
    w = scores_over_distances(q, k, rope, distribution.distances.tolist())
    p = distribution.weights[None, :, None, None]
    over_keys, over_distances = w.mean(-1, keepdim=True), (p * w).sum(1, keepdim=True)
    best = over_keys + over_distances - over_distances.mean(-1, keepdim=True)
    mean = k.mean(1, keepdim=True)
    f = scores_over_distances(q, mean, rope, distribution.distances.tolist())
    g = split_scores(q, k, rope, SCALE, distribution).content[:, None]
    torch.testing.assert_close(f + g, best)


def test_a_positional_profile_is_the_softmax_of_the_position_part_and_splits_query_by_query(rope, head):
    q, k = head
    distribution = positional_profile(q, k, rope, SCALE)
    f = scores_over_distances(q, k.mean(1, keepdim=True), rope, range(N))[..., 0]
    torch.testing.assert_close(distribution.weights, f.softmax(1).mT)
    found = split_scores(q, k, rope, SCALE, distribution)
    for i in range(N):
        own = DistanceDistribution(distribution.distances, distribution.weights[:, i])
        torch.testing.assert_close(found.content[:, i], split_scores(q, k, rope, SCALE, own).content[:, i])


def test_without_the_query_the_authors_simplified_logits_remain(mini, alice):
    """`k_q_simplify`: <R_d qbar, kbar> + <mean_t R_t qbar, k_j>, but for a constant a head, which softmax ignores."""
    found = {}
    for capture in captures_of(mini, prompts_of_one_length(mini, alice, N, 1)):
        q, k, n, geometry = capture.q.double(), capture.k.double(), capture.length, capture.geometry
        mean_q, mean_k = q.mean(1, keepdim=True), k.mean(1, keepdim=True)
        turned = rotate(mean_q.expand(-1, n, -1), torch.arange(n), geometry.rope)
        position = geometry.scale * (turned @ mean_k.mT)[..., 0]
        content = geometry.scale * (turned.mean(1, keepdim=True) @ k.mT)
        gap = (by_split(all_positions, query="mean")(capture) - position[:, true_distances(n)] - content)[:, VISIBLE]
        found[capture.layer] = float((gap - gap.mean(1, keepdim=True)).abs().max() / position.abs().max())
    assert len(found) == mini.cfg.n_layers
    assert max(found.values()) < 1e-5


def test_the_mean_query_over_near_distances_is_the_split_of_the_mean_query(mini, alice):
    for capture in captures_of(mini, prompts_of_one_length(mini, alice, N, 1)):
        q = capture.q.mean(1, keepdim=True).expand_as(capture.q)
        scores = by_split(uniform(4), query="mean")(capture)
        split = split_scores(q, capture.k, capture.geometry.rope, capture.geometry.scale, uniform(4))
        torch.testing.assert_close(scores, split.scores)
        second = scores[:, 1:, 1:] - scores[:, :-1, :-1]  # of a(i - j) + c(j) it is a function of the key alone
        torch.testing.assert_close(second, second[:, -1:].expand_as(second), atol=1e-4, rtol=0)


@pytest.mark.parametrize("weights", [None, near(3), "attention"], ids=str)
def test_weighted_fits_stand_in_as_the_measure_fits_them(mini, alice, weights):
    for capture in captures_of(mini, prompts_of_one_length(mini, alice, N, 1)):
        fit = fit_capture(capture, weights=weights)[0]
        expected = fit.fitted(capture.positions, capture.positions)[:, VISIBLE]
        found = by_three_axis(capture, weights)[:, VISIBLE]
        torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=1e-4)


def test_a_mean_key_per_query_equals_one_split_per_query(rope, head):
    q, k = head
    running = running_mean_key(k)
    found = split_scores(q, k, rope, SCALE, triangle(4), mean_key=running)
    for i in range(N):
        expected = split_scores(q, k, rope, SCALE, triangle(4), mean_key=running[:, i])
        torch.testing.assert_close(found.position[:, i], expected.position[:, i])
        torch.testing.assert_close(found.content[:, i], expected.content[:, i])


@pytest.mark.parametrize("window", [None, 1, 4, N, 50])
def test_running_mean_key_is_the_mean_of_the_visible_keys(head, window):
    _, k = head
    found = running_mean_key(k, window)
    for i in range(N):
        first = 0 if window is None else max(0, i - window + 1)
        torch.testing.assert_close(found[:, i], k[:, first : i + 1].mean(1))


@settings(max_examples=20, deadline=None)
@given(width=st.floats(0.1, 300), other=st.floats(0.1, 300))
def test_a_triangle_is_a_distribution_that_falls_with_distance(width, other):
    distribution, both = triangle(width), triangle(torch.tensor([width, other], dtype=torch.float64))
    assert abs(distribution.weights.sum().item() - 1) < 1e-12
    assert (distribution.weights.diff() < 0).all()
    assert distribution.distances.max() < width
    torch.testing.assert_close(both.weights[0, : len(distribution.distances)], distribution.weights)
    assert (both.weights[0, len(distribution.distances) :] == 0).all()


@pytest.mark.parametrize(
    ("distribution", "distances", "weights"),
    [(uniform(4), [0, 1, 2, 3], [0.25] * 4), (triangle(1), [0], [1]), (point_mass(0), [0], [1])],
)
def test_simple_distributions_have_their_weights(distribution, distances, weights):
    assert (distribution.distances.tolist(), distribution.weights.tolist()) == (distances, weights)


def test_attention_profile_is_the_mean_of_each_diagonal():
    pattern = random_tensor(2, N, N).masked_fill(~VISIBLE, -torch.inf).softmax(-1)
    distribution = attention_profile(pattern)
    expected = torch.stack([pattern.diagonal(-d, 1, 2).sum(-1) for d in range(N)], 1) / N
    torch.testing.assert_close(distribution.weights, expected)


def test_residual_share_runs_from_the_split_to_the_exact_scores():
    exact, approximate = random_tensor(2, N, N, seed=0), random_tensor(2, N, N, seed=1)
    masked = exact.masked_fill(~VISIBLE, -torch.inf)
    assert torch.equal(add_residual(approximate, masked, 0), approximate)
    torch.testing.assert_close(add_residual(approximate, masked, 1)[:, VISIBLE], exact[:, VISIBLE])
    torch.testing.assert_close(add_residual(approximate, exact, 0.25), 0.75 * approximate + 0.25 * exact)


@settings(max_examples=30, deadline=None)
@given(gamma=st.floats(0, 1), seed=st.integers(0, 999))
def test_each_head_replaces_its_own_gamma_share_of_the_smallest_scores(gamma, seed):
    scores = random_tensor(2, N, N, seed=seed) * torch.tensor([1.0, 9.0])[:, None, None]
    replaced = below_quantile(scores.masked_fill(~VISIBLE, -torch.inf), VISIBLE, gamma)
    n = int(VISIBLE.sum())
    assert not replaced[:, ~VISIBLE].any()
    for head in range(2):
        assert abs(replaced[head].sum().item() - gamma * n) <= 1
        kept = VISIBLE & ~replaced[head]
        if kept.any() and replaced[head].any():
            assert scores[head][replaced[head]].max() < scores[head][kept].min()


@settings(max_examples=30, deadline=None)
@given(gamma=st.floats(0.2, 0.99), seed=st.integers(0, 999))
def test_one_threshold_a_layer_is_a_quantile_of_the_last_row_of_the_first_head(gamma, seed):
    scores = random_tensor(3, N, N, seed=seed) * torch.tensor([1.0, 9.0, 0.1])[:, None, None]
    replaced = below_quantile(scores.masked_fill(~VISIBLE, -torch.inf), VISIBLE, gamma, "layer")
    threshold = sorted(scores[0, -1].tolist())[int(gamma * N) - 1]
    assert torch.equal(replaced, (scores <= threshold) & VISIBLE)


@pytest.mark.parametrize("threshold", ["head", "layer"])
@pytest.mark.parametrize("gamma", [0, 1])
def test_gamma_zero_replaces_nothing_and_one_everything(gamma, threshold):
    assert (below_quantile(random_tensor(2, N, N), VISIBLE, gamma, threshold)[:, VISIBLE] == bool(gamma)).all()


def test_attention_kl_equals_the_definition_and_ignores_a_row_constant():
    exact, approximate = random_tensor(2, N, N, seed=0), random_tensor(2, N, N, seed=1)
    p, q = (x[1, 4, :5].softmax(-1) for x in (exact, approximate))
    kl = attention_kl(exact, approximate + random_tensor(2, N, 1, seed=2), VISIBLE)
    torch.testing.assert_close(kl[1, 4], (p * (p / q).log()).sum())


def test_float32_heads_split_in_float32_close_to_float64(rope, head):
    q, k = head
    single = split_scores(q.float(), k.float(), rope, SCALE, point_mass(1000)).scores
    assert single.dtype == torch.float32
    exact = split_scores(q, k, rope, SCALE, point_mass(1000)).scores
    torch.testing.assert_close(single.double(), exact, rtol=1e-5, atol=1e-5)


def test_gradients_reach_the_distribution_so_that_it_can_be_searched(head):
    q, k = head

    def energy(logits):
        distribution = DistanceDistribution(torch.arange(3), logits.softmax(-1))
        return split_scores(q, k, ROPES["half"], SCALE, distribution).scores.square().sum()

    logits, direction = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True), random_tensor(2, 3)
    (gradient,) = torch.autograd.grad(energy(logits), logits)
    step = 1e-5 * direction
    slope = (energy(logits + step) - energy(logits - step)) / 2e-5
    torch.testing.assert_close((gradient * direction).sum(), slope.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: point_mass(-1), "0 or more"),
        (lambda: triangle(0), "above 0"),
        (lambda: triangle(torch.tensor([3.0, -1.0])), "above 0"),
        (lambda: uniform(0), "1 or more"),
        (lambda: below_quantile(torch.zeros(1, 2, 2), torch.ones(2, 2).bool(), 1.5), "outside"),
    ],
)
def test_bad_input_is_refused(call, match):
    with pytest.raises(InputError, match=match):
        call()


def by_hand(q, k, rope, scale, n_distances):
    """f and g, every pair on its own."""
    n, kbar = len(q), k[1:].mean(0)

    def at(x, place):
        return rotate(x[None], torch.tensor([place]), rope)[0]

    f = [[scale * at(q[i], i) @ at(kbar, j) for j in range(n)] for i in range(n)]
    turned = [torch.stack([at(q[i], d) for d in range(n_distances)]).mean(0) for i in range(n)]
    g = [[scale * turned[i] @ at(k[j] - kbar, 0) for j in range(n)] for i in range(n)]
    return torch.tensor(f), torch.tensor(g)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 999), window=st.sampled_from([None, 1, 3, 20]), rotary=st.sampled_from([2, 4, 6]))
def test_they_are_f_and_g_within_rows(seed, window, rotary):
    rope, n, scale = Rope(inverse_frequencies(rotary)), 7, 0.3
    q, k = 1 + normal(2, 1, n, 6, seed=seed)
    turned_q, turned_k = (rotate(x, torch.arange(n), rope) for x in (q, k))
    distance, seen = true_distances(n), visible(n, window)
    scores = (scale * turned_q @ turned_k.mT - 0.1 * distance).masked_fill(~seen, -torch.inf)
    found = split_maps(scores, q, k, rope, scale, window=window, bias=-0.1 * distance[None])
    f, g = by_hand(q[0], k[0], rope, scale, min(n, window or n))
    expected = {"scores": scores[0], "position": f - 0.1 * distance, "content": g}
    flat = []
    for name, one in expected.items():
        mine, values = getattr(found, name)[0], []
        for i in range(n):
            keys = [j for j in range(1, n) if seen[i, j]] if i else []
            row = one[i, keys].double() - one[i, keys].double().mean()
            torch.testing.assert_close(mine[i, keys], row, atol=1e-6, rtol=1e-6)
            assert mine[i, [j for j in range(n) if j not in keys]].isnan().all()
            values.append(row)
        flat.append(torch.cat(values))
    if window == 1:
        assert found.r.isnan().all()
        return
    w, *parts = flat
    for r, part in zip(found.r[:, 0], (*parts, sum(parts)), strict=True):
        assert float(r) == pytest.approx(float(torch.corrcoef(torch.stack([w, part]))[0, 1]), abs=1e-6)


def test_over_every_triple_they_hold_what_variance_calls_position_and_content():
    """f(q, d) and g(q, k) of all queries, keys and distances, each less its mean over what it does not share."""
    rope, n = Rope(inverse_frequencies(4)), 6
    q, k = 0.5 + normal(2, 1, n, 4)
    shares = variance_shares(TripleMoments.from_qk(q, k, rope, first_token=False), rope, 1.0, n).within_rows
    _, g = by_hand(q[0], k[0], rope, 1.0, n)
    at = torch.stack([rotate(q[0, 1:], torch.full((n - 1,), d), rope) for d in range(n)], 1)  # [query, distance, d]
    kbar, w = k[0, 1:].mean(0), at @ k[0, 1:].T
    by_distance, by_key = at @ kbar, g[1:, 1:]
    total = (w - w.mean((1, 2), keepdim=True)).square().mean()
    position = (by_distance - by_distance.mean(1, keepdim=True)).square().mean()
    content = (by_key - by_key.mean(1, keepdim=True)).square().mean()
    assert float(shares.share("d", "qd")) == pytest.approx(float(position / total))
    assert float(shares.share("k", "qk")) == pytest.approx(float(content / total))


def test_each_head_has_correlations_of_its_own():
    rope, both = Rope(inverse_frequencies(4)), 0.5 + normal(2, 2, 6, 4)
    scores = (both[0] @ both[1].mT).masked_fill(~visible(6), -torch.inf)
    together = split_maps(scores, *both, rope, 0.5).r
    alone = [split_maps(scores[[head]], *both[:, [head]], rope, 0.5).r for head in range(2)]
    torch.testing.assert_close(together, torch.cat(alone, 1))


@pytest.mark.parametrize("n", [2, 3])
def test_where_rows_do_not_vary_there_is_no_correlation(n):
    q, rope = torch.ones(1, n, 2), Rope(torch.zeros(1, dtype=torch.float64))
    assert all(math.isnan(r) for r in split_maps(q @ q.mT, q, q, rope, 1.0).r.flatten().tolist())
