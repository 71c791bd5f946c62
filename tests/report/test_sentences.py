"""Numbers in sentences."""

import math

import pytest
from tl_posgen.report.sentences import at_head, beside, said, with_interval
from tl_posgen.summary import NullSummary

from tl_posgen.report.columns import cell, short


@pytest.mark.parametrize("form", [".3f", ".1%", "+.2f", ".0%", "+.3f"])
def test_a_zero_has_no_minus_sign(form):
    expected = format(0.0, form)
    own = {"r": -1e-9, "r_low": -1e-9, "r_high": -0.0}
    assert said(-1e-9, form) == expected
    assert beside({"r": -1e-9}, NullSummary([own]), "r", form) == f"{expected} (random init {expected})"
    assert with_interval(own, "r", form) == f"{expected} [{expected}, {expected}]"
    assert at_head("3.6", -1e-9, form) == f"layer 3 head 6 ({expected})"


def test_a_table_in_the_terminal_has_none_either():
    assert (cell(-1e-9), short(-1e-9)) == ("0.000", ".000")
    assert (cell(-0.25), short(-0.25), short(-10.25)) == ("-0.250", "-.250", "-10.250")


@pytest.mark.parametrize("value", [None, math.nan])
def test_a_number_that_could_not_be_had_is_said_so(value):
    assert said(value, ".3f") == "not defined"


def test_what_is_no_zero_keeps_its_sign():
    assert (said(-0.25, ".2f"), said(-math.inf, ".2f"), said(-3, "g")) == ("-0.25", "-inf", "-3")


def test_numbers_that_not_every_random_init_has_are_those_of_the_others():
    for seeds in ([{"r": 1.0, "head": 2.0}, {"r": 2.0}], [{"r": 2.0}, {"r": 1.0, "head": 2.0}]):
        null = NullSummary(seeds)
        assert dict(null) == {"r": 1.5, "head": 2.0}
        assert len(null) == 2
        assert null.spread("head") is None
        assert "other" not in null
