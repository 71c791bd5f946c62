"""Shares by pair of bias and rest against brute force over every triple (query, key, distance)."""

from itertools import product

import pytest
import torch
from drawn import normal
from rotated_heads import scores_at_every

from tl_posgen.position.decomposition.numbers.bias_pairs import PAIRS, bias_pair_shares
from tl_posgen.position.decomposition.numbers.variance_shares import PARTS, TripleMoments, variance_shares
from tl_posgen.rope.rotation import Rope, inverse_frequencies

ROPES = {
    "half": (Rope(inverse_frequencies(6, 50.0)), 6),
    "adjacent": (Rope(inverse_frequencies(6, 50.0), pairing="adjacent"), 6),
    "partial, odd rest, scaled": (Rope(inverse_frequencies(4, 50.0), scaling=1.4), 7),
    "no planes": (Rope(), 6),
}
AXES = {"q": 1, "k": 2, "d": 3}


def component(w: torch.Tensor, name: str, p: torch.Tensor) -> torch.Tensor:
    """The Hoeffding component of w [head, query, key, distance], by means over whole axes."""
    for axis in AXES:
        mean = (w * p).sum(3, keepdim=True) if axis == "d" else w.mean(AXES[axis], keepdim=True)
        w = (w - mean if axis in name else mean).expand_as(w)
    return w


@pytest.mark.parametrize("weights", ["uniform", "causal"])
@pytest.mark.parametrize(("rope", "d_head"), ROPES.values(), ids=ROPES.keys())
def test_covariances_and_variances_of_every_pair_equal_brute_force(rope, d_head, weights):
    n, heads, scale = 5, 2, 0.3
    rest = [normal(heads, 6, d_head, seed=seed) + 0.4 for seed in (0, 1)]
    bias = [normal(heads, d_head, seed=seed) for seed in (2, 3)]
    q, k = (x + b[:, None] for x, b in zip(rest, bias, strict=True))
    found = bias_pair_shares(TripleMoments.from_qk(q, k, rope), *bias, rope, scale, n, weights=weights)

    p = (torch.ones(n) if weights == "uniform" else torch.arange(n, 0.0, -1)).double()
    p = p / p.sum()
    sides = [{"bias": b[:, None].expand_as(x), "rest": x} for x, b in zip(rest, bias, strict=True)]
    of_pair = {
        pair: scores_at_every(range(n), *(side[one] for side, one in zip(sides, pair.split("-"), strict=True)), rope)
        * scale
        for pair in PAIRS
    }
    w = scores_at_every(range(n), q, k, rope, scale)
    torch.testing.assert_close(sum(of_pair.values()), w, rtol=0, atol=1e-12)

    def covariance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * y * p).sum(3).mean((1, 2))

    visible = [name for part in PARTS.values() for name in part]
    seen = sum(covariance(component(w, name, p), component(w, name, p)) for name in visible)
    for (at, pair), (of, part) in product(enumerate(PAIRS), enumerate(PARTS)):
        parts = [(component(of_pair[pair], name, p), component(w, name, p)) for name in PARTS[part]]
        share = sum(covariance(*both) for both in parts) / seen
        alone = sum(covariance(one, one) for one, _ in parts) / seen
        torch.testing.assert_close(found.share[:, at, of], share, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.alone[:, at, of], alone, rtol=1e-9, atol=1e-12)


def test_over_pairs_shares_add_up_to_those_of_the_scores_and_without_biases_the_rest_is_all():
    rope, _ = ROPES["half"]
    q, k = normal(2, 9, 6, seed=4) + 0.5, normal(2, 9, 6, seed=5) - 0.2
    moments, none = TripleMoments.from_qk(q, k, rope), torch.zeros(2, 6).double()
    whole = variance_shares(moments, rope, 0.3, 7).within_rows
    parts = torch.stack([whole.share(*components) for components in PARTS.values()], -1)
    with_biases = bias_pair_shares(moments, normal(2, 6, seed=6), normal(2, 6, seed=7), rope, 0.3, 7)
    torch.testing.assert_close(with_biases.share.sum(1), parts)
    without = bias_pair_shares(moments, none, none, rope, 0.3, 7)
    torch.testing.assert_close(without.share[:, PAIRS.index("rest-rest")], parts)
    torch.testing.assert_close(without.alone, without.share)
    assert not without.share[:, : PAIRS.index("rest-rest")].any()
