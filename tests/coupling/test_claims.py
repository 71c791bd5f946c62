"""The claims on coupling: verdicts at their criteria, and words with the numbers of the summaries."""

import numpy as np
import pytest
from declared import result_of

from tl_posgen.core.claim import judgement_of
from tl_posgen.coupling.claims import CLAIMS


def numbers(**changed):
    ends = {"coupling_low": 0.28, "coupling_high": 0.32, "chance": 0.02, "swapped": 0.1, "blocks": 4}
    ends |= {"signed": 0.1, "chance_signed": 0.0, "negative_share": 0.4}
    path = {"line_shape_score": 1.2, "growth_r2": 0.95, "expodistance": 0.3}
    return {"coupling": 0.3, **ends, **path, **changed}


def judge(number, own, *nulls):
    claim = CLAIMS[number]
    return judgement_of(claim, {claim.needs[0]: result_of(own, *nulls)}, {})


@pytest.mark.parametrize(
    ("own", "null", "verdict"),
    [
        ({}, {"coupling_high": 0.03}, "held"),
        ({"coupling_low": 0.2}, {"coupling_high": 0.19}, "held"),
        ({"coupling_low": 0.2}, {"coupling_high": 0.2}, "not held"),
        ({"coupling_low": 0.1}, {"coupling_high": 0.03}, "partly"),
        ({"coupling_low": 0.1}, {"coupling_high": 0.1}, "not held"),
        ({"coupling_low": 0.1, "chance": 0.1}, {"coupling_high": 0.03}, "not held"),
        ({}, None, "open"),
        ({"coupling_low": np.nan}, {"coupling_high": np.nan}, "open"),
    ],
)
def test_alignment_must_clear_random_bases_and_random_init(own, null, verdict):
    nulls = [] if null is None else [numbers(**null)]
    assert judge(0, numbers(**own), *nulls).verdict == verdict


@pytest.mark.parametrize(
    ("value", "null", "verdict"),
    [
        (1.25, 2.0, "held"),
        (1.3, 2.0, "partly"),
        (2.1, 2.0, "not held"),
        (1.2, 1.22, "not held"),  # straight, but no straighter than random init
        (1.3, None, "open"),
        (np.nan, 2.0, "open"),
    ],
)
def test_straightness(value, null, verdict):
    nulls = [] if null is None else [with_ends("line_shape_score", null)]
    assert judge(1, with_ends("line_shape_score", value), *nulls).verdict == verdict


@pytest.mark.parametrize(
    ("value", "null", "verdict"),
    [
        (0.95, 0.8, "held"),
        (0.95, 0.91, "partly"),  # random init grows exponentially too
        (0.91, 0.89, "partly"),  # the intervals overlap
        (0.89, 0.1, "not held"),
        (0.95, None, "open"),
    ],
)
def test_growth(value, null, verdict):
    nulls = [] if null is None else [with_ends("growth_r2", null)]
    assert judge(2, with_ends("growth_r2", value), *nulls).verdict == verdict


@pytest.mark.parametrize("number", [0, 1, 2])
def test_what_rests_on_an_interval_is_open_where_there_is_none(number):
    none = {
        f"{name}_{end}": np.nan for name in ("coupling", "line_shape_score", "growth_r2") for end in ("low", "high")
    }
    whole, far = both(0.95, 1.2), both(0.5, 2.0) | {"coupling_high": 0.03}
    assert judge(number, whole, far).verdict == "held"
    assert judge(number, whole | none, far).verdict == "open"
    assert judge(number, whole, far | none).verdict == "open"
    assert judge(number, whole, far, far | none).verdict == judge(number, whole, far | none, far).verdict == "open"


def test_growth_and_straightness_have_to_clear_every_random_init():
    own, far, near = both(0.95, 1.2), both(0.5, 2.0), both(0.92, 1.21)
    for nulls in ([far, near], [near, far]):
        assert [judge(number, own, *nulls).verdict for number in (1, 2)] == ["not held", "partly"]


def both(r2, score):
    """Growth and straightness with their intervals."""
    growth = {key: value for key, value in with_ends("growth_r2", r2).items() if key.startswith("growth")}
    return with_ends("line_shape_score", score) | growth


def with_ends(name, value):
    return numbers(**{name: value, f"{name}_low": value - 0.02, f"{name}_high": value + 0.02})


def training_of(values, lows, highs):
    key = "coupling_coupling"
    ends = {f"{key}_low": lows[-1], f"{key}_first_high": highs[0]}
    top = [0, 10, 20][int(np.argmax(values))]
    course = {f"{key}_over_steps": values, f"{key}_largest_step": top}
    return {"steps": [0, 10, 20], key: values[-1], **ends, **course}


@pytest.mark.parametrize(
    ("values", "verdict"), [([0.1, 0.2, 0.3], "held"), ([0.1, 0.4, 0.3], "partly"), ([0.1, 0.3, 0.12], "not held")]
)
def test_training(values, verdict):
    found = judge(3, training_of(values, [v - 0.05 for v in values], [v + 0.05 for v in values]))
    assert found.verdict == verdict
    assert found.measured.startswith(f"coupling {values[0]:.3f} at step 0, ")
    assert found.measured.endswith(f"{values[-1]:.3f} at step 20")
    assert found.null == "step 0 is the random initialisation"


def test_training_without_coupling_is_open():
    assert judge(3, {"steps": [0], "curves": []}).verdict == "open"


def test_claims_on_real_results_say_the_numbers_of_the_summaries(of_mini):
    own, null = of_mini.summary, of_mini.null_summary
    words = [claim.judge(of_mini) for claim in CLAIMS[:3]]
    assert words[0].measured == (
        f"coupling {own['coupling']:.3f}, random bases {own['chance']:.3f}, left with right {own['swapped']:.3f}; "
        f"signed {own['signed']:.3f}, random bases {own['chance_signed']:.3f}, {own['negative_share']:.0%} of the "
        "diagonal negative"
    )
    assert words[1].null == f"line-shape score {null['line_shape_score']:.2f} over 4 layers"
    assert words[2].measured == (
        f"R² of ln |x| against depth {own['growth_r2']:.2f}, expodistance {own['expodistance']:.2f}"
    )


def between(low, chance=0.02):
    kinds = ("self", "same_input", "same_output")
    ends = {f"{kind}{end}": low for kind in kinds for end in ("", "_low", "_high")}
    return {"tokens": 3, **ends, **{f"{kind}_chance": chance for kind in kinds}}


@pytest.mark.parametrize(
    ("own", "null", "verdict"),
    [(0.3, 0.2, "held"), (0.3, 0.3, "not held"), (0.3, None, "open"), (0.01, 0.0, "not held"), (np.nan, 0.0, "open")],
)
def test_coupling_between_tokens_must_clear_random_bases_and_random_init(own, null, verdict):
    nulls = [] if null is None else [between(null)]
    assert judge(4, between(own), *nulls).verdict == verdict


def test_some_kinds_are_a_part():
    assert judge(4, between(0.3) | {"same_output_low": 0.01}, between(0.0)).verdict == "partly"


def test_every_random_init_has_to_be_cleared():
    assert judge(4, between(0.3), between(0.0), between(0.4)).verdict == "not held"
    assert judge(0, numbers(), numbers(coupling_high=0.03), numbers(coupling_high=0.9)).verdict == "not held"
