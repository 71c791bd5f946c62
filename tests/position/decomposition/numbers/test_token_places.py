"""Where tokens stand: covariance that prompts share at a position, against brute force and known truth."""

from itertools import permutations

import pytest
import torch
from drawn import normal
from hypothesis import given, settings
from hypothesis import strategies as st
from rotated_heads import scores_at_every

from tl_posgen.errors import InputError
from tl_posgen.position.decomposition.numbers.token_places import PLACES, PlaceSums, shares_by_place
from tl_posgen.position.decomposition.numbers.variance_shares import COMPONENTS, TripleMoments, variance_shares
from tl_posgen.rope.planes import SecondMoments
from tl_posgen.rope.rotation import Rope, complex_planes, inverse_frequencies

ROPES = [Rope(inverse_frequencies(6, 50.0)), Rope(inverse_frequencies(4, 50.0), "adjacent", 1.4), Rope()]


def prompts(n: int, heads: int, n_tokens: int, d_head: int, place: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """[prompt, head, pos, d_head]: places, and text that a token shares with its neighbour and with its prompt."""
    text = normal(n, heads, n_tokens + 1, d_head, seed=seed)
    topic = 0.8 * normal(n, heads, 1, d_head, seed=seed + 1)
    return 2 + place + topic + text[:, :, 1:] + 0.7 * text[:, :, :-1]


def sums_of(x: torch.Tensor, rope: Rope) -> PlaceSums:
    """The sums over prompts of x [prompt, head, pos, d_head], prompt by prompt."""
    found = None
    for one in x:
        both = [TripleMoments.from_qk(one, one, rope, first_token=first).k.about_mean for first in (True, False)]
        found = PlaceSums(1, one, both) if found is None else found + PlaceSums(1, one, both)
    assert found is not None
    return found


def covariance(x: torch.Tensor, rope: Rope) -> SecondMoments:
    """Of x [head, sample, d_head]."""
    z = complex_planes(x, rope)
    return SecondMoments.from_samples(z - z.mean(1, keepdim=True))


@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(2, 5),
    n_tokens=st.integers(2, 6),
    d_head=st.integers(4, 7),
    first=st.integers(0, 1),
    kind=st.integers(0, 2),
)
def test_shared_moments_are_those_of_two_prompts_at_one_position(n, n_tokens, d_head, first, kind):
    rope = ROPES[kind] if d_head > 5 else ROPES[2]
    x = prompts(n, 2, n_tokens, d_head, normal(2, n_tokens, d_head, seed=7))
    y = complex_planes(x[:, :, first:] - x[:, :, first:].mean(2, keepdim=True), rope)
    pairs = list(permutations(range(n), 2))
    found = sums_of(x, rope).shared(rope, first)
    for moments, conj in ((found.plain, False), (found.conjugate, True)):
        products = [torch.einsum("htl,htm->hlm", y[a], y[b].conj() if conj else y[b]) for a, b in pairs]
        torch.testing.assert_close(moments, sum(products) / (len(pairs) * y.shape[2]), atol=1e-12, rtol=1e-9)


def replicates_of(place: torch.Tensor, n: int, shuffled: bool = False) -> torch.Tensor:
    """G [replicate, ...] over n prompts whose places are known; a replicate stands as a head."""
    x = prompts(n, 600, *place.shape, place)
    if shuffled:
        order = normal(n, 600, len(place), seed=5).argsort(-1)
        x = x.gather(2, order[..., None].expand_as(x))
    found = sums_of(x, ROPES[0]).shared(ROPES[0])
    return torch.stack([found.plain, found.conjugate], 1)


@pytest.mark.parametrize("shuffled", [False, True])
def test_shared_moments_are_unbiased_and_vanish_where_tokens_are_shuffled(shuffled):
    place = 0.5 * normal(10, 6, seed=3)
    found = replicates_of(place, 8, shuffled)
    truth = covariance(place[None], ROPES[0])
    expected = torch.stack([truth.plain[0], truth.conjugate[0]]) * (0 if shuffled else 1)
    off = torch.view_as_real(found.mean(0) - expected)
    error = torch.view_as_real(found).std(0) / len(found) ** 0.5
    assert bool((off.abs() <= 4 * error + 1e-12).all())
    assert float(error.max()) < 0.02 < 0.1 < float(torch.view_as_real(expected).abs().max()) + shuffled


@pytest.mark.parametrize("rope", ROPES)
def test_shares_by_place_are_mean_squares_of_w_of_place_and_text(rope):
    """Every place meets every text, so that the covariance of their sums is the sum of their covariances."""
    place, text = ({side: normal(2, 4, 7, seed=seed + n) for n, side in enumerate("qk")} for seed in (0, 10))
    x = {side: 1 + (place[side][:, :, None] + text[side][:, None]).flatten(1, 2) for side in "qk"}
    moments = TripleMoments.from_qk(x["q"], x["k"], rope)
    shares = variance_shares(moments, rope, 0.6, 5)
    shared = {side: covariance(place[side], rope) for side in "qk"}
    found = shares_by_place(shares, moments, shared, rope, 0.6, 5)
    centred = {"place": place, "text": text}
    parts = {
        (kind, side): one[side] - one[side].mean(1, keepdim=True) for kind, one in centred.items() for side in "qk"
    }
    mean = {side: x[side].mean(1, keepdim=True) for side in "qk"}
    for row, component in enumerate(COMPONENTS):
        for column, sides in enumerate(PLACES.values()):
            q, k = (
                parts["place" if side in sides else "text", side] if side in component else mean[side] for side in "qk"
            )
            w = 0.6 * scores_at_every(range(5), q, k, rope)
            w = w - w.mean(-1, keepdim=True) if "d" in component else w.mean(-1, keepdim=True)
            expected = w.square().mean((1, 2, 3)) * (set(sides) <= set(component))
            torch.testing.assert_close(found[:, row, column] * shares.total, expected, atol=1e-12, rtol=1e-9)


def test_shares_by_place_add_up_to_the_shares_and_a_constant_head_has_none():
    rope, x = ROPES[0], prompts(8, 2, 9, 6, normal(9, 6, seed=4))
    x[:, 1] = 1.0
    moments = TripleMoments.from_qk(*[x.movedim(1, 0).flatten(1, 2)] * 2, rope)
    shared = dict.fromkeys("qk", sums_of(x, rope).shared(rope))
    for n_distances in (9, 1):  # at one distance nothing of a constant head varies
        shares = variance_shares(moments, rope, 0.3, n_distances, weights="causal")
        found = shares_by_place(shares, moments, shared, rope, 0.3, n_distances, "causal")
        torch.testing.assert_close(found.sum(-1), shares.shares, equal_nan=True)
    assert [bool(head.isnan().any()) for head in found] == [False, True]
    assert bool(found[1].isnan().all())


def test_prompts_of_two_lengths_share_no_positions():
    one, two = (sums_of(prompts(1, 1, n, 6, torch.zeros(6)), ROPES[0]) for n in (4, 5))
    with pytest.raises(InputError, match="4 and 5 tokens"):
        _ = one + two
