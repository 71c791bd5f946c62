"""Correlations said to go beyond random init: how often by chance, and when one does."""

import numpy as np
import pytest

from tl_posgen.stats.beyond_inits import CHANCE, FEWEST_INITS, beyond_inits

ENDS = np.array([0.1]), np.array([0.9])


def drawn(runs: int, pairs: int, deviation: float | np.ndarray = 0.2) -> np.ndarray:
    """[run, model, pair]: correlations of a model and its random inits, all of one distribution."""
    return np.tanh(0.1 + np.random.default_rng(0).normal(0, 1, (runs, 1 + FEWEST_INITS, pairs)) * deviation)


@pytest.mark.parametrize("deviation", [0.3, np.linspace(0.1, 0.6, 84), np.repeat([0.6, 0.15], [21, 63])])
def test_of_correlations_that_training_does_not_change_no_more_are_told_than_are_said_to_be(deviation):
    ends = np.full(84, 0.1), np.full(84, 0.9)
    runs = drawn(2000, 84, deviation)
    found = sum(int(beyond_inits(own, *ends, np.array(inits)).sum()) for own, *inits in runs)
    assert found / len(runs) < CHANCE


@pytest.mark.parametrize(
    ("r", "low", "high", "told"),
    [
        (0.9, 0.5, 0.95, True),
        (-0.9, -0.95, -0.5, True),
        (0.9, -0.1, 0.95, False),  # the interval holds zero
        (0.1, 0.05, 0.2, False),  # as in random inits
        (np.nan, np.nan, np.nan, False),
        (1.0, 0.9, 1.0, True),
    ],
)
def test_a_correlation_is_told_far_from_those_of_random_inits(r, low, high, told):
    inits = drawn(1, 1)[0, 1:]
    found = beyond_inits(*(np.array([one]) for one in (r, low, high)), inits)
    assert found.tolist() == [told]


def test_a_pair_that_goes_together_less_than_without_training_is_not_told():
    inits = np.linspace(0.9, 0.94, FEWEST_INITS)[:, None]
    assert not beyond_inits(np.array([0.3]), *ENDS, inits).any()
    assert beyond_inits(np.array([0.99]), *ENDS, inits).all()


def test_with_few_inits_or_an_undefined_one_nothing_is_told():
    inits = drawn(1, 1)[0, 1:]
    assert beyond_inits(np.array([0.95]), *ENDS, inits).all()
    assert not beyond_inits(np.array([0.95]), *ENDS, inits[1:]).any()
    inits[3] = np.nan
    assert not beyond_inits(np.array([0.95]), *ENDS, inits).any()
