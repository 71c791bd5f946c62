"""The claims on coupling: verdicts at their criteria, and words with the numbers of the results."""

import numpy as np
import pytest
from made_up import NOT_HELD, around, dataset_of, result_of, verdicts_beside_nulls

from tl_posgen.core.claim import each_null, judgement_of
from tl_posgen.coupling import Coupling, TokenCoupling
from tl_posgen.coupling.claims import CLAIMS, OF_TOKENS
from tl_posgen.studies.emergence import Emergence


def numbers(coupling=(0.3, 0.28, 0.32), chance=0.02, score=(1.2, 1.18, 1.22), r2=(0.95, 0.93, 0.97)):
    """Of one model, each number with the ends of its interval."""
    of_bases, of_versions = ("version", "bases", "end"), ("version",)
    variables = {
        "coupling": (of_bases, [[coupling, around(0.1, 0)], [around(0.1, 0), around(0.1, 0)]]),
        "chance": (of_versions, [chance, 0.0]),
        "negative_share": ((), 0.4),
        "line_shape_score": (("end",), score),
        "growth_r2": (("end",), r2),
        "expodistance": ((), 0.3),
        "log_norm": (("state",), np.zeros(5)),
    }
    labels = {"version": ["absolute", "signed"], "bases": ["aligned", "swapped"]}
    return dataset_of(variables, **labels)


def judge(number, own, *inits, measure=None):
    claim, measure = CLAIMS[number], measure or Coupling(k=30)
    return judgement_of(claim, {claim.needs[0]: result_of(measure, own, *inits)}, {})


def aligned(low, chance=0.02):
    return numbers(coupling=(0.3, low, 0.32), chance=chance)


def unaligned(high):
    return numbers(coupling=(0.01, 0.0, high))


def straight(value):
    return numbers(score=around(value, 0.02))


def growing(value):
    return numbers(r2=around(value, 0.02))


@pytest.mark.parametrize(
    ("number", "own", "inits", "verdict"),
    [
        (0, aligned(0.28), [unaligned(0.03)], "held"),
        (0, aligned(0.2), [unaligned(0.19)], "held"),
        (0, aligned(0.2), [unaligned(0.2)], "not held"),
        (0, aligned(0.1), [unaligned(0.03)], "partly"),
        (0, aligned(0.09), [unaligned(0.03)], "detectable"),
        (0, aligned(0.1), [unaligned(0.1)], "not held"),
        (0, aligned(0.1, chance=0.1), [unaligned(0.03)], "not held"),
        (0, aligned(0.28), [unaligned(0.03), unaligned(0.9)], "not held"),  # every random init has to be cleared
        (0, aligned(0.28), [], "open"),
        (0, aligned(np.nan), [unaligned(np.nan)], "open"),
        (1, straight(1.25), [straight(2.0)], "held"),
        (1, straight(1.3), [straight(2.0)], "partly"),
        (1, straight(2.1), [straight(2.0)], "not held"),
        (1, straight(1.2), [straight(1.22)], "not held"),  # straight, but no straighter than random init
        (1, straight(1.3), [], "open"),
        (1, straight(np.nan), [straight(2.0)], "open"),
        (2, growing(0.95), [growing(0.8)], "held"),
        (2, growing(0.96), [growing(0.91)], "partly"),  # random init grows exponentially too
        (2, growing(0.91), [growing(0.89)], "not held"),  # the intervals overlap
        (2, growing(0.89), [growing(0.1)], "detectable"),
        (2, growing(np.nan), [growing(0.1)], "open"),
        (2, growing(0.95), [], "open"),
    ],
)
def test_alignment_straightness_and_growth_must_clear_their_nulls(number, own, inits, verdict):
    assert judge(number, own, *inits).verdict == verdict


FAR = numbers(coupling=(0.01, 0.0, 0.03), score=around(2.0, 0.02), r2=around(0.5, 0.02))
NEAR = numbers(score=around(1.21, 0.02), r2=around(0.92, 0.02))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_what_rests_on_an_interval_is_open_where_there_is_none(number):
    def without(side):
        return side.copy().map(lambda array: array.where(array["end"] == "value") if "end" in array.dims else array)

    whole = numbers()
    assert judge(number, whole, FAR).verdict == "held"
    for own, inits in ((without(whole), [FAR]), (whole, [without(FAR)]), (whole, [FAR, without(FAR)])):
        assert judge(number, own, *inits).verdict == "open"
    assert judge(number, whole, without(FAR), FAR).verdict == "open"


def test_growth_and_straightness_have_to_clear_every_random_init():
    for inits in ([FAR, NEAR], [NEAR, FAR]):
        assert [judge(number, numbers(), *inits).verdict for number in (1, 2)] == ["not held", "not held"]


def test_one_layer_has_no_growth_to_judge_as_a_line_through_two_states_is_exact():
    found = judge(2, numbers().isel(state=slice(2)), FAR.isel(state=slice(2)))
    assert (found.verdict, found.measured) == ("open", "one layer: a line through two states is exact")


def over_training(**variables):
    labels = {"checkpoint": ["step0", "step10", "step20"]}
    data = dataset_of({"step": (("checkpoint",), [0, 10, 20]), **variables}, **labels)
    for name in variables:
        data[name].attrs["measure"] = "coupling"
    return data.assign_attrs(measures=["coupling"])


OVER_TRAINING = {  # by the place of the claim: the number and its words, the half of its interval, the end that decides
    3: ("coupling_coupling", "coupling", 0.05, "low"),
    4: ("coupling_line_shape_score", "line-shape score", 0.05, "high"),
    5: ("coupling_growth_r2", "R² of ln |x| against depth", 0.02, "low"),
}


