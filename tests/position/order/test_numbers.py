"""Properties of any set of swaps and of any jitter, for any seed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rotated_heads import true_distances

from tl_posgen.errors import InputError
from tl_posgen.position.order.numbers import jittered_distances, swap_tokens, swap_words

REACHES = st.sampled_from(["adjacent", "window", "uniform"])
RATIOS = st.floats(0, 1)
TWO_RATIOS = st.tuples(RATIOS, RATIOS).map(sorted)
SEEDS = st.integers(0, 2**31)
LENGTHS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), min_size=2, max_size=30)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), n=st.integers(1, 80), ratios=TWO_RATIOS, reach=REACHES, seed=SEEDS, window=st.integers(1, 12))
def test_swaps_are_a_self_inverse_permutation_that_moves_exactly_what_it_says(data, n, ratios, reach, seed, window):
    protected = data.draw(st.sets(st.integers(0, n - 1), max_size=8))
    few, many = (swap_tokens(n, one, reach, seed=seed, window=window, protected=protected) for one in ratios)
    identity, furthest = torch.arange(n), {"adjacent": 1, "window": window, "uniform": n}[reach]
    for swaps in (few, many):
        assert torch.equal(swaps.permutation[swaps.permutation], identity)
        assert torch.equal(swaps.moved, swaps.permutation != identity)
        assert swaps.ratio == 2 * len(swaps.pairs) / n
        assert (swaps.permutation - identity).abs().max() <= furthest
        assert not swaps.moved[list(protected)].any()
    assert torch.equal(few.pairs, many.pairs[: len(few.pairs)])  # a higher ratio adds to the swaps of a lower one


@settings(max_examples=40, deadline=None)
@given(ratio=st.floats(0, 0.5), reach=REACHES, seed=SEEDS)
def test_the_ratio_is_met_to_one_token_up_to_a_half(ratio, reach, seed):
    assert abs(swap_tokens(100, ratio, reach, seed=seed).ratio - ratio) <= 0.01 + 1e-12


def test_ratio_one_moves_every_free_token_when_partners_may_be_anywhere_and_zero_none():
    assert swap_tokens(51, 1, "uniform", seed=3).ratio == 50 / 51
    assert swap_tokens(50, 0, seed=3).permutation.tolist() == list(range(50))


@pytest.mark.parametrize(("reach", "window"), [("adjacent", 1), ("window", 4)])
def test_near_swaps_go_on_until_no_free_pair_is_left(reach, window):
    left = (~swap_tokens(200, 1, reach, seed=0, window=window, protected=()).moved).nonzero()[:, 0]
    assert (left.diff() > window).all()


def test_seeds_differ_and_repeat_and_leave_the_global_generator_alone():
    before = torch.random.get_rng_state()
    first, again, other = (swap_tokens(100, 0.3, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.permutation, again.permutation)
    assert not torch.equal(first.permutation, other.permutation)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_window_swaps_at_every_distance_up_to_its_width():
    gaps = torch.cat([swap_tokens(200, 0.2, "window", seed=seed, window=3).pairs.diff().abs() for seed in range(20)])
    counts = gaps.flatten().bincount(minlength=4)[1:]
    assert (counts > 0.25 * counts.sum()).all()


def test_every_place_but_the_first_is_equally_likely_to_move():
    moved = sum(swap_tokens(20, 0.3, "uniform", seed=seed).moved.double() for seed in range(400)) / 400
    torch.testing.assert_close(moved[1:], torch.full((19,), 6 / 19, dtype=torch.float64), atol=0.1, rtol=0)
    assert moved[0] == 0  # protected unless set free
    assert any(swap_tokens(4, 1, seed=seed, protected=()).moved[0] for seed in range(20))


def test_a_draw_depends_on_how_many_places_are_free_and_not_on_where_they_lie():
    late, early = swap_tokens(40, 1, seed=0, protected=range(30)), swap_tokens(10, 1, seed=0, protected=())
    assert torch.equal(late.pairs, early.pairs + 30)


@settings(max_examples=80, deadline=None)
@given(lengths=LENGTHS, ratios=TWO_RATIOS, reach=REACHES, seed=SEEDS)
def test_swapped_words_stay_whole_and_change_places_with_their_partners(lengths, ratios, reach, seed):
    words, n = [], 0
    for gap, length in lengths:  # words of given lengths, each after a gap of given length
        words.append((n + gap, n + gap + length))
        n += gap + length
    few, swaps = (swap_words(n, words, ratio, reach, seed=seed, window=3) for ratio in ratios)
    assert torch.equal(few.pairs, swaps.pairs[: len(few.pairs)])
    order = swaps.permutation.tolist()
    assert sorted(order) == list(range(n))
    expected = list(range(len(words)))
    for one, other in swaps.pairs.tolist():
        expected[one], expected[other] = other, one
    assert [number for token in order for number, (start, _) in enumerate(words) if token == start] == expected
    for number, (start, stop) in enumerate(words):
        at = order.index(start)
        assert order[at : at + stop - start] == list(range(start, stop))
        assert swaps.moved[at : at + stop - start].tolist() == [expected[number] != number] * (stop - start)
    still = [token for token, moved in zip(order, swaps.moved.tolist(), strict=True) if not moved]
    assert still == sorted(still)


def test_a_word_with_a_protected_token_stays():
    swaps = swap_words(6, [(0, 2), (2, 4), (4, 6)], 1, seed=0, protected=[3])
    assert swaps.permutation.tolist() == [4, 5, 2, 3, 0, 1]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"ratio": -0.1}, "outside"),
        ({"ratio": 1.1}, "outside"),
        ({"ratio": float("nan")}, "outside"),
        ({"protected": [10]}, "position 10"),
        ({"protected": 5}, r"protected=.*: give positions"),
        ({"protected": [0.5]}, r"protected=.*: give positions"),
        ({"reach": "window", "window": 0}, "swaps: .*window.*1 or more"),
        ({"words": [(0, 2), (1, 3)]}, "word 1"),
        ({"words": [(2, 2)]}, "word 0"),
        ({"words": [(3, 5), (0, 2)]}, "word 1"),
        ({"words": [(8, 11)]}, "word 0"),
    ],
)
def test_bad_input_is_refused(options, match):
    swap = swap_words if "words" in options else swap_tokens
    with pytest.raises(InputError, match=match):
        swap(10, **{"ratio": 0.1, "seed": 0, **options})


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 30), ratios=TWO_RATIOS, width=st.integers(1, 40), seed=SEEDS)
def test_jitter_stays_within_its_width_and_never_goes_below_zero(n, ratios, width, seed):
    few, many = (jittered_distances(n, ratio, width, seed=seed) for ratio in ratios)
    assert (many >= 0).all()
    assert (many - true_distances(n)).abs().max() <= width
    assert not many.triu(1).any()
    changed = few != true_distances(n)
    assert torch.equal(few[changed], many[changed])


def test_full_jitter_is_uniform_over_the_steps_that_are_possible():
    steps = jittered_distances(300, 1, 2, seed=0) - true_distances(300)
    assert torch.equal(steps != 0, torch.ones(300, 300).tril().bool())
    counts = steps[torch.ones(300, 300).tril(-2).bool()].add(2).bincount(minlength=5).double()
    expected = torch.tensor([0.25, 0.25, 0.0, 0.25, 0.25], dtype=torch.float64)
    torch.testing.assert_close(counts / counts.sum(), expected, atol=0.01, rtol=0)


@pytest.mark.parametrize(("ratio", "width"), [(1.5, 2), (0.5, 0)])
def test_a_jitter_that_makes_no_sense_is_refused(ratio, width):
    with pytest.raises(InputError):
        jittered_distances(5, ratio, width, seed=0)
