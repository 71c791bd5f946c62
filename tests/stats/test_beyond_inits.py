"""Correlations said to go beyond random init: how often by chance, and when one does."""

import numpy as np
import pytest

from tl_posgen.stats.beyond_inits import FAMILY_LEVEL, FEWEST_INITS, beyond_inits

ENDS = np.array([0.1]), np.array([0.9])


def drawn(runs: int, pairs: int, seed: int = 0) -> np.ndarray:
    """[run, model, pair]: correlations of a model and its random inits, all of one distribution."""
    return np.tanh(np.random.default_rng(seed).normal(0.3, 0.2, (runs, 1 + FEWEST_INITS, pairs)))


def test_of_correlations_that_training_does_not_change_as_many_are_told_as_are_said_to_be_by_chance():
    ends = np.full(14, 0.1), np.full(14, 0.9)
    found = sum(
        int(beyond_inits(own, *ends, inits).sum()) for own, *rest in drawn(1000, 14) for inits in [np.array(rest)]
    )
    assert found / 1000 < 2 * FAMILY_LEVEL


@pytest.mark.parametrize(
    ("r", "low", "high", "told"),
    [
        (0.9, 0.5, 0.95, True),
        (-0.9, -0.95, -0.5, True),
        (0.9, -0.1, 0.95, False),  # the interval holds zero
        (0.31, 0.1, 0.5, False),  # as in random inits
        (np.nan, np.nan, np.nan, False),
        (1.0, 0.9, 1.0, True),
    ],
)
def test_a_correlation_is_told_far_from_those_of_random_inits(r, low, high, told):
    inits = drawn(1, 1)[0, 1:]
    found = beyond_inits(*(np.array([one]) for one in (r, low, high)), inits)
    assert found.tolist() == [told]


def test_with_few_inits_or_an_undefined_one_nothing_is_told():
    inits = drawn(1, 1)[0, 1:]
    assert beyond_inits(np.array([0.95]), *ENDS, inits).all()
    assert not beyond_inits(np.array([0.95]), *ENDS, inits[1:]).any()
    inits[3] = np.nan
    assert not beyond_inits(np.array([0.95]), *ENDS, inits).any()