@pytest.mark.parametrize(
    ("number", "values", "verdict"),
    [
        (3, [0.1, 0.2, 0.3], "held"),
        (3, [0.1, 0.4, 0.3], "partly"),
        (3, [0.1, 0.3, 0.12], "not held"),
        (4, [1.9, 1.6, 1.4], "held"),
        (4, [1.9, 1.3, 1.4], "partly"),
        (4, [1.9, 1.5, 1.85], "not held"),
        (5, [0.5, 0.7, 0.95], "held"),
        (5, [0.5, 0.97, 0.95], "partly"),
        (5, [0.5, 0.6, 0.8], "detectable"),
        (5, [0.5, 0.6, 0.51], "not held"),
    ],
)
def test_training_is_judged_by_its_first_last_and_furthest_checkpoint(number, values, verdict):
    name, words, half, end = OVER_TRAINING[number]
    first, last = values[0], values[-1]
    own = over_training(**{name: (("checkpoint", "end"), [around(value, half) for value in values])})
    found = judge(number, own, measure=Emergence(per_head=False))
    assert found.verdict == verdict
    assert found.measured.startswith(f"{words} {first:.3f} [{first - half:.3f}, {first + half:.3f}] at")
    assert found.measured.endswith(f"{last + half:.3f}] at step 20")
    assert found.null == "step 0 is the random initialisation"
    half = half if end == "high" else -half
    from_first = f"({end} end {last + half:.3f}, {last - first + 2 * half:+.3f} from step 0 {first - half:.3f})"
    of_least = f", {last - 0.9:+.3f} from 0.900" if number == 5 else ""
    assert found.margin == f"at last {last:.3f}{of_least} {from_first}"


def test_one_checkpoint_is_no_training_and_only_step_zero_is_the_random_init():
    values = {"coupling_coupling": (("checkpoint", "end"), [around(value, 0.05) for value in (0.1, 0.2, 0.3)])}
    own = over_training(**values)
    assert judge(3, own.isel(checkpoint=[2]), measure=Emergence(per_head=False)).verdict == "open"
    found = judge(3, own.isel(checkpoint=[1, 2]), measure=Emergence(per_head=False))
    assert found.null == "step 10, the first given, is no random init"


def test_training_without_coupling_is_open():
    assert judge(3, over_training(), measure=Emergence(per_head=False)).verdict == "open"


def test_claims_on_real_results_have_their_numbers(of_mini):
    own = of_mini.numbers
    words = [claim.judge(of_mini) for claim in CLAIMS[:3]]
    random, swapped = own("chance").plain, own("coupling", bases="swapped").plain
    signed, random_signed = (own(name, version="signed").plain for name in ("coupling", "chance"))
    assert words[0].measured == (
        f"coupling {own('coupling').plain:.3f}, random bases {random:.3f}, left with right {swapped:.3f}; signed "
        f"{signed:.3f}, random bases {random_signed:.3f}, {own('negative_share').plain:.0%} of the diagonal negative"
    )
    assert words[1].null == f"random init: line-shape score {own('line_shape_score').inits[0]:.2f} over 4 layers"
    r2, distance = (own(name).plain for name in ("growth_r2", "expodistance"))
    assert words[2].measured == f"R² of ln |x| against depth {r2:.2f}, expodistance {distance:.2f}"


def test_the_interval_of_each_random_init_is_that_of_its_own_prompts(result):
    """High ends over random inits that a claim compares with: Student's interval over four prompts, by hand."""
    for seed, one in zip(("0", "1"), each_null(result.numbers)["random init"], strict=True):
        values = result.sel(init=seed)["line_shape_score"].values
        half = 3.182446 * values.std(ddof=1) / 2
        number = one("line_shape_score")
        assert (number.low, number.high) == pytest.approx((values.mean() - half, values.mean() + half), rel=1e-4)


def between(low, chance=0.02, **of_kind):
    ends = [around(of_kind.get(kind, low), 0) for kind in OF_TOKENS]
    variables = {"coupling": (("kind", "end"), ends), "chance": (("kind", "token"), np.full((3, 3), chance))}
    return dataset_of(variables, kind=list(OF_TOKENS))


@pytest.mark.parametrize(
    ("own", "inits", "verdict"),
    [
        (between(0.3), [between(0.2)], "held"),
        (between(0.3), [between(0.3)], "not held"),
        (between(0.3), [], "open"),
        (between(0.01), [between(0.0)], "not held"),
        (between(np.nan), [between(0.0)], "open"),
        (between(0.3, same_output=0.01), [between(0.0)], "detectable"),
        (between(0.3, same_output=0.15), [between(0.0)], "partly"),
        (between(0.05), [between(0.0)], "detectable"),
        (between(0.3), [between(0.0), between(0.4)], "not held"),
    ],
)
def test_coupling_between_tokens_must_clear_random_bases_and_every_random_init(own, inits, verdict):
    assert judge(6, own, *inits, measure=TokenCoupling(k=30)).verdict == verdict


BEYOND = {  # by claim: numbers beyond all thresholds, and a random init that is far from them
    1: result_of(Coupling(k=30), numbers(), FAR),
    2: result_of(Coupling(k=30), numbers(), FAR),
    3: result_of(Coupling(k=30), numbers(), FAR),
    5: result_of(TokenCoupling(k=30), between(0.3), between(0.1)),
}


@pytest.mark.parametrize("claim", [one for one in CLAIMS if one.needs != ("emergence",)][:4], ids=lambda one: one.name)
def test_no_claim_holds_where_a_null_does_as_well(claim):
    assert verdicts_beside_nulls(claim, BEYOND[claim.number]) == NOT_HELD
