"""Several random inits: rows below a table are means over them, as sentences say."""

import pytest

import tl_posgen
from tl_posgen.errors import InputError


@pytest.fixture(scope="module")
def report():
    cut = {"length": 24, "n_prompts": 2, "progress": False}
    return tl_posgen.analyze("mini", tl_posgen.bundled_text(), measures="variance", nulls=3, **cut)


def test_the_row_of_a_kind_is_the_mean_over_its_seeds(report):
    result, number = report["variance"], report["variance"].numbers("interaction")
    values = [result.frame(init=seed)["interaction"].mean() for seed in range(3)]
    assert number.by_null["random init"] == pytest.approx(values)
    assert report.frame("random init")["interaction_share"].mean() == pytest.approx(sum(values) / 3)
    summary = report.summary()["random init"]
    assert (summary["seeds"], summary["mean"]["interaction_share"]) == ([0, 1, 2], pytest.approx(sum(values) / 3))
    assert "(random init) of 3 seeds" in report.html()


def test_a_head_is_named_as_everywhere(report):
    numbers = report["variance"].numbers
    assert str(numbers("share", head="L3H1")) == str(numbers("share", layer=3, head=1))
    with pytest.raises(InputError, match="no layer 9"):
        numbers("share", head="L9H1")
