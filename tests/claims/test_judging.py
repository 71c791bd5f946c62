"""Criteria: thresholds are reached at their value, nulls exceeded, and several numbers judged together."""

import math
from dataclasses import replace

import pytest
from judged import CLAIMS
from made_up import dataset_of, result_of

from tl_posgen.claims.judging import Claim, Criterion, Group, ends_of_nulls, joint_verdict, judge, or_lacking
from tl_posgen.core.number import Number
from tl_posgen.coupling import Coupling


@pytest.mark.parametrize(
    ("value", "thresholds", "verdict"),
    [
        (0.9, {"held": 0.9, "partly": 0.5}, "held"),
        (0.89, {"held": 0.9, "partly": 0.5}, "partly"),
        (0.5, {"held": 0.9, "partly": 0.5}, "partly"),
        (0.49, {"held": 0.9, "partly": 0.5}, "not held"),
        (math.nan, {"held": 0.9, "partly": 0.5}, "open"),
        (0.9, {"held": 0.9, "sign": -1}, "held"),
        (0.91, {"held": 0.9, "sign": -1, "otherwise": "detectable"}, "detectable"),
        (0.95, {"held": 0.9, "beyond": {"random init": [0.1], "shuffled": [0.95]}}, "not held"),
        (0.95, {"held": 0.9, "beyond": {"random init": [0.1, math.nan]}}, "open"),
        (0.8, {"held": 0.9, "beyond": {"random init": [0.1, 0.7]}, "otherwise": "partly"}, "partly"),
        (0.4, {"beyond": {"random init": [0.4, 0.6]}, "sign": -1, "otherwise": "held"}, "not held"),
        (0.95, {"held": 0.9, "beyond": {"random init": [0.8]}, "end": 0.8}, "not held"),  # the interval reaches it
        (0.95, {"held": 0.9, "beyond": {"random init": [0.8]}, "end": math.nan}, "open"),
        (0.95, {"held": 0.9, "beyond": {}}, "open"),
        (0.3, {"beyond": {"random init": [0.4, 0.6]}, "sign": -1, "otherwise": "held"}, "held"),
    ],
)
def test_thresholds_are_reached_at_their_value_and_nulls_exceeded(value, thresholds, verdict):
    assert Criterion("r", value, **thresholds).verdict == verdict


BEYOND = {"random init": [0.2]}


@pytest.mark.parametrize(
    ("values", "how", "verdict"),
    [
        ((0.9, 0.6), {}, "partly"),
        ((0.9, 0.1), {}, "not held"),
        ((0.9, math.nan), {}, "open"),
        ((), {}, "open"),
        ((0.9, 0.1), {"beyond": BEYOND, "otherwise": "detectable"}, "detectable"),  # some are beyond their nulls
    ],
)
def test_of_several_numbers_the_least_decides(values, how, verdict):
    assert joint_verdict([Criterion("r", value, held=0.9, partly=0.5, **how) for value in values]) == verdict


@pytest.mark.parametrize(
    ("value", "null", "verdict"), [(0.9, 0.2, "partly"), (0.1, 0.2, "not held"), (0.1, math.nan, "open")]
)
def test_the_rule_of_a_group_is_overruled_by_a_null_and_by_what_is_not_defined(value, null, verdict):
    one = Criterion("r", value, beyond={"random init": [null]}, otherwise="held")
    inner = Group("partly", [one, Criterion("loss", 0.3, 0.2)], "thirds")
    assert (inner.verdict, Group("partly", [inner]).verdict) == (verdict, verdict)
    assert inner.margin == f"thirds: {one.margin}, loss 0.30, +0.10 from 0.20"


def test_nulls_that_are_not_defined_are_said_once():
    none = Number(0.5, by_null={"random init": (math.nan,)})
    claim = Claim("slash 9", "", "", (), lambda: [Criterion.of(name, none) for name in ("high", "low")])
    assert judge(claim, {}).null == "random init: high, low not defined"


def test_a_null_that_lacks_what_is_measured_does_not_do_as_well():
    share = Criterion("share", 0.9, 0.8, beyond=or_lacking({"random init": [math.nan]}), end=0.85)
    margin = "share 0.90, +0.10 from 0.80 (low end 0.85, no null model has any)"
    assert (share.verdict, share.margin) == ("held", margin)
    assert Criterion("share", 0.9, 0.8, beyond=or_lacking({}), end=0.85).verdict == "open"


def test_the_interval_of_each_null_model_is_that_of_its_own_prompts():
    """Student's interval over four prompts, by hand."""
    scores = [1.1, 1.2, 1.4, 1.3], [2.0, 2.2, 2.1, 2.5], [1.9, 1.7, 1.6, 1.8]
    own, *nulls = (dataset_of({"line_shape_score": (("prompt",), one)}) for one in scores)
    numbers = result_of(Coupling(), own, *nulls).numbers
    for seed, (low, high) in enumerate(((1.856257, 2.543743), (1.544574, 1.955426))):
        ends = [ends_of_nulls(numbers, "line_shape_score", end)["random init"][seed] for end in ("low", "high")]
        assert ends == pytest.approx([low, high], abs=1e-5)


def test_every_threshold_of_a_claim_stands_in_its_words():
    for claim in CLAIMS.values():
        for threshold in claim.thresholds.values():
            assert f"{threshold:g}" in claim.criterion or f"{threshold:.0%}" in claim.criterion
    told = Claim("a", "", "{least:.1f} of {inits}", (), thresholds={"least": 0.5})
    assert (told.criterion, replace(told, inits=2).criterion) == ("0.5 of 1", "0.5 of 1")
