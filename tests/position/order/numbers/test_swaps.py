"""What any set of swaps must be, for any seed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.errors import InputError
from tl_posgen.position.order.numbers.swaps import jittered_distances, swap_tokens, swap_words

REACHES = st.sampled_from(["adjacent", "window", "uniform"])
RATIOS = st.floats(0, 1)
SEEDS = st.integers(0, 2**31)
LENGTHS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), min_size=2, max_size=30)


def word_spans(lengths: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], int]:
    """Words of given lengths, each after a gap of given length."""
    words, end = [], 0
    for gap, length in lengths:
        words.append((end + gap, end + gap + length))
        end += gap + length
    return words, end


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 80), ratio=RATIOS, reach=REACHES, seed=SEEDS, window=st.integers(1, 12))
def test_swaps_are_a_self_inverse_permutation_that_moves_exactly_what_it_says(n, ratio, reach, seed, window):
    swaps = swap_tokens(n, ratio, reach, seed=seed, window=window)
    identity = torch.arange(n)
    assert torch.equal(swaps.permutation[swaps.permutation], identity)
    assert torch.equal(swaps.moved, swaps.permutation != identity)
    assert swaps.ratio == 2 * len(swaps.pairs) / n
    furthest = {"adjacent": 1, "window": window, "uniform": n}[reach]
    assert (swaps.permutation - identity).abs().max() <= furthest


@settings(max_examples=40, deadline=None)
@given(ratio=st.floats(0, 0.5), reach=REACHES, seed=SEEDS)
def test_the_ratio_is_met_to_one_token_up_to_a_half(ratio, reach, seed):
    assert abs(swap_tokens(100, ratio, reach, seed=seed).ratio - ratio) <= 0.01 + 1e-12


@settings(max_examples=40, deadline=None)
@given(low=RATIOS, high=RATIOS, reach=REACHES, seed=SEEDS)
def test_the_swaps_of_a_lower_ratio_are_among_those_of_a_higher(low, high, reach, seed):
    low, high = sorted((low, high))
    few, many = (swap_tokens(60, ratio, reach, seed=seed) for ratio in (low, high))
    assert torch.equal(few.pairs, many.pairs[: len(few.pairs)])
    assert not (few.moved & ~many.moved).any()


def test_ratio_zero_changes_nothing():
    swaps = swap_tokens(50, 0, seed=3)
    assert torch.equal(swaps.permutation, torch.arange(50))
    assert swaps.ratio == 0


def test_ratio_one_moves_every_free_token_when_partners_may_be_anywhere():
    assert swap_tokens(51, 1, "uniform", seed=3).ratio == 50 / 51


@pytest.mark.parametrize("reach", ["adjacent", "window"])
def test_near_swaps_go_on_until_no_free_pair_is_left(reach):
    window = {"adjacent": 1, "window": 4}[reach]
    left = (~swap_tokens(200, 1, reach, seed=0, window=window, protected=()).moved).nonzero()[:, 0]
    assert (left.diff() > window).all()


def test_seeds_differ_and_repeat():
    first, again, other = (swap_tokens(100, 0.3, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.permutation, again.permutation)
    assert not torch.equal(first.permutation, other.permutation)


def test_the_global_generator_is_left_alone():
    before = torch.random.get_rng_state()
    swap_tokens(100, 0.3, "window", seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_window_swaps_at_every_distance_up_to_its_width():
    gaps = torch.cat([swap_tokens(200, 0.2, "window", seed=seed, window=3).pairs.diff().abs() for seed in range(20)])
    counts = gaps.flatten().bincount(minlength=4)[1:]
    assert (counts > 0.25 * counts.sum()).all()


def test_every_place_is_equally_likely_to_move():
    moved = sum(swap_tokens(20, 0.3, "uniform", seed=seed).moved.double() for seed in range(400)) / 400
    torch.testing.assert_close(moved[1:], torch.full((19,), 6 / 19, dtype=torch.float64), atol=0.1, rtol=0)


@settings(max_examples=30, deadline=None)
@given(reach=REACHES, seed=SEEDS)
def test_protected_places_are_never_moved(reach, seed):
    protected = [0, 7, *range(30, 40)]
    assert not swap_tokens(40, 1, reach, seed=seed, protected=protected).moved[protected].any()


def test_a_draw_depends_on_how_many_places_are_free_and_not_on_where_they_lie():
    late, early = swap_tokens(40, 1, seed=0, protected=range(30)), swap_tokens(10, 1, seed=0, protected=())
    assert torch.equal(late.pairs, early.pairs + 30)


def test_the_first_token_is_protected_unless_set_free():
    assert not any(swap_tokens(4, 1, seed=seed).moved[0] for seed in range(20))
    assert any(swap_tokens(4, 1, seed=seed, protected=()).moved[0] for seed in range(20))


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, ratio=RATIOS, reach=REACHES, seed=SEEDS)
def test_swapped_words_stay_whole_and_the_others_stay_in_order(lengths, ratio, reach, seed):
    words, n = word_spans(lengths)
    swaps = swap_words(n, words, ratio, reach, seed=seed, window=3)
    order = swaps.permutation.tolist()
    assert sorted(order) == list(range(n))
    swapped = {number for pair in swaps.pairs.tolist() for number in pair}
    for number, (start, stop) in enumerate(words):
        at = order.index(start)
        assert order[at : at + stop - start] == list(range(start, stop))
        assert swaps.moved[at : at + stop - start].tolist() == [number in swapped] * (stop - start)
    still = [token for token, moved in zip(order, swaps.moved.tolist(), strict=True) if not moved]
    assert still == sorted(still)


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, reach=REACHES, seed=SEEDS)
def test_words_change_places_with_their_partners(lengths, reach, seed):
    words, n = word_spans(lengths)
    swaps = swap_words(n, words, 0.5, reach, seed=seed, window=3)
    order = swaps.permutation.tolist()
    sequence = [number for token in order for number, (start, _) in enumerate(words) if token == start]
    expected = list(range(len(words)))
    for one, other in swaps.pairs.tolist():
        expected[one], expected[other] = other, one
    assert sequence == expected


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, low=RATIOS, high=RATIOS, seed=SEEDS)
def test_word_swaps_are_nested_over_the_ratio(lengths, low, high, seed):
    words, n = word_spans(lengths)
    few, many = (swap_words(n, words, ratio, seed=seed) for ratio in sorted((low, high)))
    assert torch.equal(few.pairs, many.pairs[: len(few.pairs)])


@settings(max_examples=30, deadline=None)
@given(ratio=RATIOS, reach=REACHES, seed=SEEDS)
def test_words_of_one_token_swap_like_tokens(ratio, reach, seed):
    words = [(position, position + 1) for position in range(40)]
    one, other = swap_words(40, words, ratio, reach, seed=seed), swap_tokens(40, ratio, reach, seed=seed)
    assert torch.equal(one.permutation, other.permutation)
    assert torch.equal(one.moved, other.moved)


def test_a_word_with_a_protected_token_stays():
    words = [(0, 2), (2, 4), (4, 6)]
    swaps = swap_words(6, words, 1, seed=0, protected=[3])
    assert swaps.permutation.tolist() == [4, 5, 2, 3, 0, 1]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"ratio": -0.1}, "outside"),
        ({"ratio": 1.1}, "outside"),
        ({"ratio": float("nan")}, "outside"),
        ({"ratio": 0.1, "protected": [10]}, "position 10"),
        ({"ratio": 0.1, "reach": "window", "window": 0}, "swaps: .*window.*1 or more"),
    ],
)
def test_bad_input_is_refused(options, match):
    with pytest.raises(InputError, match=match):
        swap_tokens(10, seed=0, **options)


@pytest.mark.parametrize("protected", [5, [0.5]])
def test_protected_places_that_are_no_positions_are_refused(protected, unchecked):
    with pytest.raises(InputError, match=r"protected=.*: give positions"):
        swap_tokens(10, 0.1, seed=0, protected=protected)


@pytest.mark.parametrize("words", [[(0, 2), (1, 3)], [(2, 2)], [(3, 5), (0, 2)], [(8, 11)]])
def test_words_that_overlap_or_leave_the_text_are_refused(words):
    with pytest.raises(InputError, match="word"):
        swap_words(10, words, 0.5, seed=0)


def true_distances(n: int) -> torch.Tensor:
    return (torch.arange(n)[:, None] - torch.arange(n)).clamp(min=0)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 30), ratio=RATIOS, width=st.integers(1, 40), seed=SEEDS)
def test_jitter_stays_within_its_width_and_never_goes_below_zero(n, ratio, width, seed):
    distance = jittered_distances(n, ratio, width, seed=seed)
    assert (distance >= 0).all()
    assert (distance - true_distances(n)).abs().max() <= width
    assert not distance.triu(1).any()


def test_full_jitter_changes_every_visible_distance():
    changed = jittered_distances(30, 1, 2, seed=0) != true_distances(30)
    assert torch.equal(changed, torch.ones(30, 30).tril().bool())


def test_jitter_is_uniform_over_the_steps_that_are_possible():
    distance = jittered_distances(300, 1, 2, seed=0) - true_distances(300)
    counts = distance[torch.ones(300, 300).tril(-2).bool()].add(2).bincount(minlength=5).double()
    expected = torch.tensor([0.25, 0.25, 0.0, 0.25, 0.25], dtype=torch.float64)
    torch.testing.assert_close(counts / counts.sum(), expected, atol=0.01, rtol=0)


@settings(max_examples=20, deadline=None)
@given(low=RATIOS, high=RATIOS, seed=SEEDS)
def test_jitter_of_a_lower_ratio_is_part_of_that_of_a_higher(low, high, seed):
    few, many = (jittered_distances(20, ratio, 3, seed=seed) for ratio in sorted((low, high)))
    changed = few != true_distances(20)
    assert torch.equal(few[changed], many[changed])


@pytest.mark.parametrize(("ratio", "width"), [(1.5, 2), (0.5, 0)])
def test_a_jitter_that_makes_no_sense_is_refused(ratio, width):
    with pytest.raises(InputError):
        jittered_distances(5, ratio, width, seed=0)
