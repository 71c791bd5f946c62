"""Checkpoints are refused before anything is loaded."""

import pytest

from tl_posgen.errors import InputError
from tl_posgen.models.checkpoints import Checkpoints


@pytest.mark.parametrize(
    ("checkpoints", "message"),
    [([], "give one at least"), ("step1", r"give a list of them"), (["a/step1", "b/step1"], "two have one name")],
)
def test_checkpoints_that_are_no_sequence_of_them_are_refused(checkpoints, message):
    with pytest.raises(InputError, match=message):
        Checkpoints(checkpoints)
