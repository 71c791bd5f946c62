"""Rankings of keys and what they keep, against brute force one query and key at a time."""

import pytest
import torch
from drawn import normal, token_ids, visible

from tl_posgen.rope.planes import turning_factors
from tl_posgen.rope.rotation import Rope, complex_planes, inverse_frequencies
from tl_posgen.rules.numbers import (
    RULES,
    Means,
    best_keys,
    drawn_scores,
    kept_keys,
    rule_scores,
)

ROPE = Rope(inverse_frequencies(4, 10.0), scaling=1.3)  # of six numbers, two do not rotate
HEADS, N, SCALE, SLOPES = 2, 9, 0.7, torch.tensor([0.2, 0.0], dtype=torch.float64)
BIAS = -SLOPES[:, None, None] * (torch.arange(N)[:, None] - torch.arange(N))  # as ALiBi adds it
VISIBLE = visible(N)


@pytest.fixture(scope="module")
def drawn():
    return *(1 + normal(2, HEADS, N, 6)), Means(*normal(2, HEADS, 6, seed=1), N)


def product(q, k, turn):
    """scale Re sum_m z^q_m conj(z^k_m) u_m."""
    zq, zk = (complex_planes(x, ROPE) for x in (q, k))
    return SCALE * (zq * zk.conj() * turn).real.sum()


def brute(rule, q, k, means, head, i, j):
    u, every = turning_factors(torch.tensor([i - j]), ROPE, 6)[0], turning_factors(torch.arange(N), ROPE, 6)
    ubar = sum(one / (d + 1) for d, one in enumerate(every)) / sum(1 / (d + 1) for d in range(N))
    q_mean, k_mean, e = means.q[head], means.k[head], k[head, j] - means.k[head]
    d, key = product(q_mean, k_mean, u), product(q_mean, e, ubar)
    slope = SLOPES[head] * (i - j)
    return {
        "window": j - i,
        "sinks": 4 - j if j < 4 else j - i,
        "slashes": d - slope,
        "vertical": round(key.item() * 1024) / 1024,
        "slashes_and_vertical": d + key - slope,
        "mean_query": product(q_mean, k[head, j], u) - slope,
        "position_and_content": product(q[head, i], k_mean, u) + product(q[head, i], e, ubar) - slope,
    }[rule]


@pytest.mark.parametrize("rule", RULES)
def test_ranks_are_those_of_every_query_and_key(rule, drawn):
    q, k, means = drawn
    found = rule_scores(rule, q, k, means, ROPE, SCALE, BIAS)
    for head, i in ((0, 0), (0, 8), (1, 5)):
        expected = [brute(rule, q, k, means, head, i, j) for j in range(i + 1)]
        torch.testing.assert_close(found[head, i, : i + 1], torch.as_tensor(expected, dtype=torch.float64))
    last = rule_scores(rule, q[:, -2:], k, means, ROPE, SCALE, BIAS[:, -2:])
    torch.testing.assert_close(last[:, VISIBLE[-2:]], found[:, -2:][:, VISIBLE[-2:]])


def test_the_mean_query_over_all_queries_is_the_mean_score(drawn):
    """d + k + kd: what is left of a score when its query is averaged away."""
    q, k, means = drawn
    means = [Means(one, means.k, N) for one in (*q.unbind(1), q.mean(1))]
    *every, own = (rule_scores("mean_query", q, k, one, ROPE, SCALE) for one in means)
    torch.testing.assert_close(torch.stack(every).mean(0), own)


def test_kept_and_best_keys_are_those_of_a_sorted_list():
    scores = token_ids(3, N, N, low=-2, high=2) * -0.25  # with equals, and with -0.0 and 0.0
    scores[0] = normal(N, N) * 1e30
    scores[1, :, 3] = -torch.inf
    for budget in (1, 3, 20):
        kept, best = kept_keys(scores, VISIBLE, budget), best_keys(scores, VISIBLE, budget)
        for head in range(3):
            for i in range(N):
                expected = sorted(range(i + 1), key=lambda j: (scores[head, i, j].item(), j))[-budget:]
                assert {*expected} <= {*best[head, i].tolist()}
                assert len({*best[head, i].tolist()}) == min(budget, N)
                assert kept[head, i].nonzero()[:, 0].tolist() == sorted(expected)


def test_draws_are_even_and_know_head_query_key_and_seed():
    heads = torch.arange(3)
    drawn = drawn_scores(heads, 200, 200, 0)
    assert abs(drawn.mean() - 0.5) < 0.01
    assert abs(drawn.std() - 12**-0.5) < 0.01
    for other in (drawn_scores(heads, 200, 200, 1), drawn[[1, 2, 0]], drawn.mT, drawn.roll(1, 1), drawn.roll(1, 2)):
        away = ~torch.eye(200, dtype=torch.bool)
        assert abs(torch.corrcoef(torch.stack([drawn[:, away].ravel(), other[:, away].ravel()]))[0, 1]) < 0.02
    torch.testing.assert_close(drawn_scores(heads[1:], 2, 150, 0), drawn[1:, 148:150, :150])


def test_heads_and_seeds_share_no_draws():
    heads = torch.arange(6)
    found = [drawn_scores(heads, 20, 20, seed) for seed in (0, 1, 2, 2**31, 2**32 - 1)]
    rows = torch.cat(found).flatten(1)
    assert len(torch.unique(rows, dim=0)) == len(rows)
    assert torch.corrcoef(rows).fill_diagonal_(0).abs().max() < 0.2
