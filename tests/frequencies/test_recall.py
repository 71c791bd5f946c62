"""The fall of recall, from numbers that are given."""

import numpy as np
import pytest
from made_up import dataset_of, result_of

from tl_posgen.errors import InputError
from tl_posgen.frequencies import Recall
from tl_posgen.hooks import move_coordinate


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        ("median", {}, "value = 'median'"),
        ("zero", {"largest": "no"}, "largest = 'no'"),
        ("zero", {"seed": 1.5}, "seed"),
    ],
)
def test_another_place_of_a_coordinate_is_refused(mini, unchecked, value, options, message):
    with pytest.raises(InputError, match=message):
        move_coordinate(mini, value, **options)


def test_the_interval_of_a_fall_does_not_leave_what_a_fall_can_be():
    """Of recall, a share, it is in [-1, 1]; of a loss it may be anything."""
    values = np.array([[1.0, 1, 1, 0], [0, 0, 0, 1]])
    data = dataset_of(
        {"recall": (("condition", "item"), values), "copy_loss": (("condition", "item"), values)},
        condition=["unchanged", "largest at mean"],
    )
    numbers = result_of(Recall(), data).numbers
    recall, loss = (numbers.measure.falls(numbers, name)["largest at mean"] for name in ("recall", "copy_loss"))
    assert (recall.value, loss.value) == (0.5, 0.5)
    assert loss.high == pytest.approx(0.5 + 3.1824 / 2, abs=1e-4)
    assert (recall.low, recall.high) == (-1, 1)
